"""A collective as data: the transfers of all ranks in each step, and the transfers of one rank.

In: steps, which `schedule.py` writes for each algorithm. Out: the `Exchange` of a rank in each step, for transports
that run a step as a whole; the `Program` of a rank, for transports that forward messages as they arrive. This file
handles integers and names only: it does not know tensors, links or time.

Legend: `W` ranks, `t` a step. A buffer has one segment per rank, and each segment has one or more parts. A
piece is one part of one segment: `(segment, part)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any, NamedTuple, TypeAlias

from shardlite.errors import LayoutError

_Piece: TypeAlias = tuple[int, int]  # the numbers of a segment and of its part


@dataclass(frozen=True, slots=True)
class Transfer:
    """Part `part` of segment `segment` goes from rank `source` to rank `target`."""

    source: int
    target: int
    segment: int
    part: int


class Exchange(NamedTuple):
    """The transfers of one rank in a step."""

    sent: tuple[Transfer, ...]
    received: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Departure:
    """A piece that a rank sends to each of `targets` before anything has arrived.

    In a reduction, the piece is the rank's own summand. A piece may depart twice, with another piece in between.
    """

    segment: int
    part: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A piece that a rank receives at `step`, and the targets to which the rank forwards the piece.

    In a reduction with `sources` (a, b, c), the rank's sum of the piece becomes ((from a + from b) + from c) + own sum.
    """

    step: int
    segment: int
    part: int

    sources: tuple[int, ...]
    """Sending ranks, in the order of addition. In a gather there is one sending rank."""

    targets: tuple[int, ...]
    """Ranks to which the piece is forwarded after it was received and, in a reduction, added."""


@dataclass(frozen=True)
class Program:
    """The departures and arrivals of one rank. Arrivals are in the order in which the rank takes the pieces.

    On each link, pieces are sent in the order in which the receiver takes the pieces. So if a rank queues its sends and
    receives meanwhile, the rank needs only one free slot per link, and no two ranks deadlock.
    """

    departures: tuple[Departure, ...]
    arrivals: tuple[Arrival, ...]


class Steps(Sequence[tuple[Transfer, ...]]):
    """Steps whose transfers are computed on demand: all transfers of a step, or the transfers of one rank."""

    world_size: int

    def __getitem__(self, t: Any) -> Any:
        step = range(len(self))[t]
        if step not in self._written:
            sent = (self.of_rank(step, rank).sent for rank in range(self.world_size))
            self._written[step] = tuple(filter(None, chain.from_iterable(zip_longest(*sent))))
        return self._written[step]

    @cached_property
    def _written(self) -> dict[int, tuple[Transfer, ...]]:
        return {}

    def of_rank(self, t: int, rank: int) -> Exchange:
        """Return the transfers of `rank` in step `t`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Schedule:
    """A collective, written out for all ranks."""

    operation: str
    """`"all-gather"`, `"reduce-scatter"` or `"broadcast"`."""

    algorithm: str
    """One of `ALGORITHMS`; `"chain"` for a broadcast."""

    world_size: int
    """Number of ranks, `W`."""

    parts: int
    """Number of parts per segment."""

    steps: Sequence[tuple[Transfer, ...]]
    """Transfers of each step. A piece sent in a step was complete at its source before the step.

    The algorithms in `schedule.py` compute the transfers on demand, since a collective has `O(W^2)` transfers.
    """

    @property
    def segments(self) -> int:
        """Number of segments of the buffer: one per rank, or one in all for a broadcast."""
        return 1 if self.operation == "broadcast" else self.world_size

    def program(self, rank: int) -> Program:
        """Return the program of `rank`, cached.

        Raises:
            LayoutError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"{self.operation}: no rank {rank} in a world of {self.world_size}")
        if rank not in self._programs:
            self._programs[rank] = _program(self, rank)
        return self._programs[rank]

    def steps_of(self, rank: int) -> Sequence[Exchange]:
        """Return the transfers of `rank` in each step, cached. The work does not depend on other ranks' transfers."""
        if rank not in self._exchanges:
            of_rank = self.steps.of_rank if isinstance(self.steps, Steps) else self._selected
            self._exchanges[rank] = [of_rank(t, rank) for t in range(len(self.steps))]
        return self._exchanges[rank]

    def _selected(self, t: int, rank: int) -> Exchange:
        sent = tuple(each for each in self.steps[t] if each.source == rank)
        return Exchange(sent, tuple(each for each in self.steps[t] if each.target == rank))

    @cached_property
    def _programs(self) -> dict[int, Program]:
        return {}

    @cached_property
    def _exchanges(self) -> dict[int, Sequence[Exchange]]:
        return {}


def _program(schedule: Schedule, rank: int) -> Program:
    """Select the transfers of `rank`. A piece is forwarded after the latest arrival before its sending step."""
    departures: list[tuple[_Piece, list[int]]] = []
    arrivals: dict[tuple[int, _Piece], tuple[list[int], list[int]]] = {}
    onward: dict[_Piece, list[int]] = {}  # the targets of each piece's latest arrival so far
    for step, exchange in enumerate(schedule.steps_of(rank)):
        for each in exchange.sent:
            piece = each.segment, each.part
            if piece in onward:
                onward[piece].append(each.target)
            elif departures and departures[-1][0] == piece:
                departures[-1][1].append(each.target)
            else:
                departures.append((piece, [each.target]))
        for each in exchange.received:  # after all sends, because these send pieces of earlier steps
            piece = each.segment, each.part
            sources, onward[piece] = arrivals.setdefault((step, piece), ([], []))
            sources.append(each.source)
    return Program(
        tuple(Departure(*piece, tuple(targets)) for piece, targets in departures),
        tuple(Arrival(step, *piece, tuple(a), tuple(b)) for (step, piece), (a, b) in arrivals.items()),
    )
