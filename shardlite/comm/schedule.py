"""Schedules of collectives as data: which rank sends which piece to which, and in which order sums are added.

Knows integers and names only; nothing of tensors, links or time. A buffer has one segment per rank, and rank `k` owns
segment `k`: it holds the segment before an all-gather and after a reduce-scatter.

    algorithm        steps           messages sent by a rank    segment k is added in the order
    ring             W-1             W-1                        k+1, k+2, ..., k-1, k
    direct           1               W-1                        k+1, k+2, ..., k-1, k
    bidirectional    floor(W/2)      (W-1) * parts              each side separately, half round
    hierarchical     (g-1)+(n-1)     W-1                        nodes as a ring of sums, each a ring of its own

Bytes are the same in all of them: in a reduce-scatter each rank sends every segment but its own once, in an all-gather
it receives every segment but its own once. With equal segments that is `(W-1)/W` of the buffer, sent and received,
which is optimal (Thakur, Rabenseifner, Gropp, 2005, IJHPCA 19). Algorithms differ in the number of steps, each of
which costs a latency, and in the links that carry the bytes.

Legend: `W` ranks, `r` and `k` ranks (modulo `W`), `t` a step, `g` ranks per node, `n = W/g` nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, reduce
from itertools import pairwise, zip_longest
from typing import TypeAlias, Union

from shardlite.config import ALGORITHMS, Algorithm
from shardlite.errors import LayoutError

IN_RING_ORDER: frozenset[Algorithm] = frozenset({"ring", "direct"})
"""Algorithms whose reductions add in the order of the ring: any of them gives the same bits."""

Order: TypeAlias = Union[int, tuple["Order", "Order"]]  # noqa: UP007  (a string cannot stand beside `|`)
"""Tree of additions: `((1, 2), 0)` is (rank 1's + rank 2's) + rank 0's."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Part `part` of segment `segment` goes from rank `source` to rank `target`."""

    source: int
    target: int
    segment: int
    part: int


@dataclass(frozen=True, slots=True)
class Departure:
    """A piece that a rank sends at once, before anything has arrived, to each of `targets`.

    In a reduction it is the rank's own summand. A piece may depart twice, with another one between.
    """

    segment: int
    part: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A piece that a rank receives at `step`, and its targets.

    In a reduction with `sources` (a, b, c) the rank's sum of this piece becomes ((from a + from b) + from c) + own sum.
    """

    step: int
    segment: int
    part: int

    sources: tuple[int, ...]
    """Sending ranks, in the order of addition. A gather has one."""

    targets: tuple[int, ...]
    """Ranks that it is sent on to, after it was received and, in a reduction, added."""


@dataclass(frozen=True)
class Program:
    """The departures and arrivals of one rank. Arrivals are in the order in which it takes them.

    On each link, pieces are sent in the order in which they are taken. So a rank whose sends are queued while it
    receives needs no more than one free slot per link, and no two ranks deadlock. A rank whose sends block until the
    target has room needs `Schedule.turns` instead.
    """

    departures: tuple[Departure, ...]
    arrivals: tuple[Arrival, ...]


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

    steps: tuple[tuple[Transfer, ...], ...]
    """Transfers of each step. A piece sent in a step was complete at its source before the step."""

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

    @cached_property
    def _programs(self) -> dict[int, Program]:
        return {}

    def turns(self, rank: int) -> Iterator[tuple[int, Transfer | None, Transfer | None]]:
        """Yield `(step, sent, received)`, of which one may be `None`: the turns that `rank` takes, in order.

        A piece sent in the i-th turn of a step is received in the i-th turn of that step by its target. So a rank that
        finishes one turn before the next, and within a turn sends each chunk before it receives one, can only wait for
        ranks that are behind it: waits form no cycle, however little room there is for received chunks.
        """
        for step, transfers in enumerate(self.steps):
            sent = (each for each in transfers if each.source == rank)
            received = (each for each in transfers if each.target == rank)
            for pair in zip_longest(sent, received):
                yield step, *pair


def all_gather(algorithm: Algorithm, world_size: int, *, node: int = 1) -> Schedule:
    """Return the schedule that brings every rank's segment to all ranks.

    `node` is the number of ranks per node, for `hierarchical` only.

    ring: at step `t` rank `r` sends segment `r-t` to `r+1`, which it received at the step before.

        W=4   start       t=0         t=1         t=2
        r=0   [a . . .]   [a . . d]   [a . c d]   [a b c d]

    bidirectional: each segment goes both ways, half round. With an even `W` the opposite rank is reached half from
    either side, so segments have two parts then (but not for two ranks, which have one link), and parts with the longer
    way start first.

        W=5   start         t=0           t=1
        r=0   [a . . . .]   [a b . . e]   [a b c d e]

        W=4   start           t=0             t=1
        r=0   [aa .. .. ..]   [aa .b .. d.]   [aa bb cc dd]

    Both directions of every link carry the same number of bytes, in half as many steps as a ring, for messages bound by
    latency. (Segments in halves, each going all the way round, would use both directions, too, but take `W-1` steps.)

    direct: one step. Rank `r` sends its segment to `r+1`, `r+2`, ..., so that each rank has another first target.

    hierarchical: nodes are `g` ranks with consecutive numbers. First a ring across the nodes, of the ranks with the
    same place in their nodes; then a ring inside each node, in which `n` segments travel together.

        W=6   start           t=0             t=1
        r=0   [a . . . . .]   [a . . d . .]   [a . c d . f]   g=3, n=2: the first step is across
        r=1   [. b . . . .]   [. b . . e .]   [a b . d e .]

    Raises:
        LayoutError: an unknown algorithm, no ranks, or nodes that do not divide the world.
    """
    return _collective("all-gather", algorithm, world_size, node)


def reduce_scatter(algorithm: Algorithm, world_size: int, *, node: int = 1) -> Schedule:
    """Return the schedule that brings the sum of all ranks' segments `k` to rank `k`. `node` is as in `all_gather`.

    It is an all-gather in the other direction, backwards in time: where a piece is sent from its owner to several
    ranks, their sums meet at the owner.

    ring: at step `t` rank `r` sends the partial sum of segment `r-1-t` to `r+1`. Sums of segment 0, `W=4`:

        1 --1--> 2 --1+2--> 3 --1+2+3--> 0        1+2+3+0

    direct: one step. Rank `k` receives from all at once and adds in the order of the ring: the same bits.

        1 ----> 0                                 1+2+3+0
        2 ----> 0
        3 ----> 0

    bidirectional: sums come from both sides, and meet at the owner. With an even `W` the sum from the shorter side,
    which differs between the parts, comes first.

        W=5   3 --3--> 4 --3+4--> 0 <--2+1-- 1 <--2-- 2     3+4+(2+1)+0
        W=4   2 --2--> 3 --2+3--> 0 <---1--- 1              2+3+(1+0), part 0

    hierarchical: inside each node first, then across the nodes. `W=6`, `g=3`:

        1 --1--> 2 --1+2--> 0                     4+5+3+(1+2+0)
        4 --4--> 5 --4+5--> 3 --4+5+3--> 0

    Raises:
        LayoutError: as `all_gather`.
    """
    return _collective("reduce-scatter", algorithm, world_size, node)


def broadcast(world_size: int, source: int, *, parts: int = 1) -> Schedule:
    """Return the schedule that sends the buffer of `source` down a chain: `source`, `source+1`, ..., `source-1`.

    The buffer is one segment. `W-2+parts` steps: a part is sent on while the next one is received, so with many parts
    all links are busy at the same time. All ranks but the last send the whole buffer once.

    Raises:
        LayoutError: no ranks, no such source, or a negative number of parts.
    """
    if not 0 <= source < world_size:
        raise LayoutError(f"broadcast: no rank {source} in a world of {world_size}")
    if parts < 0:
        raise LayoutError(f"broadcast: a buffer cannot be cut into {parts} parts")
    return _chain(world_size, source, parts)


def order_of_addition(schedule: Schedule, segment: int, part: int = 0) -> Order:
    """Return the order in which a reduce-scatter adds a piece: `(((1, 2), 3), 0)` for segment 0 of a ring of four.

    Raises:
        LayoutError: `schedule` is of a collective that adds nothing.
    """
    if schedule.operation != "reduce-scatter":
        raise LayoutError(f"{schedule.operation}: only a reduce-scatter has an order of addition")
    sums: list[Order] = list(range(schedule.world_size))
    for transfers in schedule.steps:
        received: dict[int, list[Order]] = {}
        for each in transfers:
            if (each.segment, each.part) == (segment, part):
                received.setdefault(each.target, []).append(sums[each.source])
        for rank, parcels in received.items():
            sums[rank] = (reduce(_plus, parcels), sums[rank])
    return sums[segment]


def formula(order: Order) -> str:
    """Format an order of addition, from left to right: `1+2+3+0`, or `4+5+3+(1+2+0)`."""
    terms: list[str] = []
    while isinstance(order, tuple):
        order, last = order
        terms.append(formula(last) if isinstance(last, int) else f"({formula(last)})")
    return "+".join([str(order), *reversed(terms)])


def _plus(first: Order, second: Order) -> Order:
    return first, second


_Steps: TypeAlias = tuple[tuple[Transfer, ...], ...]
_Piece: TypeAlias = tuple[int, int]  # a segment's number, and which part of it


@lru_cache(64)
def _chain(world_size: int, source: int, parts: int) -> Schedule:
    links = list(pairwise((source + t) % world_size for t in range(world_size)))
    steps = tuple(
        tuple(Transfer(*link, 0, t - d) for d, link in enumerate(links) if 0 <= t - d < parts)
        for t in range(len(links) - 1 + parts if links and parts else 0)
    )
    return Schedule("broadcast", "chain", world_size, parts, steps)


@cache
def _collective(operation: str, algorithm: str, world_size: int, node: int) -> Schedule:
    """Check the arguments and build the schedule, cached."""
    if algorithm not in ALGORITHMS:
        raise LayoutError(f"{operation}: no algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    what = f"{operation}, {algorithm}"
    if world_size < 1:
        raise LayoutError(f"{what}: a world of {world_size} ranks; at least 1 is needed")
    if algorithm != "hierarchical" and node != 1:
        raise LayoutError(f"{what}: nodes of {node} ranks; only 'hierarchical' knows nodes")
    if node < 1 or world_size % node:
        raise LayoutError(f"{what}: nodes of {node} ranks do not divide a world of {world_size}")
    if operation == "all-gather":
        return Schedule(operation, algorithm, world_size, *_spread(algorithm, world_size, node, 1))
    parts, steps = _spread(algorithm, world_size, node, -1)
    return Schedule(operation, algorithm, world_size, parts, _backwards(steps))


def _spread(algorithm: str, world_size: int, node: int, way: int) -> tuple[int, _Steps]:
    """Return parts and steps by which segments spread from their owners; rings go to `r + way`, which is +1 or -1."""
    if algorithm == "direct":
        return 1, _direct(world_size, way)
    if algorithm == "bidirectional":
        return _bidirectional(world_size, way)
    # A ring is a hierarchy of nodes of one rank.
    return 1, _across(world_size, node, way) + _inside(world_size, node, way)


def _direct(world_size: int, way: int) -> _Steps:
    ranks = range(world_size)
    step = tuple(Transfer(r, (r + way * j) % world_size, r, 0) for j in range(1, world_size) for r in ranks)
    return (step,) if step else ()


def _bidirectional(world_size: int, way: int) -> tuple[int, _Steps]:
    """Half round both ways. With two parts, 0 goes one rank further in `way`, 1 in the other; that way starts first.

    Flows that start later come first in each step: what they send at once precedes what the others forward.
    """
    parts = 2 if world_size % 2 == 0 and world_size > 2 else 1
    further = world_size // 2
    late = 1 - world_size % 2
    flows = [(-way, 0, late), (way, 1, late), (way, 0, 0), (-way, 1, 0)]
    steps = (
        tuple(
            Transfer(r, (r + to) % world_size, (r - to * (t - start)) % world_size, part)
            for to, part, start in flows
            if part < parts and t >= start
            for r in range(world_size)
        )
        for t in range(further)
    )
    return parts, tuple(steps)


def _across(world_size: int, node: int, way: int) -> _Steps:
    """A ring across the nodes, for each set of ranks with the same place in their nodes, which are `node` apart."""
    hop = way * node
    return tuple(
        tuple(Transfer(r, (r + hop) % world_size, (r - hop * t) % world_size, 0) for r in range(world_size))
        for t in range(world_size // node - 1)
    )


def _inside(world_size: int, node: int, way: int) -> _Steps:
    """A ring inside each node, in which the segments of all ranks with one place in their nodes travel together.

    They go in the order in which they arrived across nodes, the own node's first.
    """

    def step(t: int) -> Iterator[Transfer]:
        for j in range(world_size // node):
            for r in range(world_size):
                place = r % node
                first = r - place
                segment = first - way * node * j + (place - way * t) % node
                yield Transfer(r, first + (place + way) % node, segment % world_size, 0)

    return tuple(tuple(step(t)) for t in range(node - 1))


def _backwards(steps: _Steps) -> _Steps:
    return tuple(
        tuple(Transfer(each.target, each.source, each.segment, each.part) for each in reversed(step))
        for step in reversed(steps)
    )


def _program(schedule: Schedule, rank: int) -> Program:
    """Select what `rank` sends and receives. A piece is sent on after its last arrival before that step."""
    departures: list[tuple[_Piece, list[int]]] = []
    arrivals: dict[tuple[int, _Piece], tuple[list[int], list[int]]] = {}
    onward: dict[_Piece, list[int]] = {}  # the targets of a piece's last arrival so far
    for step, transfers in enumerate(schedule.steps):
        for each in transfers:
            piece = each.segment, each.part
            if each.source == rank and piece in onward:
                onward[piece].append(each.target)
            elif each.source == rank and departures and departures[-1][0] == piece:
                departures[-1][1].append(each.target)
            elif each.source == rank:
                departures.append((piece, [each.target]))
        for each in transfers:  # after all sends, which are of pieces from earlier steps
            piece = each.segment, each.part
            if each.target == rank:
                sources, onward[piece] = arrivals.setdefault((step, piece), ([], []))
                sources.append(each.source)
    return Program(
        tuple(Departure(*piece, tuple(targets)) for piece, targets in departures),
        tuple(Arrival(step, *piece, tuple(a), tuple(b)) for (step, piece), (a, b) in arrivals.items()),
    )
