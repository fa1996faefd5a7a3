"""Memory of one rank that others on its host can read. It has no name in a file system, so nothing can be left behind.

The memory is as large as the machine's, but takes pages only where something was written; it is not bounded by the size
of `/dev/shm`. Blocks that are given back are used again.
"""

import ctypes
import mmap
import os
import threading
import weakref
from bisect import insort
from collections import deque

import torch
from torch import Tensor

from shardlite.errors import CommError

_NO_RESERVE = 0x4000  # MAP_NORESERVE
_GRAIN = 4096  # bytes: blocks start at a page


class Mapping:
    """Shared memory as this process sees it."""

    def __init__(self, descriptor: int) -> None:
        nbytes = os.fstat(descriptor).st_size
        self.memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | _NO_RESERVE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.nbytes = nbytes

    def words(self, start: int, count: int) -> "memoryview[int]":
        """View `count` words of 32 bits from byte `start`."""
        return memoryview(self.memory)[start : start + 4 * count].cast("I")

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """View `numel` elements from byte `start`."""
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=start)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return at which byte a contiguous tensor starts, or `None` if it is not in this memory."""
        start = tensor.data_ptr() - self.address
        return start if 0 <= start < self.nbytes else None


class Heap(Mapping):
    """Memory of this rank: `reserved` bytes at the start, then blocks."""

    def __init__(self, reserved: int) -> None:
        self.descriptor = os.memfd_create("shardlite", os.MFD_CLOEXEC)
        nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + reserved
        os.ftruncate(self.descriptor, nbytes)
        super().__init__(self.descriptor)
        start = -(-reserved // _GRAIN) * _GRAIN
        self._lock = threading.Lock()
        self._free = [(start, nbytes - start)]  # by address, never two that touch
        self._given_back: deque[tuple[int, int]] = deque()  # by finalisers, which may run inside anything
        weakref.finalize(self, os.close, self.descriptor)

    def empty(self, nbytes: int) -> Tensor:
        """Return a new block as bytes, [nbytes], uninitialised. It is given back when nothing views it any more.

        Threads may ask at once.

        Raises:
            CommError: there is no room.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:  # no finaliser takes it
            start, length = self._take(-(-nbytes // _GRAIN) * _GRAIN)
        block = (ctypes.c_char * nbytes).from_buffer(self.memory, start)
        tensor = torch.frombuffer(block, dtype=torch.uint8)
        weakref.finalize(block, self._given_back.append, (start, length)).atexit = False
        return tensor

    def _take(self, length: int) -> tuple[int, int]:
        while self._given_back:
            self._put_back(*self._given_back.popleft())
        for i, (start, room) in enumerate(self._free):
            if room >= length:
                self._free[i : i + 1] = [(start + length, room - length)] if room > length else []
                return start, length
        raise CommError(f"no room for {length} bytes in the {self.nbytes} bytes that ranks of this host share")

    def _put_back(self, start: int, length: int) -> None:
        """Join a block with its neighbours among the free ones."""
        insort(self._free, (start, length))
        joined: list[tuple[int, int]] = []
        for begin, room in self._free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((begin, room))
        self._free = joined
