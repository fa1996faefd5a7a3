"""Transport for CUDA tensors over PyTorch's symmetric memory: GPU memory that the other GPUs of the host can read.

**Experimental: it has not been tested between GPUs.** The tests simulate symmetric memory on the CPU, and run the
kernel in Triton's interpreter.

    gather      a rank shows its segment in a window, and pulls the other segments from the other windows: W - 1 copies
    reduction   one launch of a kernel that reduces along the ring, from the bucket to the shard or to the AdamW step
    the rest    (other dtypes, segments of different lengths, counts) rows are shown and pulled, then added

    the area of a rank   [ flags | slots of the ring | window 0 | window 1 ]

Only the area is symmetric memory. A rank allocates its gather buffers and gradient buckets independently, so other
ranks do not know the addresses. Therefore a rank copies its segment once to a window, within the memory of its GPU, and
other ranks pull the segment from the window into their buffers. A rank reads its own bucket in place. Everything is
enqueued on the current stream, and the host never waits.

**Windows** are used alternately, so one barrier per window is sufficient:

    rank 0   show 0  barrier 0  pull 0  show 1  barrier 1  pull 1  show 2 ...      barrier 1 ends after all ranks
    rank 1   show 0  barrier 0  pull 0  show 1  barrier 1  pull 1  show 2 ...      reached it, so after pull 0

`show i` writes to window `i % 2`. In the order of its stream, a rank arrives at barrier `i + 1` after `pull i`. So when
barrier `i + 1` has ended, no rank reads window `i % 2`, and `show i + 2` may overwrite the window. With a single
window, `show i + 1` would only follow barrier `i`, when other ranks may still be in `pull i`.

**Rings** use slots and flags and no windows, so rings and windows may be used in any order. `signals.py` of the kernels
proves that no slot is overwritten early. Epochs count the rings of this transport.

**No deadlock**: all ranks make the same calls in the same order, each on one stream. The rank that is furthest
behind is in a barrier or a ring at which all other ranks have already arrived, so this rank does not wait.

Legend: `W` ranks, `n` elements in the full buffer; windows and areas are counted in bytes.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from shardlite_kernels import send, stats, stats_block, use_triton
from shardlite_kernels.device_ring import ring_reduce_adamw, ring_reduce_scatter
from shardlite_kernels.signals import PROGRAMS, Peers, flag_numel, slots_nbytes
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from shardlite.comm.chunking import Cut, cut_up
from shardlite.comm.control.store import TIMEOUT, all_gather_json
from shardlite.comm.operation import UNNAMED, Operation
from shardlite.comm.transport.base import FusedStep, LastHop, StoreMean
from shardlite.comm.transport.gloo import Posted
from shardlite.comm.transport.group_collectives import WholeCollectives, as_bytes
from shardlite.comm.transport.shared_memory.rendezvous import nodes_of
from shardlite.config import devices_may_overlap
from shardlite.errors import LayoutError
from shardlite.telemetry import Ledger

AREA = 64 << 20
"""Bytes of a rank's area: 8 MiB for the ring, and two windows of 28 MiB. Not chosen by measurement."""

_WINDOWS = 2
_ALIGNMENT = 128  # bytes: the size of a GPU's cache line
_WIDEST = 8  # bytes of the widest element
_CHANNEL = 0  # always the same, because each transport has its own allocation and signals
_LOOKS = 10**6  # estimate of how often a kernel reads a flag in a second
_MOST_LOOKS = 2**31 - 1
_IN_RING = (torch.float32, torch.bfloat16, torch.float16)


class SymmetricMemoryTransport(WholeCollectives):
    """Whole collectives through `memory`, which no other transport uses. **Experimental: not tested between GPUs.**

    Collectives that run concurrently need separate transports and streams that do not block each other. With
    `CUDA_DEVICE_MAX_CONNECTIONS=1` streams block each other. CUDA graphs are not supported: a replay would reuse the
    windows and epochs of the capture.

    A waiting stream spins in a kernel. If a peer does not arrive within `timeout`, this kernel or the next kernel
    traps. Later CUDA calls then fail, and the process cannot continue. Calls of this class raise a `CommError`.

    The tensor `area` is this rank's allocation, which the transport keeps alive. A ring kernel runs `programs`
    concurrent programs (thread blocks).

    Raises:
        LayoutError: the areas are too small for this number of ranks.
    """

    batched = True
    blocking = False
    replays = False

    def __init__(
        self, memory: _SymmetricMemory, timeout: timedelta, area: Tensor | None = None, *, programs: int = PROGRAMS
    ) -> None:
        self.rank, self.world_size = memory.rank, memory.world_size
        self._memory = memory
        self._timeout = timeout
        self._timeout_ms = max(1, int(timeout.total_seconds() * 1000))  # 0 would mean no timeout
        self._areas = [memory.get_buffer(rank, (memory.buffer_size,), torch.uint8) for rank in range(self.world_size)]
        self._others = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        flags, slots = flag_numel(programs) * 8, slots_nbytes(programs)
        self._windows = flags + slots  # offset of the first window
        self.slice_nbytes = (memory.buffer_size - self._windows) // _WINDOWS // _ALIGNMENT * _ALIGNMENT
        own = self._areas[self.rank]
        # A window holds the largest grain of a reduction, with a row for each rank.
        if self.slice_nbytes < (needed := self.world_size * stats_block(own) * _WIDEST):
            raise LayoutError(
                f"symmetric memory of {memory.buffer_size} bytes per rank is too small for {self.world_size} ranks: at "
                f"least {self._windows + _WINDOWS * needed} bytes are needed"
            )
        self._shown = self._epoch = 0
        addresses = [each.data_ptr() for each in self._areas]
        self._peers = Peers(
            rank=self.rank,
            world_size=self.world_size,
            slots=send([address + flags for address in addresses], torch.int64, own.device),
            flags=send(addresses, torch.int64, own.device),
            error=torch.zeros(1, dtype=torch.int64, device=own.device),
            programs=programs,
            limit=min(_MOST_LOOKS, int(timeout.total_seconds() * _LOOKS) + 1),
        )
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None  # stream and end of the latest collective
        self.holder = books = Ledger()
        if isinstance(area, Tensor):
            books.track("mailboxes", area)
        own[:flags].zero_()
        # Without this barrier, another rank might set a flag before this rank zeroes it.
        memory.barrier(_CHANNEL, self._timeout_ms)

    def all_gather(self, full: Tensor, cut: Cut, operation: Operation) -> None:
        """Fill `full` [n] in place, given this rank's segment."""
        start, stop = cut.bounds[self.rank]
        operation.count_collective((self.world_size - 1) * (stop - start) * full.itemsize)
        segments = [as_bytes(full[start:stop]) for start, stop in cut.bounds]
        with self._turn("all-gather", full):
            for part in self._parts(cut.longest * full.itemsize):
                windows = self._show([segments[self.rank][part]])
                for peer in self._others:
                    _fill(segments[peer][part], windows[peer])

    def copy_from(self, source: int, full: Tensor) -> None:
        """Copy `full` [n] of rank `source` to `full` of every other rank, uncounted."""
        content = as_bytes(full)
        with self._turn("broadcast", full):
            for part in self._parts(full.nbytes):
                windows = self._show([content[part]] if self.rank == source else [])
                if self.rank != source:
                    _fill(content[part], windows[source])

    def add_integers(self, numbers: Tensor) -> None:
        """Sum integers [n] over the ranks in place, uncounted."""
        rows = numbers.repeat(self.world_size)
        self.all_gather(rows, cut_up(rows.numel(), rows.dtype, self), UNNAMED)
        torch.sum(rows.view(self.world_size, numbers.numel()), 0, dtype=numbers.dtype, out=numbers)

    def exchange_rows(self, full: Tensor, cut: Cut, part: tuple[int, int], staging: Tensor) -> Tensor:
        """Return all ranks' rows of the elements `part` of this rank's segment of `full` [n]: [W, .] in `staging`."""
        shown = [full[start:stop] for start, stop in cut.ranges(part)]
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
        """Return whether a ring kernel can add `full` [n] over the ranks, without staging. Equal on all ranks.

        The dtype must be fp32, bf16 or fp16, segments must be equal, and the order of addition must not be a tree.
        """
        in_ring = self.algorithm != "halving" and full.dtype in _IN_RING
        return in_ring and use_triton(full) and cut.even and cut.longest > 0

    def reduce_scatter(self, full: Tensor, cut: Cut, last: LastHop, staging: Tensor, operation: Operation) -> None:
        """Sum this rank's segment of `full` [n] over the ranks, in a ring kernel if it can also make the last hop."""
        if not isinstance(last, StoreMean) or last.out is None or not self.rings(full, cut):
            super().reduce_scatter(full, cut, last, staging, operation)
            return
        operation.count_collective(full.nbytes - full.nbytes // self.world_size)
        self.ring_reduce(last.out, full, last.divisor)
        if last.stats is not None:
            stats(last.out, last.stats)

    def ring_reduce(self, out: Tensor, full: Tensor, divisor: int) -> None:
        """Write the mean of this rank's segment of `full` [n], added in the order of the ring, to `out` [n/W].

        Partial sums are in the dtype of `full`.
        """
        with self._ring("reduce-scatter", full) as epoch:
            ring_reduce_scatter(out, full, self._peers, epoch=epoch, divisor=divisor, wire=full.dtype)

    def ring_step(self, step: FusedStep, full: Tensor, divisor: int) -> None:
        """Update weights by AdamW with the mean that `ring_reduce` would write to an fp32 `out`.

        Other ranks may call `ring_reduce` instead.
        """
        state, table, bad = step
        with self._ring("reduce-scatter with a step", full) as epoch:
            ring_reduce_adamw(state, full, table, self._peers, epoch=epoch, divisor=divisor, wire=full.dtype, bad=bad)

    @contextmanager
    def _ring(self, what: str, full: Tensor) -> Iterator[int]:
        """Run a ring in this block, and yield the ring's epoch. If the ring fails, the stream's later work fails."""
        with self._turn(what, full):
            self._epoch += 1
            yield self._epoch
            torch._assert_async(self._peers.error == 0, "a neighbour in the ring did not respond")

    @contextmanager
    def _turn(self, what: str, full: Tensor) -> Iterator[None]:
        """Run the collective `what` in this block, after the previous collective. Errors contain `what`."""
        device = self._memory.device  # a CPU in tests
        try:
            # A window is free only if collectives run in order, even on different streams.
            if self._last is not None and self._last[0] != torch.cuda.current_stream(device):
                torch.cuda.current_stream(device).wait_event(self._last[1])
            yield
            if device.type == "cuda":
                stream = torch.cuda.current_stream(device)
                self._last = stream, stream.record_event()
        except RuntimeError as error:
            posted = Posted(self.rank, timeout=self._timeout, collective=what, tensors=(full,))
            raise posted.refused(error) from error

    def _parts(self, nbytes: int) -> Iterator[slice]:
        """Return consecutive ranges of `nbytes` that fit in a window."""
        return (slice(start, start + self.slice_nbytes) for start in range(0, nbytes, self.slice_nbytes))

    def _show(self, contents: Sequence[Tensor]) -> list[Tensor]:
        """Write bytes, one tensor after the other, to this rank's window. Return the filled windows of all ranks.

        The windows may be read until the next call.
        """
        start = self._windows + self._shown % _WINDOWS * self.slice_nbytes
        self._shown += 1
        windows = [area[start : start + self.slice_nbytes] for area in self._areas]
        place = 0
        for content in contents:
            _fill(windows[self.rank][place : place + content.numel()], content)
            place += content.numel()
        self._memory.barrier(_CHANNEL, self._timeout_ms)  # a barrier of all ranks' streams
        return windows


def _fill(target: Tensor, source: Tensor) -> None:
    """Copy the beginning of `source` to `target` [n]. If `source` is on another GPU, a copy engine copies."""
    if target.numel():
        target.copy_(source[: target.numel()])


_WHAT = "symmetric memory"
_UNEQUAL = (
    " (PyTorch numbers the rendezvous of a process, and ranks with different numbers do not find each other: each rank "
    "must take part in equally many)"
)


def why_not(group: dist.ProcessGroup, device: torch.device, timeout: timedelta = TIMEOUT) -> str:
    """Return why the ranks of `group` cannot use symmetric memory on their devices, or `""`. Collective.

    Each rank passes its own `device`. The result is equal on every rank.
    """
    reason = _not_here(device)
    number = None if reason else _numbered(device).index
    rows = all_gather_json(group, (reason, number, devices_may_overlap()), _WHAT, timeout)
    if missing := next((f"rank {rank}: {row[0]}" for rank, row in enumerate(rows) if row[0]), ""):
        return missing
    try:
        on_one_host = nodes_of(group, timeout) == dist.get_world_size(group)
    except LayoutError:  # several hosts with different numbers of ranks
        on_one_host = False
    if not on_one_host:
        return "the ranks are on several hosts"
    numbers = [number for _, number, _ in rows]
    shared = next((each for each in numbers if numbers.count(each) > 1), None)
    if shared is not None and not all(may for _, _, may in rows):
        ranks = [rank for rank, each in enumerate(numbers) if each == shared]
        return (
            f"ranks {ranks} all use cuda:{shared}. PyTorch identifies devices by this number, so each process must "
            "see all GPUs. To share a GPU between ranks, set TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 on all ranks"
        )
    own = _numbered(device)
    apart = [each for each in numbers if each != own.index and not torch.cuda.can_device_access_peer(own, each)]
    blind = f"{own} cannot access the memory of cuda:{apart[0]}" if apart else ""
    return next((each for each in all_gather_json(group, blind, _WHAT, timeout) if each), "")


def symmetric_memory(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, nbytes: int = AREA
) -> SymmetricMemoryTransport:
    """Allocate symmetric memory, `nbytes` on each rank, and return a transport over it. Collective over `group`.

    Raises:
        LayoutError: symmetric memory is not available; the error names the reason.
    """
    reason = why_not(group, device, timeout)
    if not reason:
        failure, memory, area = "", None, None
        try:
            # Each transport has a separate allocation, because signals belong to allocations. The pool from which
            # `torch.distributed._symmetric_memory.empty` allocates may return a former allocation of another transport,
            # in which signals are still set.
            area = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, _numbered(device))
            memory = _SymmetricMemory.rendezvous(area, group.group_name)
        except RuntimeError as error:
            failure = f"rank {dist.get_rank(group)}: {error}{_UNEQUAL if 'timeout' in str(error) else ''}"
        reason = next((each for each in all_gather_json(group, failure, _WHAT, timeout) if each), "")
        if not reason:
            assert memory is not None, "otherwise there is a reason"
            warnings.warn(
                "transport='symmetric_memory' is experimental: it has not been tested between GPUs", stacklevel=1
            )
            return SymmetricMemoryTransport(memory, timeout, area)
    raise LayoutError(f"transport='symmetric_memory' is not available: {reason}. Use 'p2p' or 'auto'")


def _not_here(device: torch.device) -> str:
    """Return why symmetric memory is not available in this process, or `""`."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "requires a CUDA device, but none is available"
    backend = _SymmetricMemory.get_backend(device)
    return "" if backend == "CUDA" else f"requires PyTorch's backend 'CUDA' for symmetric memory, got {backend!r}"


def _numbered(device: torch.device) -> torch.device:
    """Return a CUDA device with an index. A device without an index means the current device."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
