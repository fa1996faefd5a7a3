"""The interface of a transport, and its collectives by messages. This file does not depend on process groups.

A transport answers the collectives that `collectives.py` draws and checks. A `Transport` that only sends messages
inherits them: `schedule.py` writes the algorithm as pieces that travel from rank to rank, and a message contains one
chunk of a piece. A chunk is forwarded as soon as it arrives, so all links are busy after the first chunk.

    base.py                messages are received in place or, to be added, in slots of a staging buffer
    batches.py             a step of the schedule is one exchange of all its chunks (NCCL)
    loans.py               messages to add are read in the memory of their sender (shared memory)
    group_collectives.py   one call of a process group instead of messages; also `two_level.py` and `symmetric.py`

Legend: `W` ranks, `n` elements in the full buffer.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from shardlite_kernels import State, Table, add_rows, hop, stats_block
from torch import Tensor

from shardlite.comm import schedule
from shardlite.comm.chunking import Chunk, Cut, Pieces, chunk_numel, split
from shardlite.comm.operation import Operation
from shardlite.comm.transfers import Arrival, Program, Schedule
from shardlite.comm.transport.messages import Message, Pending, PendingGroup
from shardlite.config import Algorithm
from shardlite.telemetry import Held

_SLOTS = 2  # staging slots of a reduction: the message in one slot is added while the other slot receives

FusedStep = tuple[State, Table, Tensor]
"""Arguments of the kernel that computes the mean of gradients and updates weights with this mean.

The arguments are the weights and moments [S], the table of scalars for these tensors, and a flag [] for NaNs.
"""

Parcels = Sequence[tuple[Tensor, int]]
"""Tensors, each with the rank that it is sent to or received from."""


class Rows(NamedTuple):
    """The summands of all ranks in a range of a segment."""

    rows: Tensor
    """A row of each rank, [W, n], or the bucket [W, S] in which ranks have exchanged their summands."""

    first: int | None = 0
    """The row that is added first, or `None` to add the rows as a balanced tree."""

    staged: Tensor | None = None
    """The first received elements of an exchange inside the bucket, [D]. `shardlite_kernels.add_rows` finds the rest.
    """

    start: int = 0
    """First element of the range, after an exchange inside the bucket."""

    def part(self, here: slice) -> "Rows":
        """Return the summands in the part `here` of the range."""
        if self.staged is None:
            return self._replace(rows=self.rows[:, here])
        return self._replace(start=self.start + here.start)


class LastHop(Protocol):
    """The last addition (the last hop) of a reduction, which consumes the sum."""

    def __call__(self, start: int, received: Tensor | Rows, own: Tensor | None) -> None:
        """Finish elements `[start, start + n)` of the segment. Their sum is `received + own`, which are both [n].

        If `own` is `None`, the sum is that of the rows in `received`. The ranges of all calls cover the segment once,
        and each range starts at a multiple of the grain. All tensors are reused after the call.
        """


class StoreMean(NamedTuple):
    """The last addition (the last hop) of a reduction. This last hop divides the sum and stores the mean."""

    out: Tensor | None = None
    """Memory for the result, [numel of the shard]. `None` stores the result in the shard's place in `full`."""

    divisor: int = 1
    stats: Tensor | None = None
    """Memory for the statistics of the shard, [P, 2]: a row per block (`shardlite_kernels.stats`)."""

    def __call__(self, start: int, received: Tensor | Rows, own: Tensor | None) -> None:
        """Add `received` to `own`, or add all rows of `received` if `own` is `None`, and store the mean."""
        part, stats = self.out, self.stats
        assert part is not None, "reduce_scatter sets it"
        summand = received.rows if isinstance(received, Rows) else received
        stop = start + summand.shape[-1]
        if stop - start < part.numel():
            block = stats_block(part)
            part, stats = part[start:stop], None if stats is None else stats[start // block : -(-stop // block)]
        if isinstance(received, Rows):
            add_rows(part, received.rows, received.first, self.divisor, stats, *received[2:])
        else:
            assert own is not None, "only rows have all summands"
            hop(part, received, own, self.divisor, stats)


class Holder(Protocol):
    """An object that reports how much memory it holds for each purpose."""

    def held(self) -> dict[str, Held]:
        """Return the bytes held for each purpose."""


class Transport:
    """Base class of all transports, with collectives made of messages between ranks.

    Messages from one rank to another with the same tag arrive in the order in which they were sent. Messages with
    different tags are independent. Tensors are contiguous and 1-D, of any dtype. Sender and receiver must use the same
    numel and dtype. Several threads may use one transport concurrently if their tags differ. If a transport guarantees
    less, its docstring says so.

    There are at least two ranks, and `collectives.py` has checked the arguments of the collectives. A collective raises
    a `CommError` if a peer failed, timed out or runs a different operation.
    """

    rank: int
    """This rank, from 0."""

    world_size: int
    """Number of ranks."""

    batched = False
    """Whether all messages of a step are in one exchange, uncut. The first collective then connects the ranks."""

    has_tags = True
    """Whether operations of one transport may run concurrently, and in a different order on each rank."""

    blocking = True
    """Whether waits block the host. If they do, a caller with other work needs a separate thread for the waits."""

    replays = True
    """Whether a CUDA graph can repeat the messages of a transport that does not block."""

    algorithm: Algorithm = "ring"
    """The algorithm of collectives. The value of the class is for `algorithm="auto"`. `connect` sets other values."""

    node = 1
    """Number of ranks per node for the hierarchical algorithm, or 1 for all other algorithms."""

    holder: Holder | None = None
    """Object that reports the memory that the transport holds for messages. Several transports may share a holder."""

    @property
    def words(self) -> str:
        """How this transport adds, for the log."""
        return f"algorithm {self.algorithm}"

    # ---- memory -----------------------------------------------------------------------------------------------------

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialized memory [nbytes] from which tensors can be sent without a copy, where possible."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def empty_persistent(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialized memory [nbytes] for a long-lived GPU buffer that is sent or received many times."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def trim(self, *, keep: int | None = None) -> None:
        """Release memory unused since the previous call. With `keep`, release all unused memory except `keep` bytes.

        Has no effect if the memory belongs to PyTorch's allocators.
        """

    # ---- messages ---------------------------------------------------------------------------------------------------

    def is_gone(self, peer: int) -> bool:
        """Return whether the process of rank `peer` is known to have ended."""
        return False

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer`."""
        raise NotImplementedError

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` into `tensor`."""
        raise NotImplementedError

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Start all `messages` together. Messages with the same peer and direction keep their order.

        Receives start first, so that messages that arrive early have a destination.
        """
        arriving = [self.irecv(each.tensor, each.peer, tag) for each in messages if not each.outgoing]
        departing = [self.isend(each.tensor, each.peer, tag) for each in messages if each.outgoing]
        return PendingGroup([*arriving, *departing])

    def swap(self, parcels: Sequence[tuple[Parcels, Parcels]], tag: int, operation: Operation) -> None:
        """Send and receive the tensors of each pair in `parcels`, and wait for all of them."""
        messages = [Message(each, peer, outgoing=False) for _, arriving in parcels for each, peer in arriving]
        for departing, _ in parcels:
            for each, peer in departing:
                operation.count_sent(each)
                messages.append(Message(each, peer, outgoing=True))
        self.exchange(messages, tag).wait()

    # ---- collectives ------------------------------------------------------------------------------------------------

    def all_gather(self, full: Tensor, cut: Cut, operation: Operation) -> None:
        """Fill `full` [n] in place, given this rank's segment."""
        plan = schedule.all_gather(self.algorithm, self.world_size, node=self.node)
        self._spread(plan, cut.of(full, plan.parts), operation.tag(full, cut.offsets, self.algorithm), operation)

    def broadcast(self, full: Tensor, source: int, operation: Operation, chunk_bytes: int) -> None:
        """Copy `full` [n] of rank `source` to `full` of every other rank, in messages of at most `chunk_bytes`."""
        chunks = split(full, chunk_numel(full.dtype, chunk_bytes))
        chain = schedule.broadcast(self.world_size, source, parts=len(chunks))
        self._spread(chain, lambda _, part: [Chunk(0, chunks[part])], operation.tag(full), operation)

    def staging_numel(self, cut: Cut, itemsize: int) -> int:
        """Return the number of elements of the buffer `staging` that `reduce_scatter` requires."""
        del itemsize
        return _SLOTS * min(cut.chunk, cut.longest)

    def stages_in_out(self) -> bool:
        """Return whether the memory of the result can be `staging`, if all segments are equal."""
        return self.algorithm == "ring"

    def reduce_scatter(self, full: Tensor, cut: Cut, last: LastHop, staging: Tensor, operation: Operation) -> None:
        """Sum this rank's segment of `full` [n] over the ranks. `last` makes the final additions.

        Received pieces are added to this rank's pieces in place, and the sums are forwarded.
        """
        plan = schedule.reduce_scatter(self.algorithm, self.world_size, node=self.node)
        pieces, tag = cut.of(full, plan.parts), operation.tag(full, cut.offsets, self.algorithm)
        program = plan.program(self.rank)
        expected = [
            (chunk, source)
            for arrival in program.arrivals
            for _, chunk in pieces(arrival.segment, arrival.part)
            for source in arrival.sources
        ]
        inbox = self._inbox(expected, staging, cut, tag)
        outgoing = [self.isend(chunk, peer, tag) for chunk, peer in _departing(program, pieces, operation)]
        for arrival, finish in finishers(program, self.rank, last):
            for start, own in pieces(arrival.segment, arrival.part):
                for place, received, mine in inbox.sums(len(arrival.sources), start, own):
                    finish(place, received, mine)
                for peer in arrival.targets:
                    operation.count_sent(own)
                    outgoing.append(self.isend(own, peer, tag))
        PendingGroup(outgoing).wait()

    def rings(self, full: Tensor, cut: Cut) -> bool:
        """Return whether one kernel reduces `full` [n] along the ring, without staging. Equal on all ranks."""
        del full, cut
        return False

    def ring_step(self, step: FusedStep, full: Tensor, divisor: int) -> None:
        """Update weights by AdamW with the mean of this rank's segment of `full` [n]. `rings()` must return true."""
        raise NotImplementedError

    def adds_at_once(self, full: Tensor) -> bool:
        """Return whether `all_reduce` adds `full` [n] in one round, with the bits of a reduction and a gather."""
        del full
        return False

    def all_reduce(self, full: Tensor, cut: Cut, divisor: int, operation: Operation) -> None:
        """Sum `full` [n] over the ranks in place, and divide the sum. `adds_at_once()` must return true."""
        raise NotImplementedError

    def _spread(self, plan: Schedule, pieces: Pieces, tag: int, operation: Operation) -> None:
        """Move every piece as the schedule specifies. Messages are received in place."""
        program = plan.program(self.rank)
        incoming = [
            [(chunk, self.irecv(chunk, arrival.sources[0], tag)) for _, chunk in pieces(arrival.segment, arrival.part)]
            for arrival in program.arrivals
        ]
        outgoing = [self.isend(chunk, peer, tag) for chunk, peer in _departing(program, pieces, operation)]
        for arrival, messages in zip(program.arrivals, incoming, strict=True):
            for chunk, message in messages:
                message.wait()
                for peer in arrival.targets:
                    operation.count_sent(chunk)
                    outgoing.append(self.isend(chunk, peer, tag))
        PendingGroup(outgoing).wait()

    def _inbox(self, expected: Parcels, staging: Tensor, cut: Cut, tag: int) -> "Inbox":
        """Expect chunks like those in `expected`, in this order."""
        length = min(cut.chunk, cut.longest)
        if not (self.stages_in_out() and cut.even and len(staging) == cut.longest):
            staging = staging[: _SLOTS * length]
        return _Slots(self, expected, split(staging, length), tag)  # in the memory of the result, one slot per chunk


class Inbox(Protocol):
    """Received messages that are added."""

    def sums(self, sources: int, start: int, own: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Add the next message of each of `sources` ranks, and yield `(start, sum, own)` for one or more ranges.

        The memory of a sum is reused when the next one is requested.
        """


class _Slots:
    """Inbox of staged messages. While the message in one slot is added, the next messages arrive in other slots."""

    def __init__(self, transport: Transport, expected: Parcels, slots: Sequence[Tensor], tag: int) -> None:
        self._transport, self._tag = transport, tag
        self._expected = iter(expected)
        self._posted: deque[tuple[Pending, Tensor, Tensor]] = deque()
        for slot in slots:
            self._post(slot)

    def sums(self, sources: int, start: int, own: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Add one chunk from each of `sources` ranks, and yield `(start, sum, own)`. Then reuse the sum's memory."""
        total, free = self._take()
        for _ in range(sources - 1):
            more, slot = self._take()
            hop(more, total, more, 1)
            self._post(free)
            total, free = more, slot
        yield start, total, own
        self._post(free)

    def _take(self) -> tuple[Tensor, Tensor]:
        """Wait for the next message, and return the message and its slot."""
        pending, message, slot = self._posted.popleft()
        pending.wait()
        return message, slot

    def _post(self, slot: Tensor) -> None:
        """Receive the next message in a free slot."""
        if (expected := next(self._expected, None)) is not None:
            like, source = expected
            message = slot[: like.numel()]
            self._posted.append((self._transport.irecv(message, source, self._tag), message, slot))


def _departing(program: Program, pieces: Pieces, operation: Operation) -> Iterator[tuple[Tensor, int]]:
    """Yield the chunks that are sent before anything has arrived, each with its target rank, and count the chunks."""
    for departure in program.departures:
        for _, chunk in pieces(departure.segment, departure.part):
            for peer in departure.targets:
                operation.count_sent(chunk)
                yield chunk, peer


def finishers(program: Program, rank: int, last: LastHop) -> Iterator[tuple[Arrival, Callable[..., None]]]:
    """Yield each arrival with the function that adds the arriving messages to this rank's piece.

    The function is the callback `last` for the final arrival of each part of this rank's segment. All other arrivals
    are added in place, to be forwarded: a piece passes each rank once, so no buffer that is still being sent is
    overwritten.
    """
    final = {arrival.part: i for i, arrival in enumerate(program.arrivals) if arrival.segment == rank}
    for i, arrival in enumerate(program.arrivals):
        stays = arrival.segment == rank and final[arrival.part] == i
        yield arrival, last if stays else _in_place


def _in_place(_: int, received: Tensor, own: Tensor) -> None:
    hop(own, received, own, 1)
