"""The algorithms that write schedules: which rank sends which piece to which rank, and the order of additions.

In: an algorithm and a number of ranks. Out: a `Schedule` (`transfers.py`), equal on all ranks. This file
handles integers and names only, and no tensors, links or times. A buffer has one segment per rank. Rank `k`
owns segment `k`, which means that rank `k` holds the segment before an all-gather and after a reduce-scatter.

    algorithm        steps           messages sent by a rank    segment k is added in the order
    ring             W-1             W-1                        k+1, k+2, ..., k-1, k
    direct           1               W-1                        k+1, k+2, ..., k-1, k
    bidirectional    floor(W/2)      (W-1) * parts              from both sides separately, halfway round
    hierarchical     (g-1)+(n-1)     W-1                        a ring of node sums, each added along a ring
    halving          log2(W)         W-1                        ((0+1) + (2+3)) + ..., summands may be swapped

All algorithms send the same number of bytes. In a reduce-scatter each rank sends each segment once, except its own. In
an all-gather each rank receives each segment once, except its own. With equal segments each rank sends and receives
`(W-1)/W` of the buffer, which is optimal (Thakur, Rabenseifner, Gropp, 2005, IJHPCA 19). The algorithms differ in the
number of steps (each step costs one latency) and in the links that carry the bytes.

Legend: `W` ranks, `r` and `k` ranks (modulo `W`), `t` a step, `g` ranks per node, `n = W/g` nodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from typing import NamedTuple, TypeAlias, Union

from shardlite.comm.transfers import Exchange, Schedule, Steps, Transfer
from shardlite.config import ALGORITHMS, Algorithm
from shardlite.errors import LayoutError

IN_RING_ORDER: frozenset[Algorithm] = frozenset({"ring", "direct"})
"""Algorithms whose reductions add in the order of the ring. These algorithms all return the same bits."""

Order: TypeAlias = Union[int, tuple["Order", "Order"]]  # noqa: UP007  (a string cannot be an operand of `|`)
"""Tree of additions: `((1, 2), 0)` means (rank 1's summand + rank 2's summand) + rank 0's summand."""


def all_gather(algorithm: Algorithm, world_size: int, *, node: int = 1) -> Schedule:
    """Return the schedule that sends every rank's segment to all ranks.

    `node` is the number of ranks per node, for `hierarchical` only.

    ring: at step `t` rank `r` sends segment `r-t` to `r+1`. At step 0 rank `r` sends its own segment, and at each later
    step the segment that it received at the previous step.

        W=4   start       t=0         t=1         t=2
        r=0   [a . . .]   [a . . d]   [a . c d]   [a b c d]

    bidirectional: each segment is sent in both directions, halfway round in each. With an even `W`, the opposite rank
    receives one half of the segment from each side, so segments have two parts. (Two ranks have one link, so their
    segments have one part.) Parts that travel further start first.

        W=5   start         t=0           t=1
        r=0   [a . . . .]   [a b . . e]   [a b c d e]

        W=4   start           t=0             t=1
        r=0   [aa .. .. ..]   [aa .b .. d.]   [aa bb cc dd]

    Both directions of every link carry the same number of bytes. There are half as many steps as in a ring, which helps
    if latency dominates. (If the two halves of each segment travelled all the way round, in opposite directions, both
    directions would also be used, but in `W-1` steps.)

    direct: one step. Rank `r` sends its segment to `r+1`, `r+2`, ..., in this order, so that no two ranks start with
    the same target.

    hierarchical: a node has `g` ranks with consecutive numbers. First, ranks with the same place in their nodes run a
    ring across the nodes. Then the ranks of each node run a ring, in which `n` segments travel together.

        W=6   start           t=0             t=1
        r=0   [a . . . . .]   [a . . d . .]   [a . c d . f]   g=3, n=2: the first step is across
        r=1   [. b . . . .]   [. b . . e .]   [a b . d e .]

    halving (for a gather: recursive doubling), if the number of ranks is a power of two. Each rank exchanges all its
    segments with the rank that is `W/2` ranks away, then with the rank that is `W/4` ranks away, and so on.

        W=4   start       t=0         t=1
        r=0   [a . . .]   [a . c .]   [a b c d]

    Raises:
        LayoutError: the algorithm is unknown or does not support this number of ranks, there are no ranks, or the
            number of ranks is not a multiple of `node`.
    """
    return _collective("all-gather", algorithm, world_size, node)


def reduce_scatter(algorithm: Algorithm, world_size: int, *, node: int = 1) -> Schedule:
    """Return the schedule in which rank `k` receives the sum of segment `k` over all ranks.

    The argument `node` has the same meaning as for `all_gather`.

    The schedule is that of an all-gather, with every transfer reversed and in reverse order. A gather sends a piece
    from its owner to several ranks. A reduction sends the sums of these ranks to the owner.

    ring: at step `t` rank `r` sends the partial sum of segment `r-1-t` to `r+1`. Sums of segment 0, `W=4`:

        1 --1--> 2 --1+2--> 3 --1+2+3--> 0        1+2+3+0

    direct: one step. Rank `k` receives from all other ranks and adds in the order of the ring, so the sum has the bits
    of a ring.

        1 ----> 0                                 1+2+3+0
        2 ----> 0
        3 ----> 0

    bidirectional: sums are sent from both sides to the owner. With an even `W` the owner first adds the sum from the
    shorter side, which is a different side for each part.

        W=5   3 --3--> 4 --3+4--> 0 <--2+1-- 1 <--2-- 2     3+4+(2+1)+0
        W=4   2 --2--> 3 --2+3--> 0 <---1--- 1              2+3+(1+0), part 0

    hierarchical: a ring inside each node, then a ring across the nodes. `W=6`, `g=3`:

        1 --1--> 2 --1+2--> 0                     4+5+3+(1+2+0)
        4 --4--> 5 --4+5--> 3 --4+5+3--> 0

    halving (recursive halving): each rank exchanges partial sums with its neighbour, then with the rank two places
    away, and so on. Each exchange covers half of the remaining segments. So each segment is added as a balanced binary
    tree.

        1 --1--> 0                                3+2+(1+0)
        3 --3--> 2 --3+2--> 0

    Raises:
        LayoutError: as for `all_gather`.
    """
    return _collective("reduce-scatter", algorithm, world_size, node)


def broadcast(world_size: int, source: int, *, parts: int = 1) -> Schedule:
    """Return the schedule that sends the buffer of `source` along a chain: `source`, `source+1`, ..., `source-1`.

    The buffer is one segment, and there are `W-2+parts` steps. A rank forwards a part while it receives the next part,
    so with many parts all links are busy at the same time. All ranks except the last rank of the chain send the whole
    buffer once.

    Raises:
        LayoutError: there are no ranks, there is no rank `source`, or `parts` is negative.
    """
    if not 0 <= source < world_size:
        raise LayoutError(f"broadcast: no rank {source} in a world of {world_size}")
    if parts < 0:
        raise LayoutError(f"broadcast: a buffer cannot be cut into {parts} parts")
    return _chain(world_size, source, parts)


def order_of_addition(schedule: Schedule, segment: int, part: int = 0) -> Order:
    """Return the order in which a reduce-scatter adds a piece: `(((1, 2), 3), 0)` for segment 0 of a ring of four.

    Raises:
        LayoutError: `schedule` is not a reduce-scatter.
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
            sums[rank] = (reduce(lambda first, second: (first, second), parcels), sums[rank])
    return sums[segment]


def formula(order: Order) -> str:
    """Format an order of addition from left to right, such as `1+2+3+0` or `4+5+3+(1+2+0)`."""
    terms: list[str] = []
    while isinstance(order, tuple):
        order, last = order
        terms.append(formula(last) if isinstance(last, int) else f"({formula(last)})")
    return "+".join([str(order), *reversed(terms)])


@dataclass(frozen=True)
class _Chain(Steps):
    """The steps of a broadcast along a chain of ranks."""

    world_size: int
    source: int
    parts: int

    def __len__(self) -> int:
        return self.world_size - 2 + self.parts if self.world_size > 1 and self.parts else 0

    def of_rank(self, t: int, rank: int) -> Exchange:
        """Return the transfers of `rank` in step `t`."""
        d = (rank - self.source) % self.world_size
        return Exchange(self._sent_by(t, d), self._sent_by(t, d - 1) if d else ())

    def _sent_by(self, t: int, d: int) -> tuple[Transfer, ...]:
        """Return the transfers that the rank `d` places after the source sends."""
        if d == self.world_size - 1 or not 0 <= t - d < self.parts:
            return ()
        return (Transfer((self.source + d) % self.world_size, (self.source + d + 1) % self.world_size, 0, t - d),)


class _Flow(NamedTuple):
    """One transfer per rank. In groups of `group` ranks, each rank sends to the rank that is `to` places after it."""

    group: int
    to: int
    back: int
    """Each rank sends the segment of the rank that is `back` places before it in the group, plus the offset `nodes`."""

    nodes: int = 0
    """Offset that is added to the index of the sent segment."""

    part: int = 0

    def sent_by(self, rank: int, world_size: int) -> Transfer:
        """Return the transfer that a rank sends."""
        place = rank % self.group
        first = rank - place
        segment = first + self.nodes + (place - self.back) % self.group
        return Transfer(rank, first + (place + self.to) % self.group, segment % world_size, self.part)

    def received_by(self, rank: int, world_size: int) -> Transfer:
        """Return the transfer that a rank receives."""
        place = rank % self.group
        return self.sent_by(rank - place + (place - self.to) % self.group, world_size)

    def backwards(self) -> "_Flow":
        """Return the flow in which each target sends the same piece back to its source."""
        return self._replace(to=-self.to, back=self.back + self.to)


class _Swap(NamedTuple):
    """One transfer per rank. Two ranks whose numbers differ only in the binary digit `digit` send to each other."""

    digit: int
    segment: int
    """Binary digits. A rank sends the segment of the rank whose number differs from its own in exactly these digits."""

    def sent_by(self, rank: int, world_size: int) -> Transfer:
        """Return the transfer that a rank sends."""
        return Transfer(rank, rank ^ self.digit, rank ^ self.segment, 0)

    def received_by(self, rank: int, world_size: int) -> Transfer:
        """Return the transfer that a rank receives."""
        return self.sent_by(rank ^ self.digit, world_size)

    def backwards(self) -> "_Swap":
        """Return the swap in which each target sends the same piece back to its source."""
        return self._replace(segment=self.segment ^ self.digit)


@dataclass(frozen=True)
class _Flows(Steps):
    """Steps in which all ranks do the same, relative to their own numbers."""

    world_size: int
    flows: tuple[tuple[_Flow | _Swap, ...], ...]
    """The flows of each step, in the order in which a rank sends them."""

    def __len__(self) -> int:
        return len(self.flows)

    def of_rank(self, t: int, rank: int) -> Exchange:
        """Return the transfers of `rank` in step `t`."""
        sent = tuple(flow.sent_by(rank, self.world_size) for flow in self.flows[t])
        return Exchange(sent, tuple(flow.received_by(rank, self.world_size) for flow in self.flows[t]))

    def backwards(self) -> "_Flows":
        """Return the steps backwards in time, with the direction of each transfer reversed."""
        return _Flows(self.world_size, tuple(tuple(f.backwards() for f in step[::-1]) for step in self.flows[::-1]))


@lru_cache(64)
def _chain(world_size: int, source: int, parts: int) -> Schedule:
    return Schedule("broadcast", "chain", world_size, parts, _Chain(world_size, source, parts))


@cache
def _collective(operation: str, algorithm: str, world_size: int, node: int) -> Schedule:
    """Check the arguments and build the schedule, cached."""
    if algorithm not in ALGORITHMS:
        raise LayoutError(f"{operation}: unknown algorithm {algorithm!r}; choose one of {', '.join(ALGORITHMS)}")
    what = f"{operation}, {algorithm}"
    if world_size < 1:
        raise LayoutError(f"{what}: a world of {world_size} ranks; at least 1 is needed")
    if algorithm != "hierarchical" and node != 1:
        raise LayoutError(f"{what}: nodes of {node} ranks; only 'hierarchical' supports nodes")
    if algorithm == "halving" and world_size.bit_count() != 1:
        raise LayoutError(f"{what}: a world of {world_size} ranks; it must be a power of two")
    if node < 1 or world_size % node:
        raise LayoutError(f"{what}: nodes of {node} ranks do not divide a world of {world_size}")
    parts, flows = _spread(algorithm, world_size, node, 1 if operation == "all-gather" else -1)
    steps = _Flows(world_size, tuple(step for step in flows if step))
    return Schedule(operation, algorithm, world_size, parts, steps if operation == "all-gather" else steps.backwards())


def _spread(algorithm: str, world_size: int, node: int, way: int) -> tuple[int, Sequence[tuple[_Flow | _Swap, ...]]]:
    """Return the number of parts per segment, and the steps by which segments spread from their owners.

    In a ring, rank `r` sends to rank `r + way`, where `way` is 1 or -1.
    """
    if algorithm == "direct":
        return 1, [tuple(_Flow(world_size, way * j, 0) for j in range(1, world_size))]
    if algorithm == "bidirectional":
        return _bidirectional(world_size, way)
    if algorithm == "halving":
        return 1, [*_doubling(world_size)]
    # First, ranks with the same place in their nodes run a ring across the nodes. Then the ranks of each node run a
    # ring. In the ring inside a node, segments of ranks with the same place travel together, in the order in which they
    # arrived across the nodes, starting with the node's own segment. With nodes of one rank, the steps are a plain
    # ring.
    hop, nodes = way * node, range(world_size // node)
    across = [(_Flow(world_size, hop, hop * t),) for t in nodes[:-1]]
    inside = [tuple(_Flow(node, way, way * t, -hop * j) for j in nodes) for t in range(node - 1)]
    return 1, [*across, *inside]


def _bidirectional(world_size: int, way: int) -> tuple[int, list[tuple[_Flow, ...]]]:
    """Return the number of parts per segment, and the steps in which segments travel halfway round in both directions.

    If there are two parts, part 0 travels one rank further in direction `way`, and part 1 one rank further in the other
    direction. The longer flows start first. In each step, the flows that start later are listed first, because a rank
    sends its own pieces before the pieces that it forwards.
    """
    parts = 2 if world_size % 2 == 0 and world_size > 2 else 1
    late = 1 - world_size % 2
    flows = [(-way, 0, late), (way, 1, late), (way, 0, 0), (-way, 1, 0)]
    return parts, [
        tuple(
            _Flow(world_size, to, to * (t - start), part=part)
            for to, part, start in flows
            if part < parts and t >= start
        )
        for t in range(world_size // 2)
    ]


def _doubling(world_size: int) -> Iterator[tuple[_Swap, ...]]:
    """Yield the steps in which ranks `W/2` apart, then `W/4` apart and so on, swap all segments that they hold."""
    held, digit = [0], world_size // 2
    while digit:
        yield tuple(_Swap(digit, other) for other in held)
        held += [digit ^ other for other in held]
        digit //= 2
