"""The owner of each parameter, chosen once, so that ranks have equal work and equal memory.

A parameter that one rank keeps whole is owned by this rank, so nothing of it is sent. The other parameters are given
away one by one, from the most work to the least. A parameter goes to the rank with the least load among the ranks that
keep a part of it. If these ranks have too much load, the parameter goes to another rank. Afterwards the highest load is
lowered step by step.

Legend: `W` ranks. A load is a share of the work and a share of the elements of all parameters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod
from operator import itemgetter

from shardlite.params import Layout


@dataclass(eq=False, kw_only=True)
class Owned:
    """One parameter, the elements that each rank keeps, and the rank that owns the parameter."""

    name: str
    unit: str
    shape: Sequence[int]
    """Shape of the whole parameter."""

    ranges: Sequence[tuple[int, int]]
    """The elements that each rank keeps. At stage 0, every rank keeps all elements."""

    place: int
    """Index of the parameter in the model."""

    owner: int = 0
    """The rank that steps the parameter."""

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)

    @property
    def work(self) -> int:
        """A measure of the operations of a step: the elements times the shorter side of the matrix.

        An orthogonalization or a preconditioner of a matrix [a, b] with `a <= b` takes multiples of `a * a * b`
        operations. A tensor of more dimensions counts as a matrix with its first dimension as rows.
        """
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return self.numel * max(min(rows, self.numel // max(rows, 1)), 1)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank keeps all elements."""
        return all(stop - start == self.numel for start, stop in self.ranges)

    @property
    def holders(self) -> list[int]:
        """The ranks that keep elements."""
        return [rank for rank, (start, stop) in enumerate(self.ranges) if start < stop]

    @property
    def moves(self) -> bool:
        """Whether pieces have to be sent to the owner."""
        start, stop = self.ranges[self.owner]
        return stop - start < self.numel

    def nbytes_sent(self, rank: int, itemsize_to: int, itemsize_back: int) -> int:
        """Return the bytes that a rank sends in a step, given the bytes per element in both directions."""
        if self.is_replicated:
            return (len(self.ranges) - 1) * self.numel * itemsize_back if rank == self.owner else 0
        start, stop = self.ranges[rank]
        return (self.numel - stop + start) * itemsize_back if rank == self.owner else (stop - start) * itemsize_to


def ranges_of(layout: Layout, index: int, *, whole: bool) -> Sequence[tuple[int, int]]:
    """Return the elements of slot `index` that each rank keeps. If `whole`, every rank keeps all elements."""
    slot = layout.slots[index]
    if whole:
        return [(0, slot.numel)] * layout.world_size
    return list(pairwise(min(max(cut - slot.start, 0), slot.numel) for cut in layout.cuts))


TOLERANCE = 1.1
"""A rank that keeps no part of a parameter may own it only if each rank that keeps a part would otherwise have more
than this multiple of the mean load."""


class Loads:
    """The loads of all ranks."""

    def __init__(self, members: Sequence[Owned], ranks: int) -> None:
        self._total = (sum(each.work for each in members) or 1, sum(each.numel for each in members) or 1)
        self._sums = [[0, 0] for _ in range(ranks)]

    def add(self, member: Owned, rank: int, sign: int = 1) -> None:
        """Add a member to the load of a rank."""
        self._sums[rank][0] += sign * member.work
        self._sums[rank][1] += sign * member.numel

    def move(self, member: Owned, rank: int) -> None:
        """Make another rank the owner of a member."""
        self.add(member, member.owner, -1)
        member.owner = rank
        self.add(member, rank)

    def of(self, rank: int, more: Sequence[Owned] = (), less: Sequence[Owned] = ()) -> float:
        """Return the load of a rank, with some members added and others removed.

        The load is the larger of both shares, times the number of ranks. The mean is 1.
        """
        work, numel = self._sums[rank]
        for sign, members in ((1, more), (-1, less)):
            for each in members:
                work, numel = work + sign * each.work, numel + sign * each.numel
        return max(work / self._total[0], numel / self._total[1]) * len(self._sums)

    def shares(self, rank: int) -> tuple[float, float]:
        """Return a rank's shares of the work and of the elements."""
        return self._sums[rank][0] / self._total[0], self._sums[rank][1] / self._total[1]


def assign(members: Sequence[Owned], owned: Iterable[Owned] = ()) -> None:
    """Set the owner of each member. Parameters in `owned` already have owners, and count in the loads.

    All ranks get the same result, because it depends on the shapes and on the cuts between shards only.
    """
    owned, ranks = list(owned), len(members[0].ranges)
    loads = Loads([*owned, *members], ranks)
    for each in owned:
        loads.add(each, each.owner)
    free = []
    for each in members:
        if len(each.holders) == 1:
            each.owner = each.holders[0]
            loads.add(each, each.owner)
        else:
            free.append(each)
    for each in sorted(free, key=lambda member: (-member.work, -member.numel)):
        each.owner = _best(each, loads, ranks)
        loads.add(each, each.owner)
    _improve(free, loads, ranks)


def _best(member: Owned, loads: Loads, ranks: int) -> int:
    """Return the rank whose load is the lowest with the member."""
    best = min(member.holders or range(ranks), key=lambda rank: loads.of(rank, [member]))
    if loads.of(best, [member]) <= TOLERANCE:
        return best
    other = min(range(ranks), key=lambda rank: loads.of(rank, [member]))
    return other if loads.of(other, [member]) < loads.of(best, [member]) else best


def _improve(free: Sequence[Owned], loads: Loads, ranks: int) -> None:
    """Lower the highest load by moves and, above the tolerance, by exchanges, as long as this is possible."""
    for _ in range(4 * len(free)):
        highest = max(range(ranks), key=loads.of)
        within = loads.of(highest) <= TOLERANCE
        mine = [each for each in free if each.owner == highest]
        moves = [
            (loads.of(rank, [each]), each.place, each, rank, None)
            for each in mine
            for rank in (each.holders if within else range(ranks))
            if rank != highest
        ]
        exchanges = [
            (
                max(loads.of(highest, [other], [each]), loads.of(other.owner, [each], [other])),
                each.place,
                each,
                other.owner,
                other,
            )
            for other in (() if within else free)
            if other.owner != highest
            for each in mine
            if other.work < each.work
        ]
        best = min([*moves, *exchanges], key=itemgetter(0, 1), default=None)
        if best is None or best[0] >= loads.of(highest):
            return
        _, _, given, rank, taken = best
        loads.move(given, rank)
        if taken is not None:
            loads.move(taken, highest)


def describe(members: Sequence[Owned]) -> list[str]:
    """Return a line for ranks that own equally much: what each owns, and its shares of the work and of the elements."""
    ranks = len(members[0].ranges)
    loads = Loads(members, ranks)
    for each in members:
        loads.add(each, each.owner)
    alike: dict[tuple[int, int, str, str], list[tuple[int, int]]] = {}
    for rank in range(ranks):
        own = [each for each in members if each.owner == rank]
        moved = sum(each.numel - (each.ranges[rank][1] - each.ranges[rank][0]) for each in own)
        work, elements = loads.shares(rank)
        key = len(own), sum(each.numel for each in own), f"{elements:.1%}", f"{work:.1%}"
        alike.setdefault(key, []).append((rank, moved))
    return [
        f"{_ranks([rank for rank, _ in who])}: {count} parameters, {numel:,} elements ({elements}; "
        f"{'at most ' * (len(who) > 1)}{max(moved for _, moved in who):,} of them from other ranks), {work} of the work"
        for (count, numel, elements, work), who in alike.items()
    ]


def _ranks(numbers: Sequence[int]) -> str:
    """Return ascending ranks as text: `ranks 0-3, 7, each`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return f"ranks {', '.join(f'{run[0]}-{run[-1]}' if len(run) > 1 else f'{run[0]}' for run in runs)}, each"
