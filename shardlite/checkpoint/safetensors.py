"""Read and write weights in the files that Hugging Face's `save_pretrained` writes.

    model.safetensors                     all weights; or, for a large model,
    model-00001-of-00003.safetensors      a part of the weights, and
    model.safetensors.index.json          the file of each weight

Reading the format executes no code. The package `safetensors` reads and writes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._hf_utils import _HFStorageInfo
from torch.distributed.checkpoint.planner import ReadItem

from shardlite.checkpoint import files
from shardlite.checkpoint.contents import Paths
from shardlite.checkpoint.lease import acquire
from shardlite.checkpoint.reading import Checkpoint, ranges_of
from shardlite.checkpoint.saving import RankFile, publish
from shardlite.errors import CheckpointError
from shardlite.params import ShardTensor

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST = 5 * 10**9
"""Maximum number of bytes of weights per file, as in Hugging Face's files."""


def is_safetensors(folder: Path) -> bool:
    """Return whether a folder has weights in this format."""
    return (folder / _ONE).is_file() or (folder / _INDEX).is_file()


def _package() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise CheckpointError(
            "reading and writing *.safetensors requires the package safetensors: pip install safetensors"
        ) from None
    return safetensors


class SafetensorsFolder(Checkpoint):
    """A folder of safetensors files. It is read like a checkpoint that has no objects and no checksums.

    Args:
        folder: the folder.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, None
        index = folder / _INDEX
        if not is_safetensors(folder):
            raise CheckpointError(f"there is no {_ONE}, and no {_INDEX}, in {folder}")
        try:
            names = {_ONE} if not index.is_file() else set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is damaged: {error!r}. {files.REMEDY}") from None
        metadata = dcp.Metadata({}, storage_data={})
        # An open file is kept, because it has parsed the names of all its tensors.
        paths = [folder / Path(name).name for name in sorted(names)]
        self._files = {str(path): _add_file(metadata, path) for path in paths}
        self._open(HuggingFaceStorageReader(str(folder)), metadata)

    def path_of(self, name: str) -> tuple[str, ...]:
        """Return the keys of an entry: its whole name as a single key."""
        return (name,)

    def check(self, _: Iterable[Any]) -> None:
        """Do nothing, because sizes are checked when files are opened, and the format has no checksums."""

    def _part_of(self, item: ReadItem) -> Tensor:
        """Return a part of a tensor."""
        file = self._files[self.place_of(item.storage_index).relative_path]
        part: Tensor = file.get_slice(item.storage_index.fqn)[ranges_of(item)]
        return part


def _add_file(metadata: dcp.Metadata, path: Path) -> Any:
    """Add the weights of a file to the metadata. Return the open file."""
    safe_open = _package().safe_open
    files.check_size(path, 8, exact=False)
    try:
        file = safe_open(path, "pt")
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            view = file.get_slice(name)
            shape = torch.Size(view.get_shape())
            dtype = (view[:0] if shape else view[()]).dtype
            chunk = dcp.ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            properties = dcp.TensorProperties(dtype=dtype)
            metadata.state_dict_metadata[name] = dcp.TensorStorageMetadata(properties, shape, [chunk])
            metadata.storage_data[dcp.MetadataIndex(name, chunk.offsets)] = _HFStorageInfo(str(path), shape, dtype)
    except Exception as error:  # the package raises its own class for any damage
        raise CheckpointError(f"{path} is damaged: {error!r}. {files.REMEDY}") from None
    return file


def export_weights(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    largest: int = LARGEST,
) -> list[Path]:
    """Write the weights of a checkpoint into safetensors files, without the optimizer's state.

    Args:
        path: folder of a run, whose newest checkpoint is read, or of one checkpoint.
        out: folder for the files.
        dtype: dtype to which floating-point weights are converted. Default: the saved dtype.
        largest: maximum number of bytes of weights per file. A larger weight gets its own file. The function needs as
            much memory as the largest file has bytes.

    Returns:
        The paths of the files.

    Raises:
        CheckpointError: the checkpoint is damaged or has no weights, or the package safetensors is missing.

    Example:
        >>> export_weights("runs/first", "weights", dtype=torch.bfloat16)
    """
    package, folder = _package(), Path(out)
    if is_safetensors(folder) or any(folder.glob("model-*.safetensors")):
        raise CheckpointError(f"{folder} has weights already: choose another folder, or remove model*.safetensors*")
    checkpoint = Checkpoint(files.find(Path(path)))
    names = [name for name in checkpoint.entries if name.startswith("model.") and checkpoint.size_of(name) is not None]
    if not names:
        raise CheckpointError(f"{checkpoint.folder} has no entries `model.*`: was it saved by shardlite.save?")
    checkpoint.check(checkpoint.object_items(names))
    saved = {name: checkpoint.entries[name].properties.dtype for name in names}
    dtypes = {name: dtype if dtype is not None and own.is_floating_point else own for name, own in saved.items()}
    sizes = {name: checkpoint.entries[name].size.numel() * dtypes[name].itemsize for name in names}
    parts: list[list[str]] = [[]]
    for name in names:
        if parts[-1] and sum(sizes[each] for each in parts[-1]) + sizes[name] > largest:
            parts.append([])
        parts[-1].append(name)
    folder.mkdir(parents=True, exist_ok=True)
    written, places = [], {}
    for number, members in enumerate(parts, start=1):
        file = folder / (_ONE if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors")
        tensors = {name.removeprefix("model."): checkpoint.object(name).to(dtypes[name]) for name in members}
        file.touch()  # gives the file the permissions of new files; the package would not
        mode = file.stat().st_mode
        package.torch.save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(mode)
        places.update(dict.fromkeys(tensors, file.name))
        written.append(file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        files.write_synced(folder / _INDEX, json.dumps(index, indent=2).encode())
        written.append(folder / _INDEX)
    return written


def import_weights(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write a checkpoint with the weights of a folder of safetensors files, one weight at a time.

    `load` can also read such a folder directly.

    Args:
        path: folder with the files.
        out: folder of a run. The new checkpoint becomes the newest checkpoint in this folder.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged, or the package safetensors is missing.

    Example:
        >>> import_weights("weights", "runs/second")
    """
    source, root = SafetensorsFolder(Path(path)), Path(out)
    entries = {f"model.{name}": _lazy(source, name) for name in source.entries}
    root.mkdir(parents=True, exist_ok=True)
    lease = acquire(root, source)
    step = files.next_step(root)
    folder = files.make_temporary(root, step, lease)
    paths: Paths = {name: ("model", name.removeprefix("model.")) for name in entries}
    part = RankFile(entries, {}, paths).write(folder, 0)
    return publish(root, {"step": step, "ranks": 1, "stage": 0}, [part], None, lease)


def _lazy(source: SafetensorsFolder, name: str) -> Tensor:
    """Return a weight that is read when the checkpoint is written."""
    size, dtype = source.entries[name].size, source.entries[name].properties.dtype
    if size.numel() == 0:
        return torch.empty(size, dtype=dtype)
    cpu = torch.device("cpu")
    return ShardTensor(lambda: source.object(name), size, 0, numel=size.numel(), dtype=dtype, device=cpu)
