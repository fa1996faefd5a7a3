"""Execution of a schedule over a transport. This file handles pieces, chunks and messages, and does not know models.

A schedule moves pieces, and each message contains one chunk of a piece. Over most transports a chunk is forwarded as
soon as it arrives, so all links are busy after the first chunk. Over a batched transport a step is one exchange of all
chunks of the step. If the transport lends, a receiver reads messages in the sender's memory. Otherwise messages are
staged in slots, which are sections of a staging buffer.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from shardlite_kernels import hop
from torch import Tensor

from shardlite.comm.traffic import Tally
from shardlite.comm.transfers import Arrival, Departure, Program, Schedule, Transfer
from shardlite.comm.transport.base import Message, Pending, PendingGroup, Transport

BLOCK = 1 << 17
"""Number of elements added at a time in a sum of several lent messages, so that the sum stays in the cache.
`BLOCK` is a multiple of the length of every block of statistics.
"""

_MOST_DISTANCES = 32
"""Maximum number of distances between ranks in one exchange. A rank sends and receives one message per distance, and
NCCL supports 64 messages in a group.
"""


class Chunk(NamedTuple):
    """One message of a segment."""

    start: int
    """First element of the chunk, relative to the segment."""

    tensor: Tensor


Pieces = Callable[[int, int], Sequence[Chunk]]
"""Function that returns the chunks of the piece `(segment, part)`. An empty part has no chunks."""


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


class Channel(NamedTuple):
    """A transport, with the tag and the traffic count of the operation that uses the transport."""

    transport: Transport
    tag: int
    tally: Tally | None = None
    """Count of the messages that this rank sends, or `None` to count nothing."""

    def count_sent(self, chunk: Tensor) -> None:
        """Count a sent chunk."""
        if self.tally is not None:
            self.tally.count(chunk)

    def exchange(self, departing: Sequence[tuple[Tensor, int]], arriving: Sequence[tuple[Tensor, int]]) -> None:
        """Send and receive chunks, each with its peer, and wait for all of them.

        Chunks for many peers take several exchanges. The distance between the sender and the receiver of a message
        determines the exchange, so both ranks assign the message to the same exchange.
        """
        rank, world_size = self.transport.rank, self.transport.world_size
        batches: list[list[Message]] = [[] for _ in range(0, world_size, _MOST_DISTANCES)]
        for chunk, peer in arriving:
            batches[(rank - peer) % world_size // _MOST_DISTANCES].append(Message(chunk, peer, outgoing=False))
        for chunk, peer in departing:
            self.count_sent(chunk)
            batches[(peer - rank) % world_size // _MOST_DISTANCES].append(Message(chunk, peer, outgoing=True))
        for messages in filter(None, batches):
            self.transport.exchange(messages, self.tag).wait()


def run_gather(channel: Channel, schedule: Schedule, pieces: Pieces) -> None:
    """Move every piece as the schedule specifies. Messages are received in place."""
    transport, tag, _ = channel
    if transport.batched:
        for sent, received in schedule.steps_of(transport.rank):
            arriving = [(chunk, each.source) for each in received for _, chunk in pieces(each.segment, each.part)]
            channel.exchange(_sent(sent, pieces), arriving)
        return
    program = schedule.program(transport.rank)
    incoming = [
        [(chunk, transport.irecv(chunk, arrival.sources[0], tag)) for _, chunk in pieces(arrival.segment, arrival.part)]
        for arrival in program.arrivals
    ]
    outgoing = [transport.isend(chunk, peer, tag) for chunk, peer in _departing(channel, program.departures, pieces)]
    for arrival, messages in zip(program.arrivals, incoming, strict=True):
        for chunk, message in messages:
            message.wait()
            for peer in arrival.targets:
                channel.count_sent(chunk)
                outgoing.append(transport.isend(chunk, peer, tag))
    PendingGroup(outgoing).wait()


def run_reduce(channel: Channel, schedule: Schedule, pieces: Pieces, last: LastHop, slots: Sequence[Tensor]) -> None:
    """Add received pieces to this rank's pieces in place, and forward the sums.

    The callback `last` makes the final additions. Messages are staged in `slots`, each as long as the longest chunk. A
    batched transport needs a slot for each chunk that arrives in a step. Other transports need two or more slots. If
    the transport lends, a slot holds the sum of several lent messages instead.
    """
    transport, tag, _ = channel
    if transport.batched:
        _reduce_by_steps(channel, schedule, pieces, last, slots)
        return
    program = schedule.program(transport.rank)
    expected = [
        (chunk, source)
        for arrival in program.arrivals
        for _, chunk in pieces(arrival.segment, arrival.part)
        for source in arrival.sources
    ]
    inbox = _Loans(channel, expected, slots) if transport.lends else _Slots(channel, expected, slots)
    outgoing = [transport.isend(chunk, peer, tag) for chunk, peer in _departing(channel, program.departures, pieces)]
    for arrival, finish in _finishers(program, transport.rank, last):
        for start, own in pieces(arrival.segment, arrival.part):
            for place, received, mine in inbox.sums(len(arrival.sources), start, own):
                finish(place, received, mine)
            for peer in arrival.targets:
                channel.count_sent(own)
                outgoing.append(transport.isend(own, peer, tag))
    PendingGroup(outgoing).wait()


def run_all_reduce(channel: Channel, full: Tensor, bounds: Sequence[tuple[int, int]], divisor: int) -> None:
    """Sum `full` [n] over two or more ranks and divide the sum, in place. Each rank reads all other ranks' buffers.

    `bounds` has `(start, stop)` of each segment. Each segment is added in the order of the ring.
    """
    transport, tag, _ = channel
    rank, world_size = transport.rank, transport.world_size
    others = [(rank + i) % world_size for i in range(1, world_size)]
    loans = {peer: transport.borrow(full.numel(), full.dtype, peer, tag) for peer in others}
    outgoing = []
    for peer in others:
        channel.count_sent(full)
        outgoing.append(transport.isend(full, peer, tag))
    summands = {rank: full, **{peer: loan.look() for peer, loan in loans.items()}}
    total = torch.empty_like(full)
    if world_size == 2:
        bounds = [(0, full.numel())]  # a sum of two numbers does not depend on their order
    for k, (start, stop) in enumerate(bounds):
        if start < stop:
            first, *rest = (summands[(k + i) % world_size][start:stop] for i in range(1, world_size + 1))
            for i, part in enumerate(rest, start=2):
                hop(total[start:stop], first, part, divisor if i == world_size else 1)
                first = total[start:stop]
    for loan in loans.values():
        loan.give_back()
    PendingGroup(outgoing).wait()
    full.copy_(total)  # after all peers have read `full`


class _Slots:
    """Inbox of staged messages. While the message in one slot is added, the next messages arrive in other slots."""

    def __init__(self, channel: Channel, expected: Sequence[tuple[Tensor, int]], slots: Sequence[Tensor]) -> None:
        self._transport, self._tag, _ = channel
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


class _Loans:
    """Inbox of lent messages, which are read in the sender's memory. Several messages are added block by block."""

    def __init__(self, channel: Channel, expected: Sequence[tuple[Tensor, int]], slots: Sequence[Tensor]) -> None:
        transport, tag, _ = channel
        self._loans = deque(transport.borrow(like.numel(), like.dtype, source, tag) for like, source in expected)
        self._slot = slots[0] if slots else None

    def sums(self, sources: int, start: int, own: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Add one chunk from each of `sources` ranks block by block, and yield `(start, sum, own)` for each block."""
        loans = [self._loans.popleft() for _ in range(sources)]
        lent = [loan.look() for loan in loans]
        if sources == 1:
            yield start, lent[0], own
        else:
            assert self._slot is not None, "there is a slot for sums"
            for first in range(0, own.numel(), len(self._slot)):
                block = slice(first, first + len(self._slot))
                mine = own[block]
                total = self._slot[: len(mine)]
                hop(total, lent[0][block], lent[1][block], 1)
                for each in lent[2:]:
                    hop(total, total, each[block], 1)
                yield start + first, total, mine
        for loan in loans:
            loan.give_back()


def _in_place(start: int, received: Tensor | Rows, own: Tensor | None) -> None:
    """Add to a partial sum in place. The sum is forwarded afterwards.

    A piece passes each rank once, so the addition never overwrites a buffer that is still being sent.
    """
    assert own is not None, "a hop adds to this rank's own piece"
    assert isinstance(received, Tensor), "messages are partial sums"
    hop(own, received, own, 1)


def _reduce_by_steps(
    channel: Channel, schedule: Schedule, pieces: Pieces, last: LastHop, slots: Sequence[Tensor]
) -> None:
    """In each step, exchange whole pieces and then add them. A step sends the sums of earlier steps."""
    rank = channel.transport.rank
    finishers = list(_finishers(schedule.program(rank), rank, last))
    for step, (sent, received) in enumerate(schedule.steps_of(rank)):
        free = iter(slots)
        messages = {  # by segment, part, chunk and source
            (each.segment, each.part, i, each.source): next(free)[: chunk.numel()]
            for each in received
            for i, (_, chunk) in enumerate(pieces(each.segment, each.part))
        }
        channel.exchange(_sent(sent, pieces), [(message, source) for (*_, source), message in messages.items()])
        for arrival, finish in finishers:
            if arrival.step == step:
                segment, part = arrival.segment, arrival.part
                for i, (start, own) in enumerate(pieces(segment, part)):
                    summands = [messages[segment, part, i, source] for source in arrival.sources]
                    for earlier, later in pairwise(summands):
                        hop(later, earlier, later, 1)
                    finish(start, summands[-1], own)


def _departing(channel: Channel, departures: Sequence[Departure], pieces: Pieces) -> Iterator[tuple[Tensor, int]]:
    """Yield the chunks that are sent before anything has arrived, each with its target rank, and count the chunks."""
    for departure in departures:
        for _, chunk in pieces(departure.segment, departure.part):
            for peer in departure.targets:
                channel.count_sent(chunk)
                yield chunk, peer


def _sent(transfers: Sequence[Transfer], pieces: Pieces) -> list[tuple[Tensor, int]]:
    """Return the chunks that a rank sends in a step, given the step's `transfers`. Each chunk has its target rank."""
    return [(chunk, each.target) for each in transfers for _, chunk in pieces(each.segment, each.part)]


def _finishers(program: Program, rank: int, last: LastHop) -> Iterator[tuple[Arrival, LastHop]]:
    """Yield each arrival with the function that adds the arriving messages to this rank's piece.

    The function is the callback `last` for the final arrival of each part of this rank's segment, and `_in_place` for
    all other arrivals.
    """
    final = {arrival.part: i for i, arrival in enumerate(program.arrivals) if arrival.segment == rank}
    for i, arrival in enumerate(program.arrivals):
        stays = arrival.segment == rank and final[arrival.part] == i
        yield arrival, last if stays else _in_place
