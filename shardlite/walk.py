"""How segments travel round the ring: two walks, one order of additions. Knows chunks and links, not whose they are.

The segments that pass a rank form its path. The first departs from here; each later one arrives from the left neighbour
and goes on to the right one at the next step; the last stays.

    step t   sends path[t], receives path[t+1]

A chunk is a message's worth of a segment. Over most transports a chunk is passed on as soon as it came, so all links
are busy after the first chunk. Over a batched transport a step is one exchange of all its chunks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from typing import Protocol

from shardlite_kernels import hop
from torch import Tensor

from shardlite.transport import Message, Pending, Transport

Chunks = Sequence[Tensor]
"""A segment, cut into messages. An empty segment has none."""


@dataclass(frozen=True)
class Links:
    """The two links that a rank uses in one operation: it receives from the left and sends to the right."""

    transport: Transport
    tag: int

    @property
    def left(self) -> int:
        """The rank before this one."""
        return (self.transport.rank - 1) % self.transport.world_size

    @property
    def right(self) -> int:
        """The rank after this one."""
        return (self.transport.rank + 1) % self.transport.world_size

    def send(self, chunk: Tensor) -> Pending:
        """Start sending one chunk."""
        return self.transport.isend(chunk, self.right, self.tag)

    def receive(self, chunk: Tensor) -> Pending:
        """Start receiving one chunk."""
        return self.transport.irecv(chunk, self.left, self.tag)

    def step(self, departing: Chunks, arriving: Chunks) -> None:
        """Send and receive at once, and wait for both."""
        messages = [Message(chunk, self.left, outgoing=False) for chunk in arriving]
        messages += [Message(chunk, self.right, outgoing=True) for chunk in departing]
        if messages:
            self.transport.exchange(messages, self.tag).wait()


class LastHop(Protocol):
    """What becomes of a finished sum."""

    def __call__(self, start: int, received: Tensor, own: Tensor) -> None:
        """Finish elements `[start, start + n)` of the segment: their sum is `received + own`, [n] each.

        Called once for every chunk, in ascending order. Both tensors are used for something else afterwards.
        """


def pass_on(links: Links, path: Sequence[Chunks]) -> None:
    """Receive each segment of `path` but the first, and send each but the last."""
    if links.transport.batched:
        for departing, arriving in pairwise(path):
            links.step(departing, arriving)
    else:
        _relay(links, path[0], list(chain(*path[1:])), sum(map(len, path[1:-1])))


def pass_down(links: Links, chunks: Chunks, *, first: bool, last: bool) -> None:
    """Send `chunks` down a chain of ranks, of which this one may be the `first` or the `last`."""
    arriving = [] if first else chunks
    departing = [] if last else chunks
    if links.transport.batched:
        ahead: list[Chunks] = [[chunk] for chunk in arriving]
        behind: list[Chunks] = [[chunk] for chunk in departing]
        late: list[Chunks] = [[]] if arriving else []  # a chunk goes on while the next one arrives
        for sent, received in zip_longest(late + behind, ahead, fillvalue=()):
            links.step(sent, received)
    elif first:
        _relay(links, departing, [], 0)
    else:
        _relay(links, [], arriving, len(departing))


def add_up(links: Links, path: Sequence[Chunks], last: LastHop, slots: Chunks) -> None:
    """Send the first segment of `path`; add what arrives for each later one to it, and send the sum on.

    The last addition is left to `last`. What arrives is staged in `slots`, each as long as the longest chunk: for a
    batched transport one per chunk of the longest segment, otherwise any number of them.
    """
    if links.transport.batched:
        _add_by_steps(links, path, last, slots)
    else:
        _add_by_chunks(links, path, last, slots)


def _relay(links: Links, departing: Chunks, arriving: Chunks, passed_on: int) -> None:
    """Send `departing`, receive `arriving`, and pass the first `passed_on` of those on as they come."""
    incoming = [links.receive(chunk) for chunk in arriving]
    outgoing = [links.send(chunk) for chunk in departing]
    for i, (pending, chunk) in enumerate(zip(incoming, arriving, strict=True)):
        pending.wait()
        if i < passed_on:
            outgoing.append(links.send(chunk))
    _wait_all(outgoing)


def _add_by_chunks(links: Links, path: Sequence[Chunks], last: LastHop, slots: Chunks) -> None:
    """While what has arrived in one slot is added to an own chunk, the other slots are filled."""
    own = list(chain(*path[1:]))
    passed_on = len(own) - len(path[-1])
    starts = _starts(path[-1])
    ahead = len(slots)
    received = [slots[i % ahead][: chunk.numel()] for i, chunk in enumerate(own)]
    incoming = [links.receive(chunk) for chunk in received[:ahead]]
    outgoing = [links.send(chunk) for chunk in path[0]]
    for i in range(len(own)):
        incoming[i].wait()
        if i < passed_on:
            # In place: a segment passes each rank once, so nothing that is still being sent is overwritten.
            hop(own[i], received[i], own[i], 1)
            outgoing.append(links.send(own[i]))
        else:
            last(next(starts), received[i], own[i])
        if i + ahead < len(own):
            incoming.append(links.receive(received[i + ahead]))  # its slot has just been read
    _wait_all(outgoing)


def _add_by_steps(links: Links, path: Sequence[Chunks], last: LastHop, slots: Chunks) -> None:
    """Exchange whole segments, then add: what a step sends was summed by the step before."""
    for t, (departing, own) in enumerate(pairwise(path), start=1):
        received = [slot[: chunk.numel()] for slot, chunk in zip(slots, own, strict=False)]
        links.step(departing, received)
        for start, partial, mine in zip(_starts(own), received, own, strict=True):
            if t < len(path) - 1:
                hop(mine, partial, mine, 1)
            else:
                last(start, partial, mine)


def _starts(chunks: Chunks) -> Iterator[int]:
    """Yield where each chunk starts in its segment."""
    start = 0
    for chunk in chunks:
        yield start
        start += chunk.numel()


def _wait_all(pending: Sequence[Pending]) -> None:
    for message in pending:
        message.wait()
