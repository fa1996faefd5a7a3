"""Memory with two versions of the state of one rank: the last whole one, and the one that is written.

    page 0          a record of each version: its step, its bytes, the number of ranks; empty while it is written
    from page 1     version 0
    from the middle version 1

A version is written in the place of the older one, and gets its record when it is whole. So a process that is killed
while it writes leaves the other version. Pages are taken when they are written first, and are never given back.
"""

from __future__ import annotations

import os
import struct
import weakref
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from shardlite.comm import Mapping, has_fixed_size, make_memory, physical_memory
from shardlite.errors import CheckpointError

_PAGE = 4096
_RECORD = struct.Struct("<8sqqqq")  # magic, step, ranks, bytes, where the objects begin
_SUM = struct.Struct("<I")
_MAGIC = b"shardcp1"
_EMPTY = bytes(_RECORD.size + _SUM.size)


@dataclass(frozen=True)
class Version:
    """A state that is whole."""

    step: int
    ranks: int
    """Of the run."""

    nbytes: int
    objects: int
    """From which byte on objects lie: tensors lie before them."""


class Versions:
    """Memory of the state of one rank.

    Args:
        descriptor: of the memory, which this object closes.

    Raises:
        CheckpointError: it is other memory.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._room = _room()
        found = os.fstat(descriptor).st_size
        if found != _PAGE + 2 * self._room or not has_fixed_size(descriptor):
            raise CheckpointError(f"memory of {found} bytes is not that of a copy")
        self._mapping = Mapping(descriptor)
        self._reserved = [0, 0]

    @classmethod
    def make(cls) -> Versions:
        """Make memory that has no version."""
        return cls(make_memory(_PAGE + 2 * _room()))

    def whole(self) -> dict[int, Version]:
        """Return the versions that are whole, by step."""
        found = [self._record(place) for place in (0, 1)]
        return {each.step: each for each in found if each is not None}

    def content(self, step: int) -> Tensor:
        """View the bytes of a version."""
        place = next(place for place in (0, 1) if (found := self._record(place)) is not None and found.step == step)
        return self._bytes(place, self.whole()[step].nbytes)

    def begin(self, nbytes: int) -> Tensor:
        """View room for a new version, in the place of the older one, which is gone from now on.

        Raises:
            CheckpointError: this machine has not as much memory.
        """
        place = self._older()
        self._write(place, _EMPTY)
        self._reserve(place, nbytes)
        return self._bytes(place, nbytes)

    def end(self, version: Version) -> None:
        """Let the version that has begun be whole."""
        fields = _RECORD.pack(_MAGIC, version.step, version.ranks, version.nbytes, version.objects)
        self._write(self._older(), fields + _SUM.pack(crc32(fields)))

    def keep(self, step: int | None) -> None:
        """Drop all versions except that of a step."""
        for place in (0, 1):
            found = self._record(place)
            if found is not None and found.step != step:
                self._write(place, _EMPTY)

    def reserve(self, nbytes: int) -> None:
        """Take memory for two versions.

        Raises:
            CheckpointError: this machine has not as much.
        """
        for place in (0, 1):
            self._reserve(place, nbytes)

    def _older(self) -> int:
        """Return the place of no version, or of the older one."""
        steps = [-1 if found is None else found.step for found in map(self._record, (0, 1))]
        return steps.index(min(steps))

    def _record(self, place: int) -> Version | None:
        at, size = place * _PAGE // 2, _RECORD.size
        fields, told = self._mapping.memory[at : at + size], self._mapping.memory[at + size : at + size + _SUM.size]
        magic, *numbers = _RECORD.unpack(fields)
        return Version(*numbers) if magic == _MAGIC and told == _SUM.pack(crc32(fields)) else None

    def _write(self, place: int, record: bytes) -> None:
        at = place * _PAGE // 2
        self._mapping.memory[at : at + len(record)] = record

    def _bytes(self, place: int, nbytes: int) -> Tensor:
        return self._mapping.tensor(_PAGE + place * self._room, nbytes, torch.uint8)

    def _reserve(self, place: int, nbytes: int) -> None:
        """Take pages before they are written: a process that writes where there are none is killed."""
        if nbytes <= self._reserved[place]:
            return
        start = _PAGE + place * self._room
        more = nbytes - (os.lseek(self.descriptor, start, os.SEEK_HOLE) - start)
        if (left := _available()) < more:
            raise CheckpointError(f"a copy of {nbytes} bytes takes {more} more, and this machine has {left} left")
        try:
            os.posix_fallocate(self.descriptor, start, nbytes)
        except OSError as error:
            raise CheckpointError(f"a copy of {nbytes} bytes does not fit into memory: {error}") from error
        self._reserved[place] = nbytes


def _room() -> int:
    """Return the number of bytes in the address range of one version. They take memory as they are written."""
    return physical_memory() // _PAGE * _PAGE


def _available() -> int:
    """Return how many bytes of memory can be taken without swapping."""
    told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(told["MemAvailable"].split()[0])
