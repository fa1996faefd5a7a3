"""Transport for CUDA tensors over PyTorch's symmetric memory: GPU memory that the other GPUs of the host can read.

**Experimental: it has not run between GPUs.** The tests play symmetric memory on the CPU, and run the kernel in
Triton's interpreter.

    gather      a rank shows its segment in a window, and pulls the others' from theirs to their places: W - 1 copies
    reduction   one launch of a kernel that walks the ring, from the bucket to the shard, or to the step of AdamW
    the rest    (other dtypes, segments of different lengths, counts) rows, shown and pulled, then added by a kernel

    the area of a rank   [ flags | slots of the ring | window 0 | window 1 ]

Only the area is symmetric. A rank chooses its gather buffers and buckets by itself, so no other rank knows where they
lie: a segment is copied once to a window, within the memory of its GPU, and pulled from there into any buffer. A bucket
is read where it lies. Everything is enqueued on the current stream, and the host never waits.

**Windows** are used in turn, so that one barrier is enough:

    rank 0   show 0  barrier 0  pull 0  show 1  barrier 1  pull 1  show 2 ...      barrier 1 is over once all ranks
    rank 1   show 0  barrier 0  pull 0  show 1  barrier 1  pull 1  show 2 ...      have come to it, after pull 0

`show i` writes to window `i % 2`. A rank comes to barrier `i + 1` after `pull i`, in the order of its stream. So once
that barrier is over, no rank reads window `i % 2` any more, and `show i + 2`, which follows it, may overwrite it.
With one window, `show i + 1` would follow only barrier `i`, when others may still pull.

**Rings** have slots and flags of their own, so nothing orders them after windows; `signals.py` of the kernels proves
that no slot is overwritten early. Their epochs count the rings of this transport.

**No deadlock**: all ranks make the same calls in one order, each on one stream. The rank that is furthest behind is in
a barrier or a ring at which the others have arrived or been before, so it waits for none of them.

Legend: `W` ranks, `n` elements in the full buffer; windows and areas are counted in bytes.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from shardlite_kernels import (
    PROGRAMS,
    Peers,
    flag_numel,
    ring_reduce_adamw,
    ring_reduce_scatter,
    send,
    slots_nbytes,
    stats_block,
    use_triton,
)
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from shardlite.comm.chunking import Cut
from shardlite.comm.control.store import TIMEOUT, all_gather_json
from shardlite.comm.shm.rendezvous import nodes_of
from shardlite.comm.transport.gloo import Posted
from shardlite.comm.transport.group_collectives import FusedStep, WholeCollectives, as_bytes
from shardlite.config import devices_may_overlap
from shardlite.errors import LayoutError
from shardlite.telemetry import Ledger

AREA = 64 << 20
"""Bytes of the area of a rank. Not measured: 8 MiB for the ring, and two windows of 28 MiB."""

_WINDOWS = 2
_ALIGNMENT = 128  # bytes: the size of a GPU's cache line
_WIDEST = 8  # bytes of an element
_CHANNEL = 0  # each transport has its own allocation, which has its own signals
_LOOKS = 10**6  # a second: how often a kernel reads a flag. An estimate
_MOST_LOOKS = 2**31 - 1
_IN_RING = (torch.float32, torch.bfloat16, torch.float16)


class SymmetricMemoryTransport(WholeCollectives):
    """Whole collectives through `memory`, which no other transport uses. **Experimental: it has not run between GPUs.**

    Collectives that run at the same time need separate transports, and streams that do not block each other, as those
    under `CUDA_DEVICE_MAX_CONNECTIONS=1` do. CUDA graphs are not supported: a replay would reuse the windows and epochs
    of the capture.

    A waiting stream spins in a kernel. If its peer is late by `timeout`, that kernel, or the next one, ends in a
    trap: later CUDA calls fail, those of this class with a `CommError`, and the process cannot continue.

    `area` is this rank's allocation, which the transport keeps alive. `programs` of a ring run at once.

    Raises:
        LayoutError: the areas are too small for this number of ranks.
    """

    batched = True
    blocking = False

    def __init__(
        self, memory: _SymmetricMemory, timeout: timedelta, area: Tensor | None = None, *, programs: int = PROGRAMS
    ) -> None:
        self.rank, self.world_size = memory.rank, memory.world_size
        self._memory = memory
        self._timeout = timeout
        self._patience = max(1, int(timeout.total_seconds() * 1000))  # ms; 0 would mean no timeout
        self._areas = [memory.get_buffer(rank, (memory.buffer_size,), torch.uint8) for rank in range(self.world_size)]
        self._others = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        flags, slots = flag_numel(programs) * 8, slots_nbytes(programs)
        self._windows = flags + slots  # where the first one begins
        self.slice_nbytes = (memory.buffer_size - self._windows) // _WINDOWS // _ALIGNMENT * _ALIGNMENT
        self._check_size()
        self._shown = self._epoch = 0
        limit = min(_MOST_LOOKS, int(timeout.total_seconds() * _LOOKS) + 1)
        self._peers = _peers_of(self._areas, self.rank, flags, programs=programs, limit=limit)
        self._turns = _Turns(memory.device)
        self.holder = books = Ledger()
        if isinstance(area, Tensor):
            books.track("mailboxes", area)
        self._areas[self.rank][:flags].zero_()
        self._barrier()  # or another rank might set a flag before it is zeroed

    def _check_size(self) -> None:
        """Check that the largest grain of a reduction fits in a window, with a row for each rank."""
        needed = self.world_size * stats_block(self._areas[self.rank]) * _WIDEST
        if self.slice_nbytes < needed:
            raise LayoutError(
                f"symmetric memory of {self._memory.buffer_size} bytes per rank is too small for {self.world_size} "
                f"ranks: at least {self._windows + _WINDOWS * needed} bytes are needed"
            )

    def all_gather(self, full: Tensor, cut: Cut) -> None:
        """Fill `full` [n] in place, given this rank's segment.

        Raises:
            CommError: a peer failed or is late.
        """
        segments = [as_bytes(full[start:stop]) for start, stop in cut.bounds]
        with self._turn("all-gather", full):
            for part in self._parts(cut.longest * full.itemsize):
                windows = self._show([segments[self.rank][part]])
                for peer in self._others:
                    _fill(segments[peer][part], windows[peer])

    def broadcast(self, full: Tensor, source: int) -> None:
        """Copy `full` [n] of rank `source` into that of every other rank.

        Raises:
            CommError: a peer failed or is late.
        """
        content = as_bytes(full)
        with self._turn("broadcast", full):
            for part in self._parts(full.nbytes):
                windows = self._show([content[part]] if self.rank == source else [])
                if self.rank != source:
                    _fill(content[part], windows[source])

    def all_reduce(self, numbers: Tensor) -> None:
        """Sum integers [n] over the ranks in place.

        Raises:
            CommError: a peer failed or is late.
        """
        rows = numbers.repeat(self.world_size)
        bounds = [(rank * numbers.numel(), (rank + 1) * numbers.numel()) for rank in range(self.world_size)]
        self.all_gather(rows, Cut(bounds, chunk=1))
        torch.sum(rows.view(self.world_size, numbers.numel()), 0, dtype=numbers.dtype, out=numbers)

    def exchange_rows(self, full: Tensor, cut: Cut, part: tuple[int, int], staging: Tensor) -> Tensor:
        """Return the elements `part` of this rank's segment as every rank has them in `full` [n]: rows [W, .].

        Raises:
            CommError: a peer failed or is late.
        """
        shown = [full[min(low + part[0], high) : min(low + part[1], high)] for low, high in cut.bounds]
        before = sum(each.nbytes for each in shown[: self.rank])
        own = shown[self.rank]
        rows = staging[: self.world_size * own.numel()].view(self.world_size, own.numel())
        whole = sum(each.nbytes for each in shown) == full.nbytes
        with self._turn("exchange of rows", full):
            windows = self._show([as_bytes(each) for each in ([full] if whole else shown)])
            for peer in self._others:
                _fill(as_bytes(rows[peer]), windows[peer][before:])
            rows[self.rank].copy_(own)
        return rows

    def rings(self, full: Tensor, cut: Cut) -> bool:
        """Return whether a kernel adds such a buffer: segments of one length, in fp32, bf16 or fp16, and no tree."""
        in_ring = self.algorithm != "halving" and full.dtype in _IN_RING
        return in_ring and use_triton(full) and cut.even and cut.longest > 0

    def ring_reduce(self, out: Tensor, full: Tensor, divisor: int) -> None:
        """Write the mean of this rank's segment of `full` [n] to `out` [n/W]. Partial sums are in the dtype of `full`.

        Raises:
            CommError: a peer failed or is late.
        """
        with self._ring("reduce-scatter", full) as epoch:
            ring_reduce_scatter(out, full, self._peers, epoch=epoch, divisor=divisor, wire=full.dtype)

    def ring_step(self, step: FusedStep, full: Tensor, divisor: int) -> None:
        """Step by what `ring_reduce` would write in fp32.

        Raises:
            CommError: a peer failed or is late.
        """
        state, table, bad = step
        with self._ring("reduce-scatter with a step", full) as epoch:
            ring_reduce_adamw(state, full, table, self._peers, epoch=epoch, divisor=divisor, wire=full.dtype, bad=bad)

    @contextmanager
    def _ring(self, what: str, full: Tensor) -> Iterator[int]:
        """Give the next epoch to a ring, and let the stream fail after it if it has failed."""
        with self._turn(what, full):
            self._epoch += 1
            yield self._epoch
            torch._assert_async(self._peers.error == 0, "a neighbour in the ring was silent")

    @contextmanager
    def _turn(self, what: str, full: Tensor) -> Iterator[None]:
        """Order a collective after the last one, and name it in errors."""
        try:
            self._turns.wait_for_last()
            yield
            self._turns.record_end()
        except RuntimeError as error:
            posted = Posted(self.rank, timeout=self._timeout, collective=what, tensors=(full,))
            raise posted.refused(error) from error

    def _parts(self, nbytes: int) -> Iterator[slice]:
        """Yield ranges of bytes that fit in a window."""
        return (slice(start, start + self.slice_nbytes) for start in range(0, nbytes, self.slice_nbytes))

    def _show(self, contents: Sequence[Tensor]) -> list[Tensor]:
        """Show bytes, one tensor after the other, to all ranks. Return the window of each rank, in which it shows its.

        They may be read until the next call.
        """
        start = self._windows + self._shown % _WINDOWS * self.slice_nbytes
        self._shown += 1
        windows = [area[start : start + self.slice_nbytes] for area in self._areas]
        place = 0
        for content in contents:
            _fill(windows[self.rank][place : place + content.numel()], content)
            place += content.numel()
        self._barrier()
        return windows

    def _barrier(self) -> None:
        """Let the stream wait until those of all ranks have come here."""
        self._memory.barrier(_CHANNEL, self._patience)


def _fill(target: Tensor, source: Tensor) -> None:
    """Fill `target` [n] from the begin of `source`, by a copy engine if that lies on another GPU."""
    if target.numel():
        target.copy_(source[: target.numel()])


def _peers_of(areas: Sequence[Tensor], rank: int, flags: int, *, programs: int, limit: int) -> Peers:
    """Return what a ring kernel needs to know of all ranks: `flags` bytes of flags in each area, then slots."""
    addresses = [area.data_ptr() for area in areas]
    device = areas[rank].device
    return Peers(
        rank=rank,
        world_size=len(areas),
        slots=send([address + flags for address in addresses], torch.int64, device),
        flags=send(addresses, torch.int64, device),
        error=torch.zeros(1, dtype=torch.int64, device=device),
        programs=programs,
        limit=limit,
    )


class _Turns:
    """Orders collectives of several streams: a window is free only if they run in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    def wait_for_last(self) -> None:
        """Let the current stream wait for the last collective, if that was enqueued on another stream."""
        if self._last is not None:
            before, done = self._last
            stream = torch.cuda.current_stream(self._device)
            if stream != before:
                stream.wait_event(done)

    def record_end(self) -> None:
        """Record the end of the collective on the current stream. No-op on a CPU, in tests."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            self._last = stream, stream.record_event()


_WHAT = "symmetric memory"


def why_not(group: dist.ProcessGroup, device: torch.device, timeout: timedelta = TIMEOUT) -> str:
    """Return why the ranks of `group` cannot use symmetric memory on their devices, or `""`. Equal on every rank.

    Collective; each rank passes its own `device`.
    """
    reason = _not_here(device)
    number = None if reason else _numbered(device).index
    rows = all_gather_json(group, (reason, number, devices_may_overlap()), _WHAT, timeout)
    if missing := next((f"rank {rank}: {row[0]}" for rank, row in enumerate(rows) if row[0]), ""):
        return missing
    if not _on_one_host(group, timeout):
        return "the ranks are on several hosts"
    numbers = [number for _, number, _ in rows]
    shared = next((each for each in numbers if numbers.count(each) > 1), None)
    if shared is not None and not all(may for _, _, may in rows):
        ranks = [rank for rank, each in enumerate(numbers) if each == shared]
        return (
            f"ranks {ranks} all use cuda:{shared}. PyTorch identifies devices by this number, so each process must "
            "see all GPUs; set TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 on all ranks if they are to share one"
        )
    own = _numbered(device)
    apart = [each for each in numbers if each != own.index and not torch.cuda.can_device_access_peer(own, each)]
    blind = f"{own} cannot access the memory of cuda:{apart[0]}" if apart else ""
    return next((each for each in all_gather_json(group, blind, _WHAT, timeout) if each), "")


def symmetric_memory(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, nbytes: int = AREA
) -> SymmetricMemoryTransport:
    """Return a transport over its own symmetric memory, `nbytes` on each rank. Collective over `group`.

    Raises:
        LayoutError: symmetric memory is not available; the error names the reason.
    """
    reason = why_not(group, device, timeout)
    if not reason:
        failure, memory, area = "", None, None
        try:
            area = _allocate(_numbered(device), nbytes)
            memory = _SymmetricMemory.rendezvous(area, group.group_name)
        except RuntimeError as error:
            failure = f"rank {dist.get_rank(group)}: {error}"
        reason = next((each for each in all_gather_json(group, failure, _WHAT, timeout) if each), "")
        if not reason:
            assert memory is not None, "or there was a reason"
            warnings.warn("transport='symmetric_memory' is experimental: it has not run between GPUs", stacklevel=1)
            return SymmetricMemoryTransport(memory, timeout, area)
    raise LayoutError(f"transport='symmetric_memory' is not available: {reason}. Use 'p2p' or 'auto'")


def _not_here(device: torch.device) -> str:
    """Return what this process lacks, or `""`."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "requires a CUDA device, and there is none"
    backend = _SymmetricMemory.get_backend(device)
    return "" if backend == "CUDA" else f"requires PyTorch's backend 'CUDA' for symmetric memory, got {backend!r}"


def _on_one_host(group: dist.ProcessGroup, timeout: timedelta) -> bool:
    try:
        return nodes_of(group, timeout) == dist.get_world_size(group)
    except LayoutError:  # several hosts with different numbers of ranks
        return False


def _numbered(device: torch.device) -> torch.device:
    """Return a CUDA device with its index; without one it is the current device."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _allocate(device: torch.device, nbytes: int) -> Tensor:
    """Allocate an area. It must be a separate allocation, because signals belong to allocations.

    `torch.distributed._symmetric_memory.empty` allocates from a pool, which may return another transport's former
    allocation, with signals that were put and never taken.
    """
    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
