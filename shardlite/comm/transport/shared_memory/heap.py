"""The heap: memory of one rank that other ranks on the same host can read.

The memory has no file name, so it does not outlive the process. The address range is as large as the machine's memory,
and pages are allocated when they are first written. The size of `/dev/shm` does not limit the heap. A freed block keeps
its pages for the next block, since allocating pages takes longer than the operation on the block. Pages that were not
used for a step are freed. A free range is warm if it has pages, and cold otherwise:

    blocks   | A A A A | . . . . | B B | . . . . . . | . . . . . . . . . . .
    pages    | # # # # | # # # # | # # | . . . . . . | . . . . . . . . . . .
                         warm, taken     cold            never used
                         first

The total of warm and live pages never exceeds the peak of live pages in the latest two steps by more than 5 %.
"""

import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from shardlite.comm.control.process import Owner
from shardlite.errors import CommError

_NO_RESERVE = 0x4000  # MAP_NORESERVE
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)  # only Linux has seals
_GRAIN = 4096  # bytes of a page; each block starts at a page
_SLACK = 1.05
"""Maximum ratio of all allocated pages to the peak of live pages (pages of blocks in use)."""


class Mapping:
    """Shared memory, mapped into this process."""

    def __init__(self, descriptor: int) -> None:
        nbytes = os.fstat(descriptor).st_size
        self.memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | _NO_RESERVE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.nbytes = nbytes

    def words(self, start: int, count: int) -> "memoryview[int]":
        """View `count` words of 32 bits, starting at byte `start`."""
        return memoryview(self.memory)[start : start + 4 * count].cast("I")

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """View `numel` elements, starting at byte `start`."""
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=start)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the byte offset of a contiguous tensor, or `None` if it is not in this memory."""
        start = tensor.data_ptr() - self.address
        return start if 0 <= start < self.nbytes else None


class _Spans:
    """Disjoint byte ranges in address order; adjacent ranges are merged."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.nbytes = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def insert(self, start: int, stop: int) -> None:
        """Add a range that does not overlap the existing ranges, and merge it with adjacent ranges."""
        self.nbytes += stop - start
        i = bisect_left(self._starts, start)
        first, last = i, i
        if i > 0 and self._stops[i - 1] == start:
            first, start = i - 1, self._starts[i - 1]
        if i < len(self._starts) and self._starts[i] == stop:
            last, stop = i + 1, self._stops[i]
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """Remove a range that lies within an existing range."""
        self.nbytes -= stop - start
        i = bisect_left(self._stops, stop)
        whole = self._starts[i], self._stops[i]
        left = [part for part in ((whole[0], start), (stop, whole[1])) if part[0] < part[1]]
        self._starts[i : i + 1], self._stops[i : i + 1] = [part[0] for part in left], [part[1] for part in left]

    def gaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of the range `[start, stop)` that none of the stored ranges covers."""
        for own_start, own_stop in self:
            if own_stop > start and own_start < stop:
                if own_start > start:
                    yield start, own_start
                start = own_stop
        if start < stop:
            yield start, stop


class _Returns:
    """Blocks freed by finalizers. Finalizers may run inside any code. This object has no reference to the heap."""

    _blocks_in_use: ClassVar[dict[int, tuple[object, int, int]]] = {}
    """Weak reference, start and length of each block in use, by the id of the reference."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.owner = Owner()
        self.blocks: deque[tuple[int, int, bool]] = deque()
        """Start and length of each freed block, and whether its pages are already freed."""

        self.for_good = False
        """Whether to free the pages of blocks immediately, because no further allocation is expected."""

    def expect(self, block: "ctypes.Array[ctypes.c_char]", start: int, length: int) -> None:
        """When the block is garbage-collected, reclaim its range."""
        reference = weakref.ref(block, self._reclaim)  # `weakref.finalize` takes much longer
        self._blocks_in_use[id(reference)] = reference, start, length

    def _reclaim(self, reference: object) -> None:
        _, start, length = self._blocks_in_use.pop(id(reference))
        dropped = self.for_good
        if dropped:
            self.drop_pages(start, start + length)
        self.blocks.append((start, length, dropped))

    def drop_pages(self, start: int, stop: int) -> None:
        """Free pages. Afterwards the range reads as zero in every process.

        Has no effect in a forked child, because the parent may have allocated the range after the fork.
        """
        if self.owner.is_here:
            self._memory.madvise(mmap.MADV_REMOVE, start, stop - start)


def physical_memory() -> int:
    """Return the size of this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def make_memory(nbytes: int) -> int:
    """Create shared memory without a name, and return its descriptor. Pages are allocated when they are written.

    The size is sealed (cannot change), because the system kills a process that reads past the end of a shrunk file.
    """
    descriptor = os.memfd_create("shardlite", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def has_fixed_size(descriptor: int) -> bool:
    """Return whether the size of the memory is sealed."""
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS


class Heap(Mapping):
    """Shared memory of this rank: `reserved` bytes at the start, then blocks."""

    def __init__(self, reserved: int) -> None:
        nbytes = physical_memory() + reserved
        self.descriptor = make_memory(nbytes)
        super().__init__(self.descriptor)
        self.reserved = _rounded_up(reserved)
        self._lock = threading.Lock()  # finalizers never wait for it, because any code may hold it when they run
        self._trims: deque[int | None] = deque()  # what `trim` was asked to keep, and has not done yet
        self._cold, self._warm = _Spans(), _Spans()  # free ranges
        self._cold.insert(self.reserved, nbytes // _GRAIN * _GRAIN)
        self._used_lately = _Spans()  # free ranges that were freed after the previous `trim`
        self._returns = _Returns(self.memory)
        self._live = self._most = self._most_before = 0
        weakref.finalize(self, os.close, self.descriptor).atexit = False  # only the end of the process unlocks it

    @property
    def live(self) -> int:
        """Bytes of live blocks, rounded up to pages."""
        self._settle_if_idle()
        return self._live

    @property
    def warm(self) -> int:
        """Free bytes that may have pages."""
        self._settle_if_idle()
        return self._warm.nbytes

    def empty(self, nbytes: int) -> Tensor:
        """Allocate a block of uninitialized bytes, [nbytes]. Deleting all tensors on the block frees it. Thread-safe.

        Raises:
            CommError: there is no free range of this size, or the process is a forked child.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        self._returns.owner.check()
        with self._change():
            self._returns.for_good = False
            length = _rounded_up(nbytes)
            start = self._take(length)
            self._live += length
            self._most = max(self._most, self._live)
            # Free ranges may be too short for later blocks, so limit warm pages to the recent peak.
            self._keep_to(int(_SLACK * max(self._most, self._most_before)) - self._live)
        block = (ctypes.c_char * nbytes).from_buffer(self.memory, start)
        tensor = torch.frombuffer(block, dtype=torch.uint8)
        self._returns.expect(block, start, length)
        return tensor

    def trim(self, *, keep: int | None = None) -> None:
        """Free pages unused since the previous call. With `keep`, free all unused pages except `keep` bytes.

        `keep=0` also applies to blocks that are freed later, until the next allocation or the next call. If another
        thread, or this one, is changing the free ranges, the pages are freed directly afterwards. So this never waits,
        and finalizers may call it.
        """
        if self._returns.owner.is_here:  # in a forked child, the lock may be held by a thread of the parent
            self._trims.append(keep)
            self._trim_all()

    def _trim_all(self) -> None:
        while self._trims and self._lock.acquire(blocking=False):
            try:
                self._settle()
                self._trim(self._trims.popleft())
            finally:
                self._lock.release()

    def _trim(self, keep: int | None) -> None:
        self._returns.for_good = keep == 0
        if keep is not None:
            self._keep_to(keep)
            return
        for span in self._warm:
            for start, stop in self._used_lately.gaps(*span):
                self._cool(start, stop)
        self._used_lately = _Spans()
        self._most_before, self._most = self._most, self._live

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Lock the free ranges, and add freed blocks to them. Afterwards do what `trim` could not do meanwhile."""
        try:
            with self._lock:
                self._settle()
                yield
        finally:
            self._trim_all()

    def _settle_if_idle(self) -> None:
        """Add freed blocks to the free ranges, unless these are changing. So a signal handler may ask for bytes."""
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()
        self._trim_all()

    def _take(self, length: int) -> int:
        """Take bytes from the shortest warm range that is long enough. If there is none, also take cold pages."""
        fitting = [(stop - start, start) for start, stop in self._warm if stop - start >= length]
        if fitting:
            _, start = min(fitting)
            self._warm.remove(start, start + length)
            return start
        for _ in range(2):
            place = self._take_cold(length)
            if place is not None:
                return place
            for span in self._warm:  # a warm range may be long enough when it is merged with adjacent cold ranges
                self._cool(*span)
        raise CommError(f"no room for {length} bytes in the {self.nbytes} bytes that ranks of this host share")

    def _take_cold(self, length: int) -> int | None:
        """Take the first cold range that is long enough, together with any warm range directly before it."""
        warm_up_to = {stop: start for start, stop in self._warm}
        for start, stop in self._cold:
            begin = warm_up_to.get(start, start)
            if stop - begin >= length:
                if begin < start:
                    self._warm.remove(begin, start)
                self._cold.remove(start, begin + length)
                return begin
        return None

    def _settle(self) -> None:
        """Add freed blocks to the free ranges."""
        while self._returns.blocks:
            start, length, dropped = self._returns.blocks.popleft()
            self._live -= length
            if dropped:
                self._cold.insert(start, start + length)
                continue
            self._warm.insert(start, start + length)
            for part in self._used_lately.gaps(start, start + length):
                self._used_lately.insert(*part)

    def _keep_to(self, limit: int) -> None:
        """Free pages until the warm ranges have at most `limit` bytes in total, starting with the longest range."""
        if self._warm.nbytes <= limit:
            return
        for start, stop in sorted(self._warm, key=lambda span: span[0] - span[1]):
            over = self._warm.nbytes - limit
            if over <= 0:
                break
            self._cool(max(start, stop - _rounded_up(over)), stop)

    def _cool(self, start: int, stop: int) -> None:
        self._returns.drop_pages(start, stop)
        self._warm.remove(start, stop)
        self._cold.insert(start, stop)


def lazy_zeros(nbytes: int) -> Tensor:
    """Return private zeroed memory [nbytes] as bytes. Pages are allocated when they are first written."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _rounded_up(nbytes: int) -> int:
    return -(-nbytes // _GRAIN) * _GRAIN
