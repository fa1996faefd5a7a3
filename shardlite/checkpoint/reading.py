"""Read a checkpoint folder without executing code.

The reader of `torch.distributed.checkpoint` (DCP) unpickles `.metadata` without restriction, and its planner unpickles
objects without restriction. So a file of unknown origin can execute any code. This file unpickles `.metadata` with only
the few classes that metadata consists of, and objects with `weights_only=True`. Programs that call DCP get the same
protection with `SafeReader` and `SafeLoadPlanner`:

    dcp.load(state, storage_reader=SafeReader(path), planner=SafeLoadPlanner())
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from shardlite.checkpoint import files
from shardlite.checkpoint.contents import unpickled
from shardlite.errors import CheckpointError

_SMALL = 1 << 16
"""Maximum length in bytes of a tensor in a file that is read at once."""

_CLASSES: dict[tuple[str, str], Any] = {
    (each.__module__, each.__qualname__): each
    for each in (
        *(getattr(dcp_metadata, name) for name in dcp_metadata.__all__),  # dataclasses
        dcp_metadata._MEM_FORMAT_ENCODING,
        dcp_files._StorageInfo,
        torch.Size,
    )
}
_CLASSES |= {("torch.serialization", "_get_layout"): torch.serialization._get_layout}
_CLASSES |= {  # paths on the host of the writer
    (module, name): PurePath
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
_CLASSES |= {("collections", "OrderedDict"): dict, ("builtins", "set"): set}


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only dtypes and the classes of DCP's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (found := _CLASSES.get((module, name))) is not None:
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of metadata")


def read_metadata(folder: Path) -> Metadata:
    """Return DCP's metadata of a checkpoint.

    Raises:
        CheckpointError: the file is missing or damaged, or is not the metadata of a checkpoint.
    """
    path = folder / files.METADATA
    files.check_size(path, 1, exact=False)
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # unpickling a damaged file may raise any exception
        raise CheckpointError(f"{path} is not the metadata of a checkpoint: {error}. {files.REMEDY}") from None
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not the metadata of a checkpoint")
    return found


class SafeReader(FileSystemReader):
    """A variant of DCP's `FileSystemReader` that does not execute code of the checkpoint.

    Args:
        path: folder of one checkpoint.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata.

        Raises:
            CheckpointError: the file is missing, damaged, or not the metadata of a checkpoint.
        """
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """A variant of DCP's `DefaultLoadPlanner` that loads only objects of plain values and tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle an object into the state dict.

        Raises:
            CheckpointError: the object contains something that is neither a plain value nor a tensor.
        """
        name = read_item.dest_index.fqn
        loaded = unpickled(name, value)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


class Checkpoint:
    """One checkpoint on the disk.

    Args:
        folder: folder of the checkpoint.

    Raises:
        CheckpointError: the folder is damaged, or not a checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = files.read_manifest(folder)
        if self.manifest is not None:
            size = self.manifest["files"].get(files.METADATA, {}).get("size", 0)
            files.check_blocks(folder, self.manifest, {files.METADATA: [(0, size)]})
        self._open(SafeReader(folder), read_metadata(folder))

    def _open(self, reader: FileSystemReader, metadata: Metadata) -> None:
        self._reader, self._metadata = reader, metadata
        reader.set_up_storage_reader(metadata, is_coordinator=False)

    @property
    def entries(self) -> dict[str, Any]:
        """DCP's metadata of each entry, by name."""
        return self._metadata.state_dict_metadata

    def path_of(self, name: str) -> tuple[str | int, ...]:
        """Return the keys of an entry in the nested state dict."""
        return (self._metadata.planner_data or {}).get(name) or tuple(name.split("."))

    def size_of(self, name: str) -> torch.Size | None:
        """Return the shape of a tensor, or `None` for an object or a missing entry."""
        found = self.entries.get(name)
        return found.size if isinstance(found, TensorStorageMetadata) else None

    def items(self, name: str, target: object) -> list[ReadItem]:
        """Return the reads that fill `target` (a tensor or a `ShardTensor`). For an object, return one read."""
        return _create_read_items(name, self.entries[name], target)

    def object_items(self, names: Iterable[str]) -> Iterator[ReadItem]:
        """Yield the reads that the method `object` makes for each of the named entries."""
        for name in names:
            size = self.size_of(name)
            yield from self.items(name, None if size is None else torch.empty(size, device="meta"))

    def check(self, items: Iterable[ReadItem]) -> None:
        """Check the bytes that will be read.

        Raises:
            CheckpointError: a file is missing or too short or, in a checkpoint that ShardLite has written, damaged.
        """
        wanted: dict[str, list[tuple[int, int]]] = {}
        for item in items:
            place = self.place_of(item.storage_index)
            wanted.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length))
        for name, ranges in wanted.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise CheckpointError(f"{self.folder / files.METADATA} names a file outside of the checkpoint: {name}")
            if self.manifest is None:
                files.check_size(self.folder / name, max(stop for _, stop in ranges), exact=False)
        if self.manifest is not None:
            files.check_blocks(self.folder, self.manifest, wanted)

    def place_of(self, index: MetadataIndex) -> Any:
        """Return the place of a part of an entry: its file, offset and length."""
        place = self._reader.storage_data.get(index)
        if place is None:
            raise CheckpointError(f"{self.folder / files.METADATA} has no location of {index.fqn!r}")
        return place

    def read(self, name: str, target: Tensor) -> None:
        """Fill a tensor, or this rank's part of a `ShardTensor`."""
        self._read(self.items(name, target), _EntryPlanner(name, target))

    def object(self, name: str) -> Any:
        """Read an object, or a full tensor.

        Raises:
            CheckpointError: loading the object could execute code.
        """
        size = self.size_of(name)
        full = None if size is None else torch.empty(size, dtype=self.entries[name].properties.dtype)
        planner = _EntryPlanner(name, full)
        self._read(self.items(name, full), planner)
        return planner.state_dict[name]

    def _read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        try:
            large = [item for item in items if not self._take(item, planner)]
            if large:
                self._reader.read_data(LoadPlan(large), planner)
        except CheckpointError:
            raise
        except Exception as error:  # PyTorch may raise any exception for a damaged file
            names = sorted({self.place_of(item.storage_index).relative_path for item in items})
            raise CheckpointError(f"{self.folder / names[0]} cannot be read: {error!r}") from error

    def _take(self, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read a part with `_part_of` and copy it into its target. Return whether this method could read the part."""
        if item.type == LoadItemType.BYTE_IO or (part := self._part_of(item)) is None:
            return False
        target = planner.resolve_tensor(item).detach()
        if target.size() != part.size():
            raise ValueError(f"{item.storage_index.fqn!r} has a part of {list(part.shape)}, not {list(target.shape)}")
        target.copy_(part)
        planner.commit_tensor(item, target)
        return True

    def _part_of(self, item: ReadItem) -> Tensor | None:
        """Return a part of a small tensor, or `None` if DCP must read it."""
        place = self.place_of(item.storage_index)
        if place.length > _SMALL or place.transform_descriptors:
            return None
        with open(self.folder / place.relative_path, "rb", buffering=0) as file:
            file.seek(place.offset)
            tensor = small_tensor(file.read(place.length))
        return None if tensor is None else tensor[ranges_of(item)]


def ranges_of(item: ReadItem) -> tuple[slice, ...]:
    """Return the index of the part of a saved tensor that is read."""
    return tuple(slice(first, first + n) for first, n in zip(item.storage_offsets, item.lengths, strict=True))


class _SmallTensor(pickle.Unpickler):
    """An unpickler of one tensor on the CPU. It accepts nothing else."""

    def __init__(self, reader: Any) -> None:
        super().__init__(io.BytesIO(reader.get_record("data.pkl")))
        self._reader = reader

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.endswith("Storage"):
            return torch.storage._get_dtype_from_pickle_storage_type(name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, place: Any) -> Tensor:
        _, dtype, key, *_ = place
        return torch.frombuffer(bytearray(self._reader.get_record(f"data/{key}")), dtype=dtype)


def _rebuilt(stored: Tensor, offset: int, size: Any, stride: Any, _: Any, __: Any, metadata: Any = None) -> Tensor:
    if metadata:  # for example, that the numbers are conjugate
        raise pickle.UnpicklingError(f"the tensor has {metadata}")
    return torch.as_strided(stored, size, stride, offset)


def small_tensor(content: bytes) -> Tensor | None:
    """Return the tensor that `torch.save` has written, or `None` if `torch.load` must read it.

    `torch.load` takes 0.9 ms for a tensor of any size, and this function 0.1 ms.
    """
    try:
        reader = torch._C.PyTorchFileReader(io.BytesIO(content))
        if reader.get_record("byteorder") != sys.byteorder.encode():
            return None
        found = _SmallTensor(reader).load()
    except Exception:  # `torch.load` names what is wrong
        return None
    return found if isinstance(found, Tensor) else None


class _EntryPlanner(SafeLoadPlanner):
    """A planner that loads one entry. It fills a tensor, or unpickles an object."""

    def __init__(self, name: str, target: Tensor | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict = {name: target}
