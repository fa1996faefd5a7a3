"""The owner of each parameter, chosen once, so that ranks have equal work and equal memory.

A parameter that one rank keeps whole is owned by this rank, so nothing of it is sent. The other parameters are given
away one by one, from the most work to the least. A parameter goes to the rank with the least load among the ranks that
keep a part of it, and to another rank only if these have too much. Moves from the rank with the highest load follow.

Legend: `W` ranks. A load is a share of the work and a share of the elements of all parameters.
"""

from collections.abc import Iterable, Sequence

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

    def of(self, rank: int, member: Member | None = None) -> float:
        """Return the load of a rank, with `member` added: the larger share, times the number of ranks."""
        added = (0, 0) if member is None else (member.work, member.numel)
        shares = ((own + more) / all_ for own, more, all_ in zip(self._sums[rank], added, self._total, strict=True))
        return max(shares) * len(self._sums)

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
    best = min(member.holders or range(ranks), key=lambda rank: loads.of(rank, member))
    if loads.of(best, member) <= TOLERANCE:
        return best
    other = min(range(ranks), key=lambda rank: loads.of(rank, member))
    return other if loads.of(other, member) < loads.of(best, member) else best


def _improve(free: Sequence[Member], loads: Loads, ranks: int) -> None:
    """Move members from the rank with the highest load, as long as this lowers the highest load."""
    for _ in range(4 * len(free)):
        highest = max(range(ranks), key=loads.of)
        moves = [
            (loads.of(rank, each), number, rank)
            for number, each in enumerate(free)
            if each.owner == highest
            for rank in (each.holders if loads.of(highest) <= TOLERANCE else range(ranks))
            if rank != highest
        ]
        if not moves or min(moves)[0] >= loads.of(highest):
            return
        _, number, rank = min(moves)
        loads.add(free[number], highest, -1)
        loads.add(free[number], rank)
        free[number].owner = rank


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
