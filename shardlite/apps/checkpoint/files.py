"""The folder of a run's checkpoints: names, publication, checksums.

A checkpoint is written beside its place and published by one rename, so it is absent or whole whenever a process dies.
Each file has one CRC-32 per 4 MiB, computed as the file is written; a reader checks the blocks that it needs.
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

from shardlite.apps.checkpoint.lease import Lease
from shardlite.errors import CheckpointError

METADATA = ".metadata"
MANIFEST = "shardlite.json"
LOOPS = "loops over parts"
"""In the manifest: how many a model with order="tree" has finished, from which its random numbers follow."""

BLOCK = 1 << 22
"""Bytes that share a checksum."""

_PIECE = 1 << 18
"""Bytes that are summed and then written: so few that the processor's cache still has them when they are written."""

_HELD = 1 << 16
"""Bytes of small writes that are kept and written together. Fewer than a piece, which is never copied."""

_NAME = re.compile(r"(\.old-)?step-(\d+)")

_OURS = b"ranks.0.generators"
"""An entry that `save` writes, and no other program."""

FORMAT = 1
"""Of the manifest."""

log = logging.getLogger("shardlite")


def name_of(step: int) -> str:
    """Return the name of the checkpoint of a step. Names sort like steps."""
    return f"step-{step:08}"


def folders_in(root: Path) -> dict[int, Path]:
    """Return the folders with the name of a checkpoint by step, in ascending order, damaged ones included.

    A crash while a checkpoint was replaced may have left the old one under another name.
    """
    found: dict[int, Path] = {}
    for each in sorted(root.iterdir() if root.is_dir() else (), key=lambda path: path.name):
        if (match := _NAME.fullmatch(each.name)) and each.is_dir():
            found[int(match[2])] = each  # `.old-` sorts first
    return dict(sorted(found.items()))


def checkpoints_in(root: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by step, in ascending order, without those that lack a file."""
    return {step: folder for step, folder in folders_in(root).items() if missing_file(folder) is None}


def missing_file(folder: Path) -> str | None:
    """Return the name of a file without which a folder is no whole checkpoint, or `None` if it has what it needs.

    A checkpoint that something else than ShardLite has written needs no manifest.
    """
    if not (folder / METADATA).is_file():
        return METADATA
    if not (folder / MANIFEST).is_file() and _OURS in (folder / METADATA).read_bytes():
        return MANIFEST
    return None


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint in the folder of a run, or `None` if there is none.

    Raises:
        CheckpointError: the newest one lacks a file.
    """
    found = next(reversed(folders_in(Path(path)).values()), None)
    if found is not None:
        check_whole(found)
    return found


def check_folder(path: Path) -> None:
    """Raise `CheckpointError` if no folder can be at `path`, because a file or a dangling link is on the way."""
    for place in (*reversed(path.parents), path):
        if os.path.lexists(place) and not place.is_dir():
            gone = place.is_symlink() and not place.exists()
            what = f"a link to {os.readlink(place)}, which is not there" if gone else "a file"
            remedy = "make that folder, or mount its disk" if gone else "remove it, or name another path"
            raise CheckpointError(f"{path}: {place} is {what}, and checkpoints are in a folder: {remedy}")


def check_whole(folder: Path) -> None:
    """Raise `CheckpointError` if a checkpoint lacks a file that says what it holds."""
    if (missing := missing_file(folder)) is not None:
        older = [other for other in checkpoints_in(folder.parent).values() if other != folder]
        remedy = f"; the newest whole checkpoint is {older[-1]}" if older else ""
        raise CheckpointError(f"{folder} is damaged: {missing} is missing. Nothing was loaded{remedy}")


def find(path: Path) -> Path:
    """Return `path` if it is a checkpoint, else the newest one in it.

    Raises:
        CheckpointError: there is none, or it lacks a file.
    """
    if (path / METADATA).is_file() or (path / MANIFEST).is_file() or _NAME.fullmatch(path.name):
        check_whole(path)
        return path
    found = latest(path)
    if found is None:
        check_folder(path)
        raise CheckpointError(f"there is no checkpoint in {path}")
    return found


def begin(root: Path, step: int, lease: Lease) -> Path:
    """Make the folder in which the checkpoint of `step` is written. What a crash has left is put in order."""
    folder = root / f".saving-{name_of(step)}"
    for number, place in folders_in(root).items():
        if place.name != name_of(number):
            lease.check()
            place.rename(root / name_of(number))
    for left in (*root.glob(".saving-*"), *root.glob(".old-*")):
        lease.check()
        discard(left)
    folder.mkdir()
    return folder


def discard(left: Path) -> None:
    """Remove what a save has left. What cannot be removed stays, and is warned of."""
    try:
        left.unlink() if left.is_symlink() or not left.is_dir() else shutil.rmtree(left)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s is left of a save and cannot be removed: %s", left, error)


def publish(folder: Path, root: Path, step: int, keep: int | None, lease: Lease) -> Path:
    """Give a finished checkpoint its name in the place of one that had it, and leave `keep` of them: the newest.

    A checkpoint that is a symbolic link is neither counted nor removed.
    """
    place, old = root / name_of(step), root / f".old-{name_of(step)}"
    _sync(folder)
    lease.check()
    if place.exists() or place.is_symlink():
        place.rename(old)
    folder.rename(place)
    _sync(root)
    others = [path for number, path in checkpoints_in(root).items() if number != step and not path.is_symlink()]
    doomed = others[: max(0, len(others) + 1 - keep)] if keep is not None else []
    try:
        for each in ([old] if old.exists() or old.is_symlink() else []) + doomed:
            _remove(each, lease)
    except (CheckpointError, OSError) as error:  # the new one is published
        log.warning("%s is saved, and earlier checkpoints could not be removed: %s", place, error)
    return place


def _remove(checkpoint: Path, lease: Lease) -> None:
    """Remove a checkpoint. One that is removed in part is no checkpoint: it loses its name first."""
    doomed = checkpoint.with_name(f".saving-{checkpoint.name}-removed")
    lease.check()
    checkpoint.rename(doomed)
    discard(doomed)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, and wait until it is on the disk."""
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
    """A file that is written from beginning to end, and the checksums of its blocks.

    The system writes a finished block to the disk while the next one is summed.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.size = 0
        self.failed: OSError | None = None
        self._file = file
        self._crc32 = [0]
        self._room = BLOCK  # left in the block that is being written

    def write(self, content: Any) -> int:
        """Write bytes, and add them to the checksums."""
        left = memoryview(content).cast("B")
        nbytes = len(left)
        while left:
            if self._room == 0:
                self._crc32.append(0)
                self._room = BLOCK
            piece = left[: min(_PIECE, self._room)]
            self._crc32[-1] = crc32(piece, self._crc32[-1])
            self._put(piece)
            left = left[len(piece) :]
        return nbytes

    def _put(self, piece: memoryview) -> None:
        try:
            self._file.write(piece)
        except OSError as error:  # `torch.save` would raise something else that does not say why
            self.failed = error
            raise
        self.size += len(piece)
        self._room -= len(piece)
        if self._room == 0:
            begin_writeback(self._file.fileno(), self.size - BLOCK)

    def flush(self) -> None:
        """No-op, for `torch.save`: the file is flushed when it is whole."""

    def sums(self) -> dict[str, Any]:
        """Return the size of the file and the checksums of its blocks."""
        return {"size": self.size, "crc32": self._crc32}


def begin_writeback(file: int, begin: int) -> None:
    """Ask the system to begin to write a block to the disk, so that `fsync` has less to wait for.

    Linux does so when it is told that the pages will not be read soon. It keeps those that are not on the disk yet.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # advice, which not every file system takes
            os.posix_fadvise(file, begin, BLOCK, os.POSIX_FADV_DONTNEED)


@contextmanager
def summed(path: Path) -> Iterator[SummedFile]:
    """Write a new file. At the end it is on the disk.

    Raises:
        CheckpointError: it cannot be written.
    """
    file = None
    try:
        with path.open("xb", buffering=_HELD) as raw:
            file = SummedFile(raw)
            yield file
            raw.flush()
            os.fsync(raw.fileno())
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be written: {(file and file.failed) or error}") from error


def sums_of(path: Path) -> dict[str, Any]:
    """Return the size of a file and the checksums of its blocks."""
    with path.open("rb") as file:
        sums = [crc32(block) for block in iter(lambda: file.read(BLOCK), b"")]
    return {"size": path.stat().st_size, "crc32": sums or [0]}


def write_manifest(folder: Path, facts: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `shardlite.json`: `facts`, and the checksums of all files of a checkpoint."""
    told = {"format": FORMAT, **facts, "block": BLOCK, "files": dict(files)}
    text = json.dumps({**told, "crc32": _crc_of(told)}, indent=1)
    write_synced(folder / MANIFEST, text.encode())


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return what `shardlite.json` says, or `None` for a checkpoint that something else has written.

    Raises:
        CheckpointError: the file is damaged, or of another format.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        told = json.loads(path.read_bytes())
        if not isinstance(told, dict) or told.pop("crc32", None) != _crc_of(told):
            raise ValueError("its checksum is another")
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. {REMEDY}") from None
    if told.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {told.get('format')!r}, and this version of ShardLite reads format {FORMAT}: install "
            "the version that wrote it, or a newer one. Nothing was loaded"
        )
    return cast("dict[str, Any]", told)


def _crc_of(told: Mapping[str, Any]) -> int:
    return crc32(json.dumps(told, sort_keys=True).encode())


REMEDY = "Nothing was loaded; take another checkpoint of the run"


def check(folder: Path, manifest: Mapping[str, Any], wanted: Mapping[str, Iterable[tuple[int, int]]]) -> None:
    """Check the blocks that hold `wanted`: byte ranges [begin, end) by file name.

    Raises:
        CheckpointError: a file is missing, has another size, or a block has another checksum.
    """
    size = int(manifest["block"])
    for name, ranges in wanted.items():
        path, told = folder / name, manifest["files"].get(name)
        if told is None:
            raise CheckpointError(f"{path} is not a file of this checkpoint. {REMEDY}")
        check_size(path, told["size"])
        blocks = {block for begin, end in ranges for block in range(begin // size, -(-end // size))}
        with path.open("rb") as file:
            for block in sorted(blocks):
                file.seek(block * size)
                if crc32(file.read(size)) != told["crc32"][block]:
                    raise CheckpointError(
                        f"{path} is damaged: bytes {block * size} to {(block + 1) * size} have another checksum than "
                        f"when they were written. {REMEDY}"
                    )


def check_size(path: Path, least: int, *, exact: bool = True) -> None:
    """Raise `CheckpointError` unless a file exists and has (at least, if not `exact`) that many bytes."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. {REMEDY}")
    found = path.stat().st_size
    if found < least or (exact and found != least):
        raise CheckpointError(f"{path} has {found} bytes, and had {least} when it was written. {REMEDY}")
