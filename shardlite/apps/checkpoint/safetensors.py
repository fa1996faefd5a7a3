"""Weights to and from folders of safetensors files, as `from_pretrained` and `save_pretrained` use them.

    model.safetensors                                           all weights, or
    model-00001-of-00002.safetensors, ...                       a part of them each, and
    model.safetensors.index.json                                which file has which weight

The format executes no code. It is read and written by the package `safetensors`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from shardlite.apps.checkpoint import files
from shardlite.apps.checkpoint.lease import hold
from shardlite.apps.checkpoint.reading import Checkpoint
from shardlite.apps.checkpoint.saving import finish
from shardlite.apps.checkpoint.writing import write_part
from shardlite.errors import CheckpointError
from shardlite.params import ShardTensor

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST = 5 * 10**9
"""Bytes of weights in a file, as Hugging Face cuts them."""


def is_safetensors(folder: Path) -> bool:
    """Return whether a folder holds weights in this format."""
    return (folder / _ONE).is_file() or (folder / _INDEX).is_file()


def _package() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise CheckpointError(
            "the package safetensors is not installed, which reads and writes *.safetensors: pip install safetensors"
        ) from None
    return safetensors


@dataclass(frozen=True)
class _Part:
    """What of a weight is read."""

    name: str
    offsets: Sequence[int]
    lengths: Sequence[int]


class SafetensorsFolder:
    """A folder of safetensors files, read like a `Checkpoint`.

    Args:
        folder: where it is.

    Raises:
        CheckpointError: a file is missing or damaged.
    """

    manifest = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = _package().safe_open
        index = folder / _INDEX
        if not is_safetensors(folder):
            raise CheckpointError(f"there is no {_ONE}, and no {_INDEX}, in {folder}")
        try:
            names = {_ONE} if not index.is_file() else set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is damaged: {error!r}. {files.REMEDY}") from None
        self._places: dict[str, Path] = {}
        self.entries: dict[str, Any] = {}
        for name in sorted(names):
            self._add(folder / Path(name).name)

    def _add(self, path: Path) -> None:
        files.check_size(path, 8, exact=False)
        try:
            with self._open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no dict)
                    view = file.get_slice(name)
                    dtype, size = _DTYPES[view.get_dtype()], torch.Size(view.get_shape())
                    self.entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [])
                    self._places[name] = path
        except CheckpointError:
            raise
        except Exception as error:  # the package's own class, of whatever is wrong with a file
            raise CheckpointError(f"{path} is damaged: {error!r}. {files.REMEDY}") from None

    def path_of(self, name: str) -> tuple[str, ...]:
        """Return the keys on the way to an entry."""
        return (name,)

    def size_of(self, name: str) -> torch.Size | None:
        """Return the shape of a tensor, `None` if it is not there."""
        return self.entries[name].size if name in self.entries else None

    def items(self, name: str, target: Tensor) -> list[_Part]:
        """Return the reads that fill `target`, a tensor or a `ShardTensor`."""
        if isinstance(target, ShardTensor):
            return [_Part(name, *box) for box in target.boxes()]
        return [_Part(name, [0] * target.ndim, target.shape)]

    def check(self, _: Iterable[Any]) -> None:
        """No-op: sizes are checked when files are opened, and the format has no checksums."""

    def object_items(self, _: Iterable[str]) -> Iterator[Any]:
        """Return nothing: there are tensors only."""
        return iter(())

    def read(self, name: str, target: Tensor) -> None:
        """Fill a tensor, or this rank's part of a `ShardTensor`."""
        with self._open(self._places[name], "pt") as file:
            view = file.get_slice(name)
            for part in self.items(name, target):
                where = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.lengths, strict=True))
                box = target
                if isinstance(target, ShardTensor):
                    box = target.box(part.offsets, target.to_local().detach().reshape(-1))
                box.detach().copy_(view[where] if where else file.get_tensor(name))


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def export_weights(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    largest: int = LARGEST,
) -> list[Path]:
    """Write the weights of a checkpoint into safetensors files, without the optimizer's state.

    Args:
        path: the folder of a run, of which the newest checkpoint is taken, or of one checkpoint.
        out: a folder.
        dtype: convert weights that are floating-point numbers to it.
        largest: most bytes of weights per file, beside a weight that is larger. So much memory is needed.

    Returns:
        The files.

    Raises:
        CheckpointError: the checkpoint is damaged or has no weights, or the package is missing.
    """
    package, folder = _package(), Path(out)
    if is_safetensors(folder) or any(folder.glob("model-*.safetensors")):
        raise CheckpointError(f"{folder} has weights already: choose another folder, or remove model*.safetensors*")
    checkpoint = Checkpoint(files.find(Path(path)))
    names = [name for name in checkpoint.entries if name.startswith("model.") and checkpoint.size_of(name) is not None]
    if not names:
        raise CheckpointError(f"{checkpoint.folder} has no entries `model.*`: was it saved by shardlite.save?")
    checkpoint.check(checkpoint.object_items(names))
    sizes = {name: _nbytes(checkpoint, name, dtype) for name in names}
    parts: list[list[str]] = [[]]
    for name in names:
        if parts[-1] and sum(sizes[each] for each in parts[-1]) + sizes[name] > largest:
            parts.append([])
        parts[-1].append(name)
    count = len(parts)
    folder.mkdir(parents=True, exist_ok=True)
    written, places = [], {}
    for number, members in enumerate(parts, start=1):
        file = folder / (_ONE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors")
        tensors = {name.removeprefix("model."): _converted(checkpoint.object(name), dtype) for name in members}
        file.touch()  # with the permissions that new files get, which the package does not give
        mode = file.stat().st_mode
        package.torch.save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(mode)
        places.update(dict.fromkeys(tensors, file.name))
        written.append(file)
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        files.write_synced(folder / _INDEX, json.dumps(index, indent=2).encode())
        written.append(folder / _INDEX)
    return written


def import_weights(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write a checkpoint with the weights of a folder of safetensors files, one weight at a time.

    `load` takes the folder itself, too.

    Args:
        path: the folder with the files.
        out: folder of a run; the checkpoint becomes its newest.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged, or the package is missing.
    """
    source, root = SafetensorsFolder(Path(path)), Path(out)
    entries = {f"model.{name}": _later(source, name) for name in source.entries}
    root.mkdir(parents=True, exist_ok=True)
    lease = hold(root, source)
    step = max(files.folders_in(root), default=-1) + 1
    folder = files.begin(root, step, lease)
    items = [item for name, value in entries.items() for item in _create_write_items(name, value)]
    part = write_part(folder, 0, items, entries)
    part |= {"aliases": {}, "paths": {name: ("model", name.removeprefix("model.")) for name in entries}}
    finish(folder, root, {"step": step, "ranks": 1, "stage": 0}, [part], None, lease)
    return root / files.name_of(step)


def _later(source: SafetensorsFolder, name: str) -> Tensor:
    """Return a weight that is read when it is written."""
    told = source.entries[name]

    def decode() -> Tensor:
        whole = torch.empty(told.size, dtype=told.properties.dtype)
        source.read(name, whole)
        return whole

    if told.size.numel() == 0:
        return torch.empty(told.size, dtype=told.properties.dtype)
    facts: Mapping[str, Any] = {"dtype": told.properties.dtype, "device": torch.device("cpu")}
    return ShardTensor(decode, told.size, 0, numel=told.size.numel(), **facts)


def _nbytes(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None) -> int:
    told = checkpoint.entries[name]
    kept: torch.dtype = told.properties.dtype
    return int(told.size.numel() * (dtype if dtype is not None and kept.is_floating_point else kept).itemsize)


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
