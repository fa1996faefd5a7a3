"""The file of a rank: each tensor as `torch.save` writes it, one after the other, as DCP reads them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.utils.serialization import config

from shardlite.apps.checkpoint import files
from shardlite.apps.checkpoint.contents import pickled
from shardlite.params import ShardTensor


def write_part(folder: Path, rank: int, items: Iterable[WriteItem], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Write the file of a rank, and return what the metadata and the manifest need to know of it, in JSON types.

    Args:
        folder: of the checkpoint that is being written.
        rank: names the file.
        items: what to write, in this order.
        entries: tensors and objects, by the names in `items`.

    Returns:
        `rows`: per item its name, [file, first byte, bytes], and for tensors dtype, shape, offsets and sizes.
        `files`: size and checksums of the file, by its name.

    Raises:
        CheckpointError: the file cannot be written, or an object has more than plain values.
    """
    read = _Reader(entries)
    file, rows = f"__{rank}_0.distcp", []
    # Torch would compute a second checksum of all bytes, which no reader of checkpoints compares.
    with files.summed(folder / file) as stream, config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        for item in items:
            begin = stream.size
            content = read(item)
            if isinstance(content, io.BytesIO):
                stream.write(content.getbuffer())
            else:
                torch.save(content, cast("IO[bytes]", stream))
            rows.append([item.index.fqn, [file, begin, stream.size - begin], *_described(item)])
    return {"rows": rows, "files": {file: stream.sums()}}


def _described(item: WriteItem) -> list[Any]:
    """Return dtype and shape of a tensor, and which part of it an item is, in JSON types. Nothing for an object."""
    data = item.tensor_data
    if data is None:
        return []
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return [dtype, [*data.size], [*data.chunk.offsets], [*data.chunk.sizes]]


class _Reader:
    """Returns what is to be written: a tensor in host memory with a storage of its own, or a pickled object."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self._latest: tuple[str, Tensor | None] = ("", None)  # a decoded one has several boxes

    def __call__(self, item: WriteItem) -> Tensor | io.BytesIO:
        name = item.index.fqn
        value = self._entries[name]
        if not isinstance(value, Tensor):
            return value if isinstance(value, io.BytesIO) else pickled(name, value)
        if isinstance(value, ShardTensor):
            if self._latest[0] != name:
                self._latest = ("", None)  # before the next one is decoded
                self._latest = (name, value.read())
            assert self._latest[1] is not None
            assert item.index.offset is not None
            value = value.box(item.index.offset, self._latest[1])
        return _alone(value.detach().cpu())


def _alone(tensor: Tensor) -> Tensor:
    """View a tensor as one whose storage has its elements only, for `torch.save` writes whole storages."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes:
        return tensor
    if not tensor.is_contiguous():
        return tensor.contiguous()
    begin = tensor.storage_offset() * tensor.itemsize
    part = storage[begin : begin + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(part, 0, tensor.shape, tensor.stride())
