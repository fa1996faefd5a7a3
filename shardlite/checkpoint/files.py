"""The folder of a run: names, publication, manifest and checksums.

A checkpoint is written into a temporary folder and published with one rename. So at whatever moment a process dies, the
checkpoint is either absent or complete. Each file has one checksum (CRC-32) per block of 4 MiB, which is computed while
the file is written. A reader checks the blocks that it needs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast
from zlib import crc32

from shardlite.checkpoint.lease import Lease
from shardlite.errors import CheckpointError

METADATA = ".metadata"
MANIFEST = "shardlite.json"
LOOPS = "loops over parts"
"""Manifest key for the number of finished loops over parts (`order="tree"`). Random numbers depend on this number."""

FORMAT = 1
"""Version of the manifest's format."""

BLOCK = 1 << 22
"""Number of bytes per checksum."""

_PIECE = 1 << 18
"""Number of bytes that are added to a checksum and then written. The number is small, so that the bytes stay in the
processor's cache between the two operations."""

_BUFFER = 1 << 16
"""Bytes of the buffer for small writes. The buffer is smaller than a piece, so pieces are not copied into it."""

_NAME = re.compile(r"(\.old-)?step-(\d+)")

_OURS = b"ranks.0.generators"
"""Name of an entry that only `save` writes."""

REMEDY = "Nothing was loaded; take another checkpoint of the run"

log = logging.getLogger("shardlite")


# ---- finding checkpoints --------------------------------------------------------------------------------------------


def name_of(step: int) -> str:
    """Return the name of the checkpoint of a step. Names sort like steps."""
    return f"step-{step:08}"


def folders_in(root: Path) -> dict[int, Path]:
    """Return the folders of checkpoints by step, in ascending order, including damaged checkpoints.

    If a crash has interrupted the replacement of a checkpoint, its folder may be named `.old-step-<step>`.
    """
    found: dict[int, Path] = {}
    for each in sorted(root.iterdir() if root.is_dir() else (), key=lambda path: path.name):
        if (match := _NAME.fullmatch(each.name)) and each.is_dir():
            found[int(match[2])] = each  # replaces a folder `.old-step-...`, which sorts first
    return dict(sorted(found.items()))


def checkpoints_in(root: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a folder, by step in ascending order."""
    return {step: folder for step, folder in folders_in(root).items() if missing_file(folder) is None}


def missing_file(folder: Path) -> str | None:
    """Return the name of a required file that a checkpoint lacks, or `None`.

    The manifest is not required if another program has written the checkpoint.
    """
    if not (folder / METADATA).is_file():
        return METADATA
    if not (folder / MANIFEST).is_file() and _OURS in (folder / METADATA).read_bytes():
        return MANIFEST
    return None


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint in the folder of a run, or `None` if the folder has no checkpoint.

    Raises:
        CheckpointError: the newest checkpoint lacks a file.
    """
    found = next(reversed(folders_in(Path(path)).values()), None)
    if found is not None:
        check_complete(found)
    return found


def find(path: Path) -> Path:
    """Return `path` if it is a checkpoint, otherwise the newest checkpoint in it.

    Raises:
        CheckpointError: there is no checkpoint, or the checkpoint lacks a file.
    """
    if (path / METADATA).is_file() or (path / MANIFEST).is_file() or _NAME.fullmatch(path.name):
        check_complete(path)
        return path
    found = latest(path)
    if found is None:
        check_folder(path)
        raise CheckpointError(f"there is no checkpoint in {path}")
    return found


def check_folder(path: Path) -> None:
    """Check that no file or dangling link is in place of a folder at `path`.

    Raises:
        CheckpointError: a file or a dangling link is in place of the folder or of one of its parents.
    """
    for place in (*reversed(path.parents), path):
        if os.path.lexists(place) and not place.is_dir():
            gone = place.is_symlink() and not place.exists()
            what = f"a link to {os.readlink(place)}, which does not exist" if gone else "a file"
            remedy = "make that folder, or mount its disk" if gone else "remove it, or name another path"
            raise CheckpointError(f"{path}: {place} is {what}, but checkpoints need a folder: {remedy}")


def check_complete(folder: Path) -> None:
    """Check that a checkpoint has the files that describe its contents.

    Raises:
        CheckpointError: a file is missing.
    """
    if (missing := missing_file(folder)) is not None:
        older = [other for other in checkpoints_in(folder.parent).values() if other != folder]
        remedy = f"; the newest complete checkpoint is {older[-1]}" if older else ""
        raise CheckpointError(f"{folder} is damaged: {missing} is missing. Nothing was loaded{remedy}")


# ---- publication ----------------------------------------------------------------------------------------------------


def next_step(root: Path) -> int:
    """Return the step after that of the newest checkpoint in the folder of a run."""
    return max(folders_in(root), default=-1) + 1


def temporary(root: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of `step` is written."""
    return root / f".saving-{name_of(step)}"


def make_temporary(root: Path, step: int, lease: Lease) -> Path:
    """Remove leftovers of a crash, and make the temporary folder for the checkpoint of `step`."""
    folder = temporary(root, step)
    for number, place in folders_in(root).items():
        if place.name != name_of(number):
            lease.check()
            place.rename(root / name_of(number))
    for leftover in (*root.glob(".saving-*"), *root.glob(".old-*")):
        lease.check()
        discard(leftover)
    folder.mkdir()
    return folder


def discard(leftover: Path) -> None:
    """Remove a leftover of a save, or log a warning. A link is removed, not followed."""
    try:
        leftover.unlink() if leftover.is_symlink() or not leftover.is_dir() else shutil.rmtree(leftover)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s is a leftover of a save and cannot be removed: %s", leftover, error)


def publish(root: Path, step: int, keep: int | None, lease: Lease) -> Path:
    """Publish the finished checkpoint of `step` with a rename, and remove all but the `keep` newest checkpoints.

    An older checkpoint of the same step is replaced. Symbolic links are neither counted nor removed.
    """
    folder, place, old = temporary(root, step), root / name_of(step), root / f".old-{name_of(step)}"
    _sync(folder)
    lease.check()
    if place.exists() or place.is_symlink():
        place.rename(old)
    folder.rename(place)
    _sync(root)
    others = [path for number, path in checkpoints_in(root).items() if number != step and not path.is_symlink()]
    expired = others[: max(0, len(others) + 1 - keep)] if keep is not None else []
    try:
        for each in ([old] if old.exists() or old.is_symlink() else []) + expired:
            lease.check()
            # The folder is renamed before its files are removed, because a folder without some files is no checkpoint.
            discard(each.rename(each.with_name(f".saving-{each.name}-removed")))
    except (CheckpointError, OSError) as error:  # only a warning, because the new checkpoint is published
        log.warning("%s is saved, but earlier checkpoints could not be removed: %s", place, error)
    return place


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, and wait until its content is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- checksums ------------------------------------------------------------------------------------------------------


class SummedFile:
    """A file that is written sequentially, with checksums of its blocks.

    The operating system writes a finished block to the disk while the checksum of the next block is computed.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.size = 0
        self.failure: OSError | None = None
        self._file = file
        self._crc32: list[int] = []

    def write(self, content: Any) -> int:
        """Write bytes, and add them to the checksums."""
        rest = memoryview(content).cast("B")
        nbytes = len(rest)
        while rest:
            if self.size % BLOCK == 0:
                self._crc32.append(0)
            piece = rest[: min(_PIECE, BLOCK - self.size % BLOCK)]
            self._crc32[-1] = crc32(piece, self._crc32[-1])
            self._write_piece(piece)
            rest = rest[len(piece) :]
        return nbytes

    def _write_piece(self, piece: memoryview) -> None:
        try:
            self._file.write(piece)
        except OSError as error:  # `torch.save` would replace this error by one that does not give the reason
            self.failure = error
            raise
        self.size += len(piece)
        if self.size % BLOCK == 0:
            begin_writeback(self._file.fileno(), self.size - BLOCK)

    def flush(self) -> None:
        """Do nothing. `torch.save` calls this method, but the file is flushed only when it is complete."""

    def sums(self) -> dict[str, Any]:
        """Return the size of the file and the checksums of its blocks."""
        return {"size": self.size, "crc32": self._crc32 or [0]}


def begin_writeback(file: int, start: int) -> None:
    """Let the operating system start to write a block to the disk, so that a later `fsync` takes less time.

    Linux starts to write pages when it is advised that they are not needed soon. It does not drop pages before they are
    on the disk.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # some file systems do not support this advice
            os.posix_fadvise(file, start, BLOCK, os.POSIX_FADV_DONTNEED)


@contextmanager
def summed(path: Path) -> Iterator[SummedFile]:
    """Open a new file, to which code inside the context writes. At exit, wait until the file is on the disk.

    Raises:
        CheckpointError: the file cannot be written.
    """
    file = None
    try:
        with path.open("xb", buffering=_BUFFER) as raw:
            file = SummedFile(raw)
            yield file
            raw.flush()
            os.fsync(raw.fileno())
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be written: {(file and file.failure) or error}") from error


def sums_of(path: Path) -> dict[str, Any]:
    """Return the size of a file and the checksums of its blocks."""
    with path.open("rb") as file:
        sums = [crc32(block) for block in iter(lambda: file.read(BLOCK), b"")]
    return {"size": path.stat().st_size, "crc32": sums or [0]}


def check_blocks(folder: Path, manifest: Mapping[str, Any], wanted: Mapping[str, Iterable[tuple[int, int]]]) -> None:
    """Check the blocks that contain the byte ranges `wanted`, which are given as [start, stop) by file name.

    Raises:
        CheckpointError: a file is missing or has the wrong size, or a block has the wrong checksum.
    """
    size = int(manifest["block"])
    for name, ranges in wanted.items():
        path, known = folder / name, manifest["files"].get(name)
        if known is None:
            raise CheckpointError(f"{path} is not a file of this checkpoint. {REMEDY}")
        check_size(path, known["size"])
        blocks = {block for start, stop in ranges for block in range(start // size, -(-stop // size))}
        with path.open("rb") as file:
            for block in sorted(blocks):
                file.seek(block * size)
                if crc32(file.read(size)) != known["crc32"][block]:
                    raise CheckpointError(
                        f"{path} is damaged: bytes {block * size} to {(block + 1) * size} do not have the checksum "
                        f"that they had when they were written. {REMEDY}"
                    )


def check_size(path: Path, least: int, *, exact: bool = True) -> None:
    """Check that a file exists and has exactly `least` bytes. If `exact` is `False`, more bytes are allowed.

    Raises:
        CheckpointError: the file is missing, or has the wrong size.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. {REMEDY}")
    found = path.stat().st_size
    if found < least or (exact and found != least):
        raise CheckpointError(f"{path} has {found} bytes, but had {least} when it was written. {REMEDY}")


# ---- manifest -------------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, facts: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `shardlite.json`, which contains `facts` and the sizes and checksums of all `files` of a checkpoint."""
    manifest = {"format": FORMAT, **facts, "block": BLOCK, "files": dict(files)}
    text = json.dumps({**manifest, "crc32": _crc_of(manifest)}, indent=1)
    write_synced(folder / MANIFEST, text.encode())


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the content of `shardlite.json`, or `None` if another program has written the checkpoint.

    Raises:
        CheckpointError: the file is damaged, or has an unknown format.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_bytes())
        if not isinstance(manifest, dict) or manifest.pop("crc32", None) != _crc_of(manifest):
            raise ValueError("its checksum does not match")
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. {REMEDY}") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')!r}, but this version of ShardLite reads format {FORMAT}: "
            "install the version that wrote it, or a newer one. Nothing was loaded"
        )
    return cast("dict[str, Any]", manifest)


def _crc_of(manifest: Mapping[str, Any]) -> int:
    return crc32(json.dumps(manifest, sort_keys=True).encode())
