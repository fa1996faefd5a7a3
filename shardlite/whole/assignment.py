"""The owner of each parameter, chosen once, so that ranks have equal work and equal memory.

A parameter that one rank keeps whole is owned by this rank, so nothing of it is sent. The other parameters are given
away one by one, from the most work to the least. A parameter goes to the rank with the least load among the ranks that
keep a part of it, and to another rank only if these have too much. Afterwards the highest load is lowered step by step.

Legend: `W` ranks. A load is a share of the work and a share of the elements of all parameters.
"""

from collections.abc import Iterable, Sequence
from operator import itemgetter

from shardlite.whole.members import Member

TOLERANCE = 1.1
"""A rank that keeps no part of a parameter may own it if the load of each other rank would exceed the mean so much."""


class Loads:
    """The loads of all ranks."""

    def __init__(self, members: Sequence[Member], ranks: int) -> None:
        self._total = (sum(each.work for each in members) or 1, sum(each.numel for each in members) or 1)
        self._sums = [[0, 0] for _ in range(ranks)]

    def add(self, member: Member, rank: int, sign: int = 1) -> None:
        """Add a member to the load of a rank."""
        self._sums[rank][0] += sign * member.work
        self._sums[rank][1] += sign * member.numel

    def move(self, member: Member, rank: int) -> None:
        """Make another rank the owner of a member."""
        self.add(member, member.owner, -1)
        member.owner = rank
        self.add(member, rank)

    def of(self, rank: int, more: Sequence[Member] = (), less: Sequence[Member] = ()) -> float:
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


def assign(members: Sequence[Member], owned: Iterable[Member] = ()) -> None:
    """Set the owner of each member. Members in `owned` have owners already, which count in the loads.

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


def _best(member: Member, loads: Loads, ranks: int) -> int:
    """Return the rank whose load is the lowest with the member."""
    best = min(member.holders or range(ranks), key=lambda rank: loads.of(rank, [member]))
    if loads.of(best, [member]) <= TOLERANCE:
        return best
    other = min(range(ranks), key=lambda rank: loads.of(rank, [member]))
    return other if loads.of(other, [member]) < loads.of(best, [member]) else best


def _improve(free: Sequence[Member], loads: Loads, ranks: int) -> None:
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


def describe(members: Sequence[Member]) -> list[str]:
    """Return a line for each rank: what it owns, and its shares of the work and of the elements."""
    ranks = len(members[0].ranges)
    loads = Loads(members, ranks)
    for each in members:
        loads.add(each, each.owner)
    lines = []
    for rank in range(ranks):
        own = [each for each in members if each.owner == rank]
        moved = sum(each.numel - (each.ranges[rank][1] - each.ranges[rank][0]) for each in own)
        work, elements = loads.shares(rank)
        lines.append(
            f"rank {rank}: {len(own)} parameters, {sum(each.numel for each in own):,} elements ({elements:.1%}; "
            f"{moved:,} of them from other ranks), {work:.1%} of the work"
        )
    return lines
