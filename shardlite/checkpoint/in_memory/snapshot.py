"""Snapshots: copies of the state of one rank, in memory that outlives the rank.

    snapshot       | tensor | tensor | ... | objects |
    objects        a record of each tensor, param groups, extra, generators

Unlike a rank's file of a checkpoint, a snapshot has the complete state of a rank, in the formats in which the rank
keeps it. The memory holds two snapshots: the latest complete snapshot, and a snapshot that is being written.

    page 0          the header of each snapshot: step, bytes, number of ranks; a header is empty until its snapshot is
                    complete
    from page 1     snapshot 0
    from the middle snapshot 1

A new snapshot overwrites the older of the two, and gets its header when it is complete. So if a process is killed while
it writes a snapshot, the other snapshot remains. Pages are allocated when they are first written, and are never freed.
"""

from __future__ import annotations

import io
import os
import struct
import weakref
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from shardlite.checkpoint.contents import Run, check_keys, generators, kind_of, names_of, pickled, states_in, unpickled
from shardlite.comm.transport.shared_memory.heap import Mapping as SharedMemory
from shardlite.comm.transport.shared_memory.heap import has_fixed_size, make_memory, physical_memory
from shardlite.errors import CheckpointError
from shardlite.model import ModelState, ShardLite
from shardlite.params import ShardTensor
from shardlite.wrapping import flats_of

_ALIGN = 64
"""Alignment of tensors, in bytes."""

Record = tuple[str, int, torch.dtype, Sequence[int], str]
"""The record of a tensor: its name, index of its first element in the full tensor, dtype, shape, and device type."""


# ---- state of a rank ------------------------------------------------------------------------------------------------


class Snapshot:
    """A snapshot to be written. It refers to the tensors of this rank's state, and contains pickled objects.

    Raises:
        CheckpointError: `extra` or a param group has a value whose loading could execute code.
    """

    def __init__(self, run: Run, rank: int) -> None:
        model, optimizer, extra = run
        for flat in flats_of(ModelState(model).units):
            flat.settle()
        found, state = [*_weights(model)], dict[str, dict[str, Any]]()
        states, groups = (optimizer.state, optimizer.param_groups) if optimizer is not None else ({}, [])
        for name, param in model.named_parameters():
            for key, value in states.get(param, {}).items():
                state.setdefault(name, {})[key] = None if isinstance(value, Tensor) else value
                if isinstance(value, Tensor):
                    found.append(_record(f"optimizer.{name}/{key}", 0, value.detach()))
        self.records: Sequence[Record] = [record for record, _ in found]
        self.tensors: Sequence[Tensor] = [tensor for _, tensor in found]
        model_state = ModelState(model)
        self._version, loops = model_state.context.version.number, model_state.loops
        names = names_of(model, optimizer)
        objects = {
            "records": self.records,
            "optimizer": kind_of(optimizer),
            "groups": [{**group, "params": own} for group, own in zip(groups, names, strict=True)],
            "state": state,
            "extra": states_in(extra or {}),
            "generators": generators(),
            "loops": 0 if loops is None else loops.finished,
        }
        self.objects = pickled(f"ranks.{rank}.extra", objects).getbuffer()

    @property
    def objects_start(self) -> int:
        """Offset of the objects, in bytes."""
        return sum(map(_padded, self.records))

    @property
    def nbytes(self) -> int:
        """Length of the snapshot, in bytes."""
        return self.objects_start + len(self.objects)

    def header(self, step: int, ranks: int) -> Header:
        """Return the header of this snapshot, as the copy of `step` of a run of `ranks`."""
        return Header(step, ranks, self.nbytes, self.objects_start, self._version)

    def copy_into(self, memory: Tensor) -> None:
        """Copy tensors and objects to `memory` [bytes]."""
        for view, tensor in zip(_views(memory, self.records), self.tensors, strict=True):
            view.copy_(tensor)
        memory[self.objects_start :].copy_(torch.frombuffer(self.objects, dtype=torch.uint8))


def _record(name: str, start: int, tensor: Tensor) -> tuple[Record, Tensor]:
    return (name, start, tensor.dtype, list(tensor.shape), tensor.device.type), tensor


def _padded(record: Record) -> int:
    """Return the number of bytes of a tensor in a snapshot, with padding."""
    nbytes = prod(record[3]) * record[2].itemsize
    return -(-nbytes // _ALIGN) * _ALIGN


def _views(memory: Tensor, records: Sequence[Record]) -> Iterator[Tensor]:
    """Yield a view of each tensor in the snapshot that `memory` [n] (bytes) contains."""
    start = 0
    for record in records:
        _, _, dtype, shape, _ = record
        nbytes = prod(shape) * dtype.itemsize
        part = memory[start : start + nbytes]
        yield part.view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)
        start += _padded(record)


def _weights(model: ShardLite) -> Iterator[tuple[Record, Tensor]]:
    """Yield weights and buffers with their records. Tied weights occur once, and split weights as two parts."""
    seen: set[int] = set()
    for name, value in model.state_dict().items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        sharded = isinstance(value, ShardTensor)
        for i, part in enumerate(value.kept if sharded else [value.detach()]):
            yield _record(f"model.{name}/{i}", value.start if sharded else 0, part)


class SavedSnapshot:
    """A snapshot in memory, to be loaded. The constructor changes nothing.

    Args:
        memory: the memory of the snapshot.
        step: step of the snapshot.
        run: the model, optimizer and `extra` to load the snapshot into.

    Raises:
        CheckpointError: the snapshot is damaged, or belongs to another part of the model, another model or another
        optimizer.
    """

    def __init__(self, memory: SnapshotMemory, step: int, run: Run) -> None:
        model, optimizer, extra = run
        self._memory = memory.content(step)
        start = memory.complete()[step].objects_start
        objects = unpickled("the copy", io.BytesIO(self._memory[start:].numpy().tobytes()))
        self._records: list[Record] = objects["records"]
        self._state: dict[str, dict[str, Any]] = objects["state"]
        """The optimizer's state of each parameter, by the parameter's name. Tensors are replaced by `None`."""

        self.groups: list[dict[str, Any]] = objects["groups"]
        """The param groups, with the names of parameters instead of parameters."""
        self.step: int | None = step
        self.extra: Any = objects["extra"]
        self.generators: dict[str, Any] | None = objects["generators"]
        self.loops: int = objects["loops"]
        here = [record for record, _ in _weights(model)]
        there = [record for record in self._records if record[0].startswith("model.")]
        if here != there:
            differing = next((b or a for a, b in zip(there, here, strict=False) if a != b), "the number of tensors")
            raise CheckpointError(f"they are of a different model, stage, or format: {differing} differs")
        kind, names = kind_of(optimizer), names_of(model, optimizer)
        if kind != objects["optimizer"] or names != [group["params"] for group in self.groups]:
            raise CheckpointError("they are of a different optimizer, or of different parameter groups")
        check_keys(extra or {}, self.extra, "the copy")

    def load_weights(self, model: ShardLite) -> None:
        """Overwrite weights and buffers."""
        for (_, mine), view in zip(_weights(model), _views(self._memory, self._records), strict=False):
            mine.copy_(view)

    def states(self, model: ShardLite) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield the optimizer's state, parameter by parameter."""
        params, views = dict(model.named_parameters()), _views(self._memory, self._records)
        tensors = {name: (view, device) for (name, *_, device), view in zip(self._records, views, strict=True)}
        for name, entries in self._state.items():
            state = dict(entries)
            for key in entries:
                if (found := tensors.get(f"optimizer.{name}/{key}")) is not None:
                    view, device = found
                    state[key] = view.to("cpu" if device == "cpu" else params[name].device, copy=True)
            yield params[name], state


# ---- memory ---------------------------------------------------------------------------------------------------------

_PAGE = 4096
_HEADER = struct.Struct("<8sqqqqqI")  # magic, the fields of `Header`, and a checksum of these
_MAGIC = b"shardcp2"
_EMPTY = bytes(_HEADER.size)


class Header(NamedTuple):
    """The header of a complete snapshot."""

    step: int
    ranks: int
    """Number of ranks of the run."""

    nbytes: int
    objects_start: int
    version: int
    """Version of the weights. It is the same on all ranks, unless a rank has skipped a step."""


class SnapshotMemory:
    """Memory of two snapshots of one rank.

    Args:
        descriptor: file descriptor of the memory. This object closes it.

    Raises:
        CheckpointError: the memory does not have the size of two snapshots.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        self._capacity = _capacity()
        found = os.fstat(descriptor).st_size
        if found != _PAGE + 2 * self._capacity or not has_fixed_size(descriptor):
            raise CheckpointError(f"memory of {found} bytes does not hold copies")
        self._mapping = SharedMemory(descriptor)
        self._reserved = [0, 0]

    @classmethod
    def allocate(cls) -> SnapshotMemory:
        """Allocate memory that has no snapshot yet."""
        return cls(make_memory(_PAGE + 2 * _capacity()))

    def complete(self) -> dict[int, Header]:
        """Return the headers of the complete snapshots, by step."""
        return {header.step: header for place in (0, 1) if (header := self._header(place))}

    def content(self, step: int) -> Tensor:
        """Return a view of the complete snapshot of a step, [bytes]."""
        headers = {header.step: (place, header.nbytes) for place in (0, 1) if (header := self._header(place))}
        return self._view(*headers[step])

    def overwrite_older(self, nbytes: int) -> Tensor:
        """Drop the older snapshot. Return a view [nbytes] of its memory, for a new snapshot.

        Raises:
            CheckpointError: this host does not have enough memory.
        """
        place = self._older()
        self._write(place, _EMPTY)
        self._reserve(place, nbytes)
        return self._view(place, nbytes)

    def mark_complete(self, header: Header) -> None:
        """Write the header of a new snapshot, which has overwritten the older snapshot."""
        checksum = crc32(_HEADER.pack(_MAGIC, *header, 0)[:-4])
        self._write(self._older(), _HEADER.pack(_MAGIC, *header, checksum))

    def drop_all_but(self, step: int | None) -> None:
        """Drop all snapshots except the snapshot of `step`."""
        for place in (0, 1):
            found = self._header(place)
            if found is not None and found.step != step:
                self._write(place, _EMPTY)

    def reserve(self, nbytes: int) -> None:
        """Allocate the pages of two snapshots.

        Raises:
            CheckpointError: this host does not have enough memory.
        """
        for place in (0, 1):
            self._reserve(place, nbytes)

    def _older(self) -> int:
        """Return the place without a complete snapshot. If both places have one, return the place of the older one."""
        steps = [-1 if found is None else found.step for found in map(self._header, (0, 1))]
        return steps.index(min(steps))

    def _header(self, place: int) -> Header | None:
        start = place * _PAGE // 2
        written = self._mapping.memory[start : start + _HEADER.size]
        magic, *fields, checksum = _HEADER.unpack(written)
        return Header(*fields) if magic == _MAGIC and checksum == crc32(written[:-4]) else None

    def _write(self, place: int, header: bytes) -> None:
        start = place * _PAGE // 2
        self._mapping.memory[start : start + len(header)] = header

    def _view(self, place: int, nbytes: int) -> Tensor:
        return self._mapping.tensor(_PAGE + place * self._capacity, nbytes, torch.uint8)

    def _reserve(self, place: int, nbytes: int) -> None:
        """Allocate pages before they are written. If memory ran out at a write, Linux would kill the process."""
        if nbytes <= self._reserved[place]:
            return
        start = _PAGE + place * self._capacity
        more = nbytes - (os.lseek(self.descriptor, start, os.SEEK_HOLE) - start)
        if (left := _available()) < more:
            raise CheckpointError(
                f"a copy of {nbytes} bytes needs {more} more bytes, but this host has only {left} left"
            )
        try:
            os.posix_fallocate(self.descriptor, start, nbytes)
        except OSError as error:
            raise CheckpointError(f"a copy of {nbytes} bytes does not fit into memory: {error}") from error
        self._reserved[place] = nbytes


def _capacity() -> int:
    """Return the length of the address range of a snapshot. Only the written pages of this range take memory."""
    return physical_memory() // _PAGE * _PAGE


def _available() -> int:
    """Return the number of bytes that can be allocated without swapping."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])
