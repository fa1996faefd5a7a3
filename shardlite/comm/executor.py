"""Execution of a schedule over a transport. Knows pieces, chunks and links; nothing of units.

A piece is what a schedule moves at once; a chunk is one message of it. Over most transports a chunk is forwarded as
soon as it arrives, so all links are busy after the first chunk. Over a batched transport a step is one exchange of all
its chunks. If a transport lends, messages are read in the sender's memory; otherwise they are staged in slots.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from shardlite_kernels import hop
from torch import Tensor

from shardlite.comm.traffic import Tally
from shardlite.comm.transfers import Arrival, Program, Schedule
from shardlite.comm.transport.base import Loan, Message, Pending, Transport

BLOCK = 1 << 17
"""Number of elements added at a time in a sum of several lent messages, so that the sum stays in the cache. A multiple
of every block of statistics.
"""


class Chunk(NamedTuple):
    """One message of a segment."""

    start: int
    """Its first element, relative to the segment."""

    tensor: Tensor


_MOST_DISTANCES = 32
"""In one exchange. Over each, a rank sends and receives a message: 64 of them are what NCCL takes in a group."""

Pieces = Callable[[int, int], Sequence[Chunk]]
"""Return the chunks of `(segment, part)`. An empty part has none."""


class LastHop(Protocol):
    """Consumer of a finished sum."""

    def __call__(self, start: int, received: Tensor, own: Tensor | None, first: int | None = 0) -> None:
        """Finish elements `[start, start + n)` of the segment: their sum is `received + own`, [n] each.

        Without `own`, `received` has a row of each rank, [W, n], to be added from row `first` on, or as a
        balanced tree if that is `None`. Called for ranges that cover the segment, each once; each starts at a multiple
        of the grain. Both tensors are reused afterwards.
        """


class Channel(NamedTuple):
    """The links of a rank in one operation."""

    transport: Transport
    tag: int
    tally: Tally | None = None
    """Counts what is sent, if not `None`."""

    def send(self, chunk: Tensor, peer: int) -> Pending:
        """Start sending one chunk, and count it."""
        if self.tally is not None:
            self.tally.add(chunk)
        return self.transport.isend(chunk, peer, self.tag)

    def receive(self, chunk: Tensor, peer: int) -> Pending:
        """Start receiving one chunk."""
        return self.transport.irecv(chunk, peer, self.tag)

    def borrow(self, like: Tensor, peer: int) -> Loan:
        """Expect one chunk, to be read in the sender's memory."""
        return self.transport.borrow(like.numel(), like.dtype, peer, self.tag)

    def exchange(self, departing: Sequence[tuple[Tensor, int]], arriving: Sequence[tuple[Tensor, int]]) -> None:
        """Send and receive chunks, each with a peer, and wait for all.

        That is one exchange, or more if there are many peers. Each has the messages over some distances, so that both
        ranks of a message have it in the same one.
        """
        rank, world_size = self.transport.rank, self.transport.world_size
        batches: list[list[Message]] = [[] for _ in range(0, world_size, _MOST_DISTANCES)]
        for chunk, peer in arriving:
            batches[(rank - peer) % world_size // _MOST_DISTANCES].append(Message(chunk, peer, outgoing=False))
        for chunk, peer in departing:
            batches[(peer - rank) % world_size // _MOST_DISTANCES].append(Message(chunk, peer, outgoing=True))
            if self.tally is not None:
                self.tally.add(chunk)
        for messages in filter(None, batches):
            self.transport.exchange(messages, self.tag).wait()


def run_gather(channel: Channel, schedule: Schedule, pieces: Pieces) -> None:
    """Move every piece as the schedule says, received in place."""
    rank = channel.transport.rank
    if channel.transport.batched:
        for step in range(len(schedule.steps)):
            arriving = [(each.tensor, peer) for each, peer in _received(schedule, step, rank, pieces)]
            channel.exchange(_sent(schedule, step, rank, pieces), arriving)
        return
    program = schedule.program(rank)
    incoming = [
        [(chunk, channel.receive(chunk, arrival.sources[0])) for _, chunk in pieces(arrival.segment, arrival.part)]
        for arrival in program.arrivals
    ]
    outgoing = [channel.send(chunk, peer) for chunk, peer in _departing(program, pieces)]
    for arrival, messages in zip(program.arrivals, incoming, strict=True):
        for chunk, message in messages:
            message.wait()
            outgoing += [channel.send(chunk, peer) for peer in arrival.targets]
    _wait_all(outgoing)


def run_reduce(channel: Channel, schedule: Schedule, pieces: Pieces, last: LastHop, slots: Sequence[Tensor]) -> None:
    """Add received pieces to the own ones, in place, and send sums on. `last` makes the last addition of own pieces.

    Messages are staged in `slots`, each as long as the longest chunk: for a batched transport one per chunk that
    arrives in a step, otherwise two or more. If the transport lends, a slot holds the sum of several loans instead.
    """
    if channel.transport.batched:
        _add_by_steps(channel, schedule, pieces, last, slots)
        return
    rank = channel.transport.rank
    program = schedule.program(rank)
    wanted = [
        (chunk, source)
        for arrival in program.arrivals
        for _, chunk in pieces(arrival.segment, arrival.part)
        for source in arrival.sources
    ]
    inbox = _Loans(channel, wanted, slots) if channel.transport.lends else _Slots(channel, wanted, slots)
    outgoing = [channel.send(chunk, peer) for chunk, peer in _departing(program, pieces)]
    for arrival, finish in _finishers(program, rank, last):
        for start, own in pieces(arrival.segment, arrival.part):
            inbox.add(len(arrival.sources), start, own, finish)
            outgoing += [channel.send(own, peer) for peer in arrival.targets]
    _wait_all(outgoing)


def run_all_reduce(channel: Channel, full: Tensor, bounds: Sequence[tuple[int, int]], divisor: int) -> None:
    """Sum `full` [n] over two or more ranks and divide it, in place, reading all other ranks' loans at once.

    Segment `k`, between the k-th `bounds`, is added in the order of the ring.
    """
    rank, world_size = channel.transport.rank, channel.transport.world_size
    others = [(rank + i) % world_size for i in range(1, world_size)]
    loans = {peer: channel.borrow(full, peer) for peer in others}
    outgoing = [channel.send(full, peer) for peer in others]
    parts = {rank: full, **{peer: loan.look() for peer, loan in loans.items()}}
    total = torch.empty_like(full)
    if world_size == 2:
        bounds = [(0, full.numel())]  # two numbers are added in any order
    for k, (start, stop) in enumerate(bounds):
        if start < stop:
            first, *rest = (parts[(k + i) % world_size][start:stop] for i in range(1, world_size + 1))
            for i, part in enumerate(rest, start=2):
                hop(total[start:stop], first, part, divisor if i == world_size else 1)
                first = total[start:stop]
    for loan in loans.values():
        loan.give_back()
    _wait_all(outgoing)
    full.copy_(total)  # after all peers have read it


class _Slots:
    """Staged messages: while the message in one slot is added, the others are received."""

    def __init__(self, channel: Channel, wanted: Sequence[tuple[Tensor, int]], slots: Sequence[Tensor]) -> None:
        self._links = channel
        self._wanted = iter(wanted)
        self._posted: deque[tuple[Pending, Tensor, Tensor]] = deque()
        for slot in slots:
            self._post(slot)

    def add(self, sources: int, start: int, own: Tensor, finish: LastHop) -> None:
        """Take one chunk from each of `sources` ranks, add them up, and finish with the own chunk."""
        total, free = self._take()
        for _ in range(sources - 1):
            more, slot = self._take()
            hop(more, total, more, 1)
            self._post(free)
            total, free = more, slot
        finish(start, total, own)
        self._post(free)

    def _take(self) -> tuple[Tensor, Tensor]:
        """Wait for the next message, and return it with its slot."""
        pending, message, slot = self._posted.popleft()
        pending.wait()
        return message, slot

    def _post(self, slot: Tensor) -> None:
        """Receive the next message in a free slot."""
        if (wanted := next(self._wanted, None)) is not None:
            like, source = wanted
            message = slot[: like.numel()]
            self._posted.append((self._links.receive(message, source), message, slot))


class _Loans:
    """Lent messages, read in the sender's memory. Sums of several are made block by block."""

    def __init__(self, channel: Channel, wanted: Sequence[tuple[Tensor, int]], slots: Sequence[Tensor]) -> None:
        self._loans = deque(channel.borrow(like, source) for like, source in wanted)
        self._room = slots[0] if slots else None

    def add(self, sources: int, start: int, own: Tensor, finish: LastHop) -> None:
        """Take one chunk from each of `sources` ranks, add them up, and finish with the own chunk."""
        loans = [self._loans.popleft() for _ in range(sources)]
        lent = [loan.look() for loan in loans]
        if sources == 1:
            finish(start, lent[0], own)
        else:
            assert self._room is not None, "there is a slot for sums"
            for begin in range(0, own.numel(), len(self._room)):
                here = slice(begin, begin + len(self._room))
                mine = own[here]
                total = self._room[: len(mine)]
                hop(total, lent[0][here], lent[1][here], 1)
                for each in lent[2:]:
                    hop(total, total, each[here], 1)
                finish(start + begin, total, mine)
        for loan in loans:
            loan.give_back()


def _in_place(start: int, received: Tensor, own: Tensor | None, first: int | None = 0) -> None:
    """Finish a partial sum that is sent on.

    A piece passes each rank once, so no buffer that is still being sent is overwritten.
    """
    assert own is not None, "a hop adds to it"
    hop(own, received, own, 1)


def _add_by_steps(channel: Channel, schedule: Schedule, pieces: Pieces, last: LastHop, slots: Sequence[Tensor]) -> None:
    """Exchange whole pieces, then add: a step sends sums of the steps before."""
    rank = channel.transport.rank
    finishers = list(_finishers(schedule.program(rank), rank, last))
    for step in range(len(schedule.steps)):
        expected = list(_received(schedule, step, rank, pieces))
        staged = [slot[: chunk.tensor.numel()] for slot, (chunk, _) in zip(slots, expected, strict=False)]
        peers = [peer for _, peer in expected]
        channel.exchange(_sent(schedule, step, rank, pieces), list(zip(staged, peers, strict=True)))
        found = {
            (chunk.tensor.data_ptr(), peer): message for message, (chunk, peer) in zip(staged, expected, strict=True)
        }
        for arrival, finish in finishers:
            if arrival.step == step:
                for start, own in pieces(arrival.segment, arrival.part):
                    messages = [found[own.data_ptr(), source] for source in arrival.sources]
                    for earlier, later in pairwise(messages):
                        hop(later, earlier, later, 1)
                    finish(start, messages[-1], own)


def _departing(program: Program, pieces: Pieces) -> Iterator[tuple[Tensor, int]]:
    """Yield the chunks that are sent at once, each with its target."""
    for departure in program.departures:
        for _, chunk in pieces(departure.segment, departure.part):
            for peer in departure.targets:
                yield chunk, peer


def _sent(schedule: Schedule, step: int, rank: int, pieces: Pieces) -> list[tuple[Tensor, int]]:
    """Return the chunks that a rank sends in a step, each with its target."""
    return [
        (chunk, each.target)
        for each in schedule.steps_of(rank)[step].sent
        for _, chunk in pieces(each.segment, each.part)
    ]


def _received(schedule: Schedule, step: int, rank: int, pieces: Pieces) -> Iterator[tuple[Chunk, int]]:
    """Yield the places of the chunks that a rank receives in a step, each with its source."""
    for each in schedule.steps_of(rank)[step].received:
        for chunk in pieces(each.segment, each.part):
            yield chunk, each.source


def _finishers(program: Program, rank: int, last: LastHop) -> Iterator[tuple[Arrival, LastHop]]:
    """Yield arrivals with the function that finishes their sum: `last` for the final arrival of this rank's part."""
    final = {arrival.part: i for i, arrival in enumerate(program.arrivals) if arrival.segment == rank}
    for i, arrival in enumerate(program.arrivals):
        stays = arrival.segment == rank and final[arrival.part] == i
        yield arrival, last if stays else _in_place


def _wait_all(pending: Sequence[Pending]) -> None:
    for message in pending:
        message.wait()
