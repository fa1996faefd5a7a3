"""Whole collectives instead of messages: one call per gather or reduction.

    gather     `all_gather_into_tensor`, in place; over gloo by messages
    reduction  `all_to_all_single`: rank `k` receives segment `k` of every rank as a row; one kernel then adds the rows
               in the order of the ring (`shardlite_kernels.add_rows`). With two ranks, each rank receives one row and
               adds its own summand from the gradient bucket (`shardlite_kernels.hop`)

The results have the same bits as with the algorithm `ring`, and the number of calls does not depend on the number of
ranks. Both NCCL and gloo are supported. Over NCCL a message costs the host more time than a whole collective.

**In the bucket.** The rows of a long reduction would need as much memory as the bucket. Instead, received rows
overwrite segments that were already sent, and only the first `D` elements are staged. In step `t` a rank sends segment
`r+t`, and receives the row of rank `r-t`. With more than nine ranks a call makes several steps, and with fewer than six
a step takes several calls, so there are at most 8 calls, one after the other on the current stream:

    W=8, D=S     call t   send segment r+t        receive row of r-t into segment r+t-1, at first into staging
    W=3, D=S/3   call 1   send first third of r+1   receive first third of r-1's row into staging
                 call 2   send second third         receive second third into the place of the first

    rank 0 then has      segment 0   1         2         staging
    W=8, D=S             0           6         5  ..     7
    W=3, D=S/3           0 0 0       2 2 1     1 1 -     2

So the received rows follow each other in memory, from `D` elements before segment `r+1` on. One kernel adds all rows in
the order of the ring. Nothing is packed. Long reductions of unequal segments, or in the order of a tree, run in slices
that are packed.

These calls have no tags, so all ranks must make them in the same order. Therefore each queue of operations has a
separate connection (`nccl.communicator`, `gloo.reconnect`). The connection is a backend. So this file calls methods of
backends and not the functions of `torch.distributed`, which require process groups.

Legend: `W` ranks, `r` this rank, `n` elements in the full buffer, `S` elements of the longest segment. A slice is one
range of elements of every segment.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from shardlite_kernels import add_rows
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Backend

from shardlite.comm.chunking import Cut, cut_up
from shardlite.comm.operation import UNNAMED, Operation, Running
from shardlite.comm.schedule import IN_RING_ORDER
from shardlite.comm.transport.base import LastHop, Rows, Transport
from shardlite.comm.transport.gloo import GlooTransport, GroupTransport, InFlight, Posted
from shardlite.comm.transport.messages import Message
from shardlite.comm.transport.nccl import NcclTransport
from shardlite.comm.transport.staging import SLICE_NBYTES, slices_of, staged_in_bucket
from shardlite.errors import CommError
from shardlite.telemetry import Ledger


class WholeCollectives(Transport):
    """A transport of whole collectives. They have no tags, so all ranks must call them in the same order.

    Reductions exchange the summands of a rank's segment (a row per rank), and then add the rows.
    """

    has_tags = False

    slice_nbytes: int
    """Maximum bytes of the rows of an exchange. A longer reduction is made in slices."""

    @property
    def first_row(self) -> int | None:
        """Index of the row of `exchange_rows` that is added first, or `None` to add the rows as a balanced tree."""
        return None if self.algorithm == "halving" else (self.rank + 1) % self.world_size

    @property
    def words(self) -> str:
        """How this transport adds, for the log."""
        return f"sums in the order of {'a tree' if self.algorithm == 'halving' else 'the ring'}"

    def broadcast(self, full: Tensor, source: int, operation: Operation, chunk_bytes: int) -> None:
        """Copy `full` [n] of rank `source` to `full` of every other rank."""
        del chunk_bytes
        operation.count_collective(full.nbytes)
        self.copy_from(source, full)

    def copy_from(self, source: int, full: Tensor) -> None:
        """Copy `full` [n] of rank `source` to `full` of every other rank, uncounted."""
        raise NotImplementedError

    def adds_at_once(self, full: Tensor) -> bool:
        """Return whether one collective gives the bits of a ring: for integers, or for one float in ring order."""
        return not full.dtype.is_floating_point or (full.numel() == 1 and self.algorithm in IN_RING_ORDER)

    def all_reduce(self, full: Tensor, cut: Cut, divisor: int, operation: Operation) -> None:
        """Sum `full` [n] over the ranks in place, and divide the sum."""
        operation.count_collective((self.world_size - 1) * full.nbytes)
        if full.dtype.is_floating_point:
            rows = full.repeat(self.world_size)
            self.all_gather(rows, cut_up(rows.numel(), rows.dtype, self), UNNAMED)
            add_rows(full, rows.view(-1, 1), 1, divisor)
        else:
            self.add_integers(full)

    def add_integers(self, numbers: Tensor) -> None:
        """Sum integers [n] over the ranks in place, uncounted. Integer sums are exact in any order."""
        raise NotImplementedError

    def staged_rows(self, cut: Cut, itemsize: int) -> int:
        """Return how many rows of a slice are staged: a row per rank, and those that are packed to be sent."""
        del cut, itemsize
        return self.world_size

    def slices(self, cut: Cut, itemsize: int) -> Sequence[tuple[int, int]]:
        """Return the range of elements of each slice of a segment. Every slice starts at a multiple of the grain."""
        return slices_of(cut.longest, self.staged_rows(cut, itemsize), itemsize, cut.grain, self.slice_nbytes)

    def staging_numel(self, cut: Cut, itemsize: int) -> int:
        """Return the number of elements of the staging buffer: the staged rows of the longest slice."""
        slices = self.slices(cut, itemsize)
        return self.staged_rows(cut, itemsize) * max((stop - start for start, stop in slices), default=0)

    def stages_in_out(self) -> bool:
        """Return `False`, because a result has no place for rows."""
        return False

    def reduce_scatter(self, full: Tensor, cut: Cut, last: LastHop, staging: Tensor, operation: Operation) -> None:
        """Sum this rank's segment of `full` [n] over the ranks. `last` makes all additions."""
        start, stop = cut.bounds[self.rank]
        operation.count_collective(full.nbytes - (stop - start) * full.itemsize, self.nbytes_across(cut, full.itemsize))
        for summands in self.summands(full, cut, staging):
            last(*summands)

    def summands(self, full: Tensor, cut: Cut, staging: Tensor) -> Iterator[tuple[int, Tensor | Rows, Tensor | None]]:
        """Yield the arguments of the last hop for each slice of this rank's segment of `full` [n].

        The rows are in `staging`, or also in `full`, which is overwritten. The caller may use the rows in operations
        that it enqueues on the current stream before it requests the next slice.
        """
        for part in self.slices(cut, full.itemsize):
            rows = self.exchange_rows(full, cut, part, staging)
            if len(rows) == 1:  # two ranks: this rank's own summand is added to the other rank's row
                start = cut.bounds[self.rank][0] + part[0]
                yield part[0], rows[0], full[start : start + rows.shape[1]]
            elif rows.numel():  # a short segment may end before the slice begins
                yield part[0], Rows(rows, self.first_row), None

    def exchange_rows(self, full: Tensor, cut: Cut, part: tuple[int, int], staging: Tensor) -> Tensor:
        """Return every rank's row for the range `part` of this rank's segment of `full` [n], as [W, .] in `staging`.

        With two ranks, the method may return only the other rank's row, [1, .]. `part` is clipped to shorter segments.

        Raises:
            CommError: a peer failed or is late.
        """
        raise NotImplementedError

    def nbytes_across(self, cut: Cut, itemsize: int) -> int:
        """Return the bytes that this rank sends to other nodes in a reduction, or 0 if nodes are unknown."""
        return 0


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, because not every backend supports every dtype."""
    return tensor.view(torch.uint8)


def _synchronous(options: Any) -> Any:
    """Set options so that NCCL runs on the current stream instead of its own stream."""
    options.asyncOp = False
    return options


_GATHER = _synchronous(c10d.AllgatherOptions())
_EXCHANGE = _synchronous(c10d.AllToAllOptions())
_SUM_SCATTERED = _synchronous(c10d.ReduceScatterOptions())
_SUM = _synchronous(c10d.AllreduceOptions())
_LARGEST = _synchronous(c10d.AllreduceOptions())
_LARGEST.reduceOp = dist.ReduceOp.MAX


class GroupCollectives(WholeCollectives, GroupTransport):
    """A transport whose gathers and reductions are collectives of its process group. Base class for gloo and NCCL."""

    fast = False
    """Whether the process group itself adds the summands of a reduction. The process group then chooses the order."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.slice_nbytes = SLICE_NBYTES
        self.holder = self._books = Ledger()

    @property
    def words(self) -> str:
        """How this transport adds, for the log."""
        return "fast sums" if self.fast else super().words

    def all_gather(self, full: Tensor, cut: Cut, operation: Operation) -> None:
        """Fill `full` [n] in place, given this rank's segment."""
        start, stop = cut.bounds[self.rank]
        operation.count_collective((self.world_size - 1) * (stop - start) * full.itemsize)
        rows, length = full, cut.longest
        if not cut.even:
            rows = full.new_empty(self.world_size * length)
            self._books.track("staging", rows)
            rows[self.rank * length :][: stop - start] = full[start:stop]

        memory, nbytes = as_bytes(rows), length * full.itemsize
        own = memory[self.rank * nbytes :][:nbytes]
        self._run("all-gather", self._group._allgather_base, (memory, own), _GATHER)
        if not cut.even:
            for rank, (low, high) in enumerate(cut.bounds):
                full[low:high] = rows[rank * length :][: high - low]

    def staged_rows(self, cut: Cut, itemsize: int) -> int:
        """Return how many rows of a slice are staged. With two ranks, only the row of the other rank is received."""
        if self.world_size == 2:
            return 1
        one_slice = self.world_size * cut.longest * itemsize <= self.slice_nbytes  # nothing is packed
        return self.world_size if one_slice else 2 * self.world_size

    def staging_numel(self, cut: Cut, itemsize: int) -> int:
        """Return the number of elements of the staging buffer, which holds all received rows or the first of them."""
        if self.fast and cut.even:
            return cut.longest
        return self._staged_in_bucket(cut, itemsize) or super().staging_numel(cut, itemsize)

    def _staged_in_bucket(self, cut: Cut, itemsize: int) -> int:
        """Return the number of elements that are staged in an exchange inside the bucket, or 0 if there is none."""
        if not cut.even or self.first_row is None:
            return 0
        return staged_in_bucket(cut.longest, self.world_size, itemsize, self.slice_nbytes)

    def summands(self, full: Tensor, cut: Cut, staging: Tensor) -> Iterator[tuple[int, Tensor | Rows, Tensor | None]]:
        """Yield the arguments of the last hop for each slice of this rank's segment of `full` [n].

        If the process group can add such a buffer itself, its sum is the only row. The rows of a long reduction are in
        `full` and `staging`, and those of other reductions in `staging`.
        """
        if self.fast and cut.even:
            yield 0, Rows(self.sum_scattered(full, staging)), None
        elif count := self._staged_in_bucket(cut, full.itemsize):
            staged = staging[:count]
            self._exchange_in_bucket(full, staged)
            yield 0, Rows(full.view(self.world_size, -1), self.first_row, staged), None
        else:
            yield from super().summands(full, cut, staging)

    def _exchange_in_bucket(self, full: Tensor, staged: Tensor) -> None:
        """Send each rank its segment of `full` [n], and receive every rank's row where `add_rows` expects it.

        A call sends and receives at most as many elements as `staged` [D] has.
        """
        full, staged = as_bytes(full), as_bytes(staged)
        ranks, most, total = self.world_size, staged.numel(), full.numel()
        length = total // ranks
        pieces = [(step, low) for step in range(1, ranks) for low in range(0, length, most)]
        together = max(most // length, 1)
        for at in range(0, len(pieces), together):
            sent, received = {}, {}
            for step, low in pieces[at : at + together]:
                numel = min(most, length - low)
                target, source, begun = (self.rank + step) % ranks, (self.rank - step) % ranks, (step - 1) * length
                sent[target] = full.narrow(0, target * length + low, numel)
                # Received bytes follow each other, from `most` bytes before the segment of the next rank on.
                place = ((self.rank + 1) * length + begun + low - most) % total
                memory, place = (staged, begun + low) if begun + low < most else (full, place)
                received[source] = memory.narrow(0, place, numel)
            self._trade(sent, received)

    def _trade(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Send bytes [.] to each of some ranks, and receive bytes [.] from as many, in one call."""
        if len(sent) > 1:
            nothing = next(iter(sent.values()))[:0]
            lists = [[each.get(rank, nothing) for rank in range(self.world_size)] for each in (received, sent)]
            tensors = *received.values(), *sent.values()
            self._run("all-to-all", lambda *_: self._group.alltoall(*lists, _EXCHANGE), tensors)
            return
        ((target, row),), ((source, place),) = sent.items(), received.items()
        splits = [0] * self.world_size, [0] * self.world_size
        splits[0][source], splits[1][target] = place.numel(), row.numel()
        self._run("all-to-all", self._group.alltoall_base, (place, row), *splits, _EXCHANGE)

    def exchange_rows(self, full: Tensor, cut: Cut, part: tuple[int, int], staging: Tensor) -> Tensor:
        """Return every rank's row for the range `part` of this rank's segment of `full` [n], as [W, .] in `staging`.

        With two ranks, the method returns only the other rank's row, [1, .], so nothing is copied within a rank. `part`
        is clipped to shorter segments.
        """
        if self.world_size == 2:
            ranges = cut.ranges(part)
            own, others = slice(*ranges[self.rank]), slice(*ranges[1 - self.rank])
            row = staging[: own.stop - own.start]
            self._trade({1 - self.rank: as_bytes(full[others])}, {1 - self.rank: as_bytes(row)})
            return row.view(1, -1)
        sent, sizes = full, cut.sizes(part)
        if sum(sizes) < full.numel():
            there = staging[self.world_size * sizes[self.rank] :][: sum(sizes)]
            sent = torch.cat([full[start:stop] for start, stop in cut.ranges(part)], out=there)
        return self.all_to_all(staging, sent, sizes)

    def all_to_all(self, staging: Tensor, sent: Tensor, sizes: Sequence[int]) -> Tensor:
        """Send `sent` to the ranks, `sizes[k]` elements to rank `k`. Return the received rows, [W, .] in `staging`."""
        own = sizes[self.rank]
        rows = staging[: self.world_size * own]
        splits: tuple[list[int], list[int]] = [], []  # equal parts
        if len(set(sizes)) > 1:
            splits = [own * sent.itemsize] * self.world_size, [size * sent.itemsize for size in sizes]
        self._run("all-to-all", self._group.alltoall_base, (as_bytes(rows), as_bytes(sent)), *splits, _EXCHANGE)
        return rows.view(self.world_size, own)

    def sum_scattered(self, full: Tensor, staging: Tensor) -> Tensor:
        """Return the sum of this rank's segment of `full` [n] over the ranks, a row [1, n/W] in `staging`."""
        own = staging[: full.numel() // self.world_size]
        self._run("reduce-scatter", self._group._reduce_scatter_base, (own, full), _SUM_SCATTERED)
        return own.view(1, -1)

    def add_integers(self, numbers: Tensor) -> None:
        """Sum integers [n] over the ranks in place, uncounted. Integer sums are exact in any order."""
        self._run("all-reduce", lambda numbers: self._group.allreduce([numbers], _SUM), (numbers,))

    def are_equal(self, numbers: Sequence[int], operation: Operation = UNNAMED) -> bool:
        """Return whether all ranks pass the same `numbers`. The check takes one collective of `O(log2(W))` steps.

        Raises:
            CommError: a peer failed, timed out or runs a different operation.
        """
        both = torch.tensor([*numbers, *(-each for each in numbers)])
        with Running(operation, both):
            operation.count_collective(both.nbytes)
            self._run("all-reduce", lambda both: self._group.allreduce([both], _LARGEST), (both,))
        return torch.equal(both[: len(numbers)], -both[len(numbers) :])

    def copy_from(self, source: int, full: Tensor) -> None:
        """Copy `full` [n] of rank `source` to `full` of every other rank, uncounted."""
        options = _synchronous(c10d.BroadcastOptions())
        options.rootRank = source
        self._run("broadcast", lambda full: self._group.broadcast([full], options), (as_bytes(full),))

    def _run(self, what: str, call: Callable[..., dist.Work | None], tensors: Sequence[Tensor], *options: Any) -> None:
        """Run a collective on tensors [.]: call `call(*tensors, *options)`."""
        posted = Posted(self.rank, timeout=self._timeout, collective=what, tensors=tensors)
        try:
            work = call(*tensors, *options)
        except RuntimeError as error:
            raise posted.refused(error) from error
        if work is not None:
            InFlight((work,), posted, self._hang_up).wait()


def _on_same_memory(tensor: Tensor) -> Tensor:
    """Return a tensor with the memory of a contiguous CPU tensor, but with its own storage object."""
    if tensor.numel() == 0:
        return tensor
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


class GlooCollectives(GroupCollectives, GlooTransport):
    """Collectives of CPU tensors over `group`, each completed within `timeout`. They block the calling thread.

    A gather sends each rank's segment to all other ranks by messages, since gloo's own all-gather takes up to three
    times as long (`bench/results/ring-cpu.jsonl`).

    Gloo's threads keep references to the tensors of a collective for a while after the collective has ended, so the
    memory would seem to be in use. Therefore gloo gets separate tensor objects on the same memory.
    """

    def __init__(self, group: dist.ProcessGroup | Backend | None, timeout: timedelta) -> None:
        super().__init__(group, timeout)
        self._lost: list[Sequence[Tensor]] = []
        """Tensors of failed collectives, kept so that their memory is not freed while gloo may still write to it."""

    def all_gather(self, full: Tensor, cut: Cut, operation: Operation) -> None:
        """Fill `full` [n] in place, given this rank's segment."""
        start, stop = cut.bounds[self.rank]
        operation.count_collective((self.world_size - 1) * (stop - start) * full.itemsize)
        segments = [as_bytes(full[start:stop]) for start, stop in cut.bounds]
        others = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        messages = [Message(segments[peer], peer, outgoing=False) for peer in reversed(others)]
        messages += [Message(segments[self.rank], peer, outgoing=True) for peer in others]
        self.exchange(messages, tag=0).wait()

    def _trade(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Send bytes [.] to each of some ranks, and receive bytes [.] from as many.

        With more than two ranks, they are messages: gloo's all-to-all would also send empty messages to all other
        ranks, and gloo has no all-to-all of lists.
        """
        if self.world_size == 2:
            super()._trade(sent, received)
            return
        messages = [Message(each, peer, outgoing=False) for peer, each in received.items()]
        messages += [Message(each, peer, outgoing=True) for peer, each in sent.items()]
        self.exchange(messages, tag=0).wait()

    def _run(self, what: str, call: Callable[..., dist.Work | None], tensors: Sequence[Tensor], *options: Any) -> None:
        """Run a collective on tensors [.], and wait until it ends."""
        try:
            super()._run(what, call, [*map(_on_same_memory, tensors)], *options)
        except CommError:
            self._lost.append(tensors)
            raise


class NcclCollectives(GroupCollectives, NcclTransport):
    """Collectives of CUDA tensors over `group`, on the current stream, so that the priority of that stream applies."""

    def _run(self, what: str, call: Callable[..., dist.Work | None], tensors: Sequence[Tensor], *options: Any) -> None:
        """Run a collective on tensors [.]. The host does not wait, since NCCL runs it on the current stream."""
        self._take_turn()
        try:
            if (work := call(*tensors, *options)) is not None:
                work.wait()
        except RuntimeError as error:
            posted = Posted(self.rank, timeout=self._timeout, collective=what, tensors=tensors)
            raise posted.refused(error) from error
