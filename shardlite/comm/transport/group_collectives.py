"""Whole collectives of a process group, for transports that do not go message by message.

    gather     `all_gather_into_tensor`, in place; over gloo by messages
    reduction  `all_to_all_single`: rank `k` receives segment `k` of every rank, a row each; one kernel then adds the
               rows in the order of the ring (`shardlite_kernels.add_rows`). Of two ranks, each receives one row and
               adds its own from the bucket (`shardlite_kernels.hop`)

So the bits are those of the ring, at a number of calls that does not depend on the number of ranks. Over NCCL, where a
message costs the host more than a whole collective, and over gloo. A long reduction goes in slices of all segments;
over NCCL one is transferred while the one before is added.

Such calls have no tags: all ranks must make them in one order, so each queue of operations has a connection of its own
(`communicators.py`, over gloo `reconnect.py`). That is a backend, so its methods are called, and not the functions of
`torch.distributed`, which take process groups.

Legend: `W` ranks, `n` elements in the full buffer, `S` elements of the longest segment.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Backend

from shardlite.comm.chunking import Cut
from shardlite.comm.transport.base import Completed, Message, Pending
from shardlite.comm.transport.process_group import GlooTransport, GroupTransport, InFlight, NcclTransport, Posted
from shardlite.comm.transport.whole import WholeCollectives, as_bytes, slices_of
from shardlite.errors import CommError
from shardlite.telemetry import Ledger

ROOM = 64 << 20
"""Maximum bytes of the rows of a slice."""

_SLOTS = 3
"""Slots of the staging buffer of a reduction in slices, each for the rows of one."""


@lru_cache(maxsize=1024)
def slices_in(longest: int, world_size: int, itemsize: int, grain: int, room: int = ROOM) -> Sequence[tuple[int, int]]:
    """Return the ranges of elements of each segment that go at once: all if the slots together take its rows."""
    count = _row_count(world_size)
    whole = count * longest * itemsize <= _SLOTS * room
    return slices_of(longest, count, itemsize, grain, _SLOTS * room if whole else room)


@lru_cache(maxsize=1024)
def rows_numel(longest: int, world_size: int, itemsize: int, grain: int, room: int = ROOM) -> int:
    """Return the elements of the staging buffer: the rows of a reduction, or a slot for each of three slices."""
    slices = slices_in(longest, world_size, itemsize, grain, room)
    numel = _row_count(world_size) * max((stop - start for start, stop in slices), default=0)
    return numel if len(slices) <= 1 else _SLOTS * numel


def _row_count(world_size: int) -> int:
    """Return how many rows a rank receives: of two, the other's only."""
    return 1 if world_size == 2 else world_size


def _synchronous(options: Any) -> Any:
    """Let NCCL run on the current stream instead of its own."""
    options.asyncOp = False
    return options


_GATHER = _synchronous(c10d.AllgatherOptions())
_EXCHANGE = _synchronous(c10d.AllToAllOptions())
_EXCHANGE_BESIDE = c10d.AllToAllOptions()  # on NCCL's own stream, behind the current stream's work so far
_SUM_SCATTERED = _synchronous(c10d.ReduceScatterOptions())
_SUM = _synchronous(c10d.AllreduceOptions())
_LARGEST = _synchronous(c10d.AllreduceOptions())
_LARGEST.reduceOp = dist.ReduceOp.MAX


class GroupCollectives(WholeCollectives, GroupTransport):
    """A transport whose gathers and reductions are collectives of its process group. The base of two classes."""

    fast = False
    """Whether the process group adds up the rows of a reduction, in an order of its own."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.room = ROOM
        self._splits = [] if self.world_size != 2 else [0, 1] if self.rank == 0 else [1, 0]
        self.holder = self._books = Ledger()

    def all_gather(self, full: Tensor, cut: Cut) -> None:
        """Fill `full` [n] in place, given this rank's segment.

        Raises:
            CommError: a peer failed or is late.
        """
        start, stop = cut.bounds[self.rank]
        if cut.even:
            self._gather(full, start, stop)
            return
        length = cut.longest
        padded = full.new_empty(self.world_size * length)
        self._books.track("staging", padded)
        padded[self.rank * length :][: stop - start] = full[start:stop]
        self._gather(padded, self.rank * length, (self.rank + 1) * length)
        for rank, (low, high) in enumerate(cut.bounds):
            full[low:high] = padded[rank * length :][: high - low]

    def _gather(self, full: Tensor, start: int, stop: int) -> None:
        """Fill `full` [n], whose elements `[start, stop)` are this rank's."""

        def call(full: Tensor, own: Tensor) -> Any:
            return self._group._allgather_base(full, own, _GATHER)

        memory = as_bytes(full)
        self._run("all-gather", call, memory, memory[start * full.itemsize : stop * full.itemsize])

    def slices(self, cut: Cut, itemsize: int, grain: int) -> Sequence[tuple[int, int]]:
        """Return the ranges of elements of each segment that go at once."""
        return slices_in(cut.longest, self.world_size, itemsize, grain, self.room)

    def rows_numel(self, cut: Cut, itemsize: int, grain: int) -> int:
        """Return how many elements `rows` needs."""
        if self.sums(cut):
            return cut.longest
        return rows_numel(cut.longest, self.world_size, itemsize, grain, self.room)

    def rows(self, full: Tensor, cut: Cut, room: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's segment of `full` [n] as every rank has it, slice by slice: its start, and rows [W, .].

        Of two ranks it is the other's row only, [1, .]. Over NCCL, if segments have equal lengths, a slice is
        transferred while the caller adds the one before.

        Raises:
            CommError: a peer failed or is late.
        """
        slices = self.slices(cut, full.itemsize, cut.grain)
        if len(slices) <= 1 or not cut.even:
            return super().rows(full, cut, room)
        return _landed(self._exchanges(full, slices, room))

    def _exchanges(
        self, full: Tensor, slices: Sequence[tuple[int, int]], room: Tensor
    ) -> Iterator[tuple[int, Tensor, Pending]]:
        """Start to exchange slices of equal segments; yield the start of each, its rows, and what to wait for.

        Three slots take turns. A copy is behind the addition that frees its slot, for both run on the current stream.
        A transfer is behind the one before it, in the order of NCCL's stream, and behind the copy that it sends, so
        behind that addition, too.

                     transfer 0   transfer 1      transfer 2      transfer 3
            slot 0   sent 0       rows 1          add 1, copy 3   sent 3
            slot 1   rows 0       add 0, copy 2   sent 2          rows 3
            slot 2   copy 1       sent 1          rows 2          add 2, copy 4

        Of two ranks, each sends from the bucket, and nothing is copied.
        """
        ranks, numel = self.world_size, _row_count(self.world_size) * slices[0][1]
        word = _word(full, room, full.numel() // ranks)
        slots = room[: _SLOTS * numel].view(word).view(_SLOTS, _row_count(ranks), -1).unbind()
        pieces = torch.split(full.view(word).view(ranks, -1), slots[0].shape[1], 1)
        for k, ((start, stop), piece) in enumerate(zip(slices, pieces, strict=True)):
            rows, sent = slots[(1 - k) % _SLOTS], slots[-k % _SLOTS]
            if stop - start < slices[0][1]:  # the last one
                rows, sent = (_shortened(slot, piece.shape[1]) for slot in (rows, sent))
            if ranks == 2:
                sent = piece[1 - self.rank :][:1]
            else:
                sent.copy_(piece)
            yield start, rows.view(full.dtype), self._begin("all-to-all", self._exchange_beside, rows, sent)

    def _exchange_beside(self, rows: Tensor, sent: Tensor) -> Any:
        """Start to receive `rows` [W, .] and to send `sent` [W, .], of two ranks [1, .]."""
        return self._group.alltoall_base(rows, sent, self._splits, self._splits, _EXCHANGE_BESIDE)

    def exchange_rows(self, full: Tensor, cut: Cut, part: tuple[int, int], room: Tensor) -> Tensor:
        """Return the elements `part` of this rank's segment as every rank has them in `full` [n]: rows [W, .].

        Of two ranks, each needs the other's row only: [1, .]. So nothing is copied within a rank. A segment that is
        shorter than `part` counts as far as it goes. The rows are in `room` [`rows_numel(...)`].

        Raises:
            CommError: a peer failed or is late.
        """
        if self.world_size == 2:
            return self._swap(full, cut, part, room)
        sent, own = full, cut.longest
        splits: tuple[list[int], ...] = ()  # equal ones
        if not cut.even or part != (0, cut.longest):
            ranges = cut.ranges(part)
            sizes = [stop - start for start, stop in ranges]
            own = sizes[self.rank]
            splits = [own * full.itemsize] * self.world_size, [size * full.itemsize for size in sizes]
            if sum(sizes) < full.numel():
                there = room[self.world_size * own :][: sum(sizes)]
                sent = torch.cat([full[start:stop] for start, stop in ranges], out=there)
        rows = room[: self.world_size * own]
        self._all_to_all(rows, sent, *splits)
        return rows.view(self.world_size, own)

    def _swap(self, full: Tensor, cut: Cut, part: tuple[int, int], room: Tensor) -> Tensor:
        """Return the other rank's row of this rank's segment, [1, .], and send it this rank's row of its segment."""
        ranges = cut.ranges(part)
        own, others = slice(*ranges[self.rank]), slice(*ranges[1 - self.rank])
        row, sent = room[: own.stop - own.start], full[others]
        splits = [[0, each.nbytes] if self.rank == 0 else [each.nbytes, 0] for each in (row, sent)]
        self._all_to_all(row, sent, *splits)
        return row.view(1, -1)

    def _all_to_all(self, rows: Tensor, sent: Tensor, *splits: list[int]) -> None:
        """Receive `rows` [.] and send `sent` [.], in parts of equal length or `splits` in bytes: received, and sent."""

        def call(rows: Tensor, sent: Tensor) -> Any:
            return self._group.alltoall_base(rows, sent, *(splits or ([], [])), _EXCHANGE)

        self._run("all-to-all", call, as_bytes(rows), as_bytes(sent))

    def sums(self, cut: Cut) -> bool:
        """Return whether the process group adds up such a buffer: it takes segments of one length."""
        return self.fast and cut.even

    def reduce_scatter(self, full: Tensor, room: Tensor) -> Tensor:
        """Return the sum of this rank's segment of `full` [n] over the ranks, a row [1, n/W] in `room`.

        Raises:
            CommError: a peer failed or is late.
        """
        own = room[: full.numel() // self.world_size]

        def call(own: Tensor, full: Tensor) -> Any:
            return self._group._reduce_scatter_base(own, full, _SUM_SCATTERED)

        self._run("reduce-scatter", call, own, full)
        return own.view(1, -1)

    def all_reduce(self, numbers: Tensor) -> None:
        """Sum integers [n] over the ranks in place: exact in any order.

        Raises:
            CommError: a peer failed or is late.
        """
        self._run("all-reduce", lambda numbers: self._group.allreduce([numbers], _SUM), numbers)

    def largest(self, numbers: Tensor) -> None:
        """Replace integers [n] by the largest of all ranks, in place.

        Raises:
            CommError: a peer failed or is late.
        """
        self._run("all-reduce", lambda numbers: self._group.allreduce([numbers], _LARGEST), numbers)

    def broadcast(self, full: Tensor, source: int) -> None:
        """Copy `full` [n] of rank `source` into that of every other rank.

        Raises:
            CommError: a peer failed or is late.
        """
        options = _synchronous(c10d.BroadcastOptions())
        options.rootRank = source
        self._run("broadcast", lambda full: self._group.broadcast([full], options), as_bytes(full))

    def _run(self, what: str, call: Callable[..., dist.Work | None], *tensors: Tensor) -> None:
        """Run a collective on tensors [.]."""
        self._begin(what, call, *tensors).wait()

    def _begin(self, what: str, call: Callable[..., dist.Work | None], *tensors: Tensor) -> Pending:
        """Start a collective on tensors [.]."""
        posted = Posted(self.rank, timeout=self._timeout, collective=what, tensors=tensors)
        try:
            work = call(*tensors)
        except RuntimeError as error:
            raise posted.refused(error) from error
        return _DONE if work is None else InFlight((work,), posted, self._hang_up)


_DONE = Completed()


def _landed(exchanges: Iterator[tuple[int, Tensor, Pending]]) -> Iterator[tuple[int, Tensor]]:
    """Wait for each exchange when the next one has started; yield the start of its slice, and the rows."""
    start, rows, arriving = next(exchanges)
    for following in exchanges:
        arriving.wait()
        yield start, rows
        start, rows, arriving = following
    arriving.wait()
    yield start, rows


def _word(full: Tensor, room: Tensor, segment: int) -> torch.dtype:
    """Return the dtype as which slices of segments are moved: PyTorch copies strided rows element by element."""
    places = segment, full.storage_offset(), room.storage_offset()
    return torch.uint8 if any(place * full.itemsize % 8 for place in places) else torch.int64


def _shortened(slot: Tensor, length: int) -> Tensor:
    """Return the begin of a slot [W, S] as rows [W, length]."""
    return slot.view(-1)[: len(slot) * length].view(-1, length)


def _on_same_memory(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor on the memory of another, without a share in its storage."""
    if tensor.numel() == 0:
        return tensor
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


class GlooCollectives(GroupCollectives, GlooTransport):
    """Collectives of CPU tensors over `group`, each completed within `timeout`. A queue blocks its thread in them.

    A gather goes by messages, each rank's segment to all others: gloo's own all-gather takes up to three times as long
    as messages (`bench/results/ring-cpu.jsonl`).

    Gloo's threads keep the tensors of a collective for a while after its end, so that memory would seem to be in use
    still. They are given other tensors on the same memory.
    """

    def __init__(self, group: dist.ProcessGroup | Backend | None, timeout: timedelta) -> None:
        super().__init__(group, timeout)
        self._lost: list[Sequence[Tensor]] = []
        """Memory of collectives that failed: gloo may still write to it."""

    def all_gather(self, full: Tensor, cut: Cut) -> None:
        """Fill `full` [n] in place, given this rank's segment.

        Raises:
            CommError: a peer failed or is late.
        """
        segments = [as_bytes(full[start:stop]) for start, stop in cut.bounds]
        others = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        messages = [Message(segments[peer], peer, outgoing=False) for peer in reversed(others)]
        messages += [Message(segments[self.rank], peer, outgoing=True) for peer in others]
        self.exchange(messages, tag=0).wait()

    def _begin(self, what: str, call: Callable[..., dist.Work | None], *tensors: Tensor) -> Pending:
        """Run a collective on tensors [.], to its end."""
        try:
            super()._begin(what, call, *map(_on_same_memory, tensors)).wait()
        except CommError:
            self._lost.append(tensors)
            raise
        return _DONE


class NcclCollectives(GroupCollectives, NcclTransport):
    """Collectives of CUDA tensors over `group`, on the current stream, so that a priority of that stream holds.

    Slices of a reduction are exchanged on NCCL's own stream, whose priority is the route's.
    """

    def _begin(self, what: str, call: Callable[..., dist.Work | None], *tensors: Tensor) -> Pending:
        self._take_turn()
        return super()._begin(what, call, *tensors)
