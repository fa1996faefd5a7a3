"""The order in which all ranks gather units in a pass: recorded in one pass, replayed and merged in the next.

A gather needs all ranks, and not every rank uses every unit in every pass. So the ranks agree on a list of gathers.
Each rank goes through its own copy: before it gathers a unit, it takes part in the gathers that come before, and at the
end of the pass in those that are left. The list of a pass merges what ranks have needed in the last one of its kind.

    order    blocks.0   blocks.1   blocks.2   head
    rank 0   needs      needs      needs      needs
    rank 1   needs      takes part takes part needs      (its forward skipped two blocks)

Beside the gathers a rank records its own path: the units that it uses, including those that are gathered already. It
decides by its path what to gather ahead and what to evict.

Integers and names only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

MEMORY = 8
"""Number of passes of one kind after which a gather that no rank has needed in any of them leaves the order."""


@dataclass
class _Kind:
    """What is known of passes of one kind (training forward, backward, evaluation, ...)."""

    gathers: list[int] = field(default_factory=list)
    """Units that all ranks gather. Copies on all ranks are equal, because they change by what all ranks know."""

    needed: set[int] = field(default_factory=set)
    """Places in `gathers` that this rank has needed since the last revision."""

    passes: int = 0
    path: list[int] | None = None
    """Units that this rank is expected to use."""

    left_path: bool = False
    """Whether the last pass used other units than `path`."""


class GatherOrder:
    """One rank's copy of the order, how far it is in it, and its own path through it."""

    def __init__(self) -> None:
        self.uses: list[int] = []
        """Units that this rank has used in this pass."""

        self.wanted: list[int] = []
        """Those of `uses` for which this pass has made a gather."""

        self._kinds: dict[str, _Kind] = {}
        self._now = _Kind()
        self._place = 0  # of the next gather
        self._unused: dict[int, int | None] = {}  # units that were gathered, by place, and not used yet
        self._records = False  # whether this pass is expected to be like the last one of its kind
        self._on_path = False
        self._final = False

    def begin_pass(self, kind: str, *, final: bool = False, repeats: bool = True) -> None:
        """Start a pass.

        Args:
            kind: passes of one kind are expected to use the same units.
            final: whether the weights change after it, because it is the backward before a step.
            repeats: whether anything is expected of the pass. If not, it has no path.
        """
        self.end_path()
        self._now = now = self._kinds.setdefault(kind, _Kind())
        self._place, self._unused = 0, {}
        self.uses, self.wanted = [], []
        self._records, self._final = repeats, final
        self._on_path = repeats and now.path is not None

    def use(self, unit: int) -> None:
        """Record that this rank uses a unit from now on."""
        if self._on_path:
            self._on_path = self.upcoming(1) == [unit]
        self.uses.append(unit)
        if unit in self._unused:
            place = self._unused.pop(unit)
            self.wanted.append(unit)
            if place is not None:
                self._now.needed.add(place)

    # ---- the gathers of all ranks -----------------------------------------------------------------------------------

    def knows(self, kind: str) -> bool:
        """Return whether a pass of that kind has begun before."""
        return kind in self._kinds

    def next_gather(self) -> int | None:
        """Return the unit that is gathered next, if the order has one left."""
        gathers = self._now.gathers
        return gathers[self._place] if self._place < len(gathers) else None

    def turn(self, unit: int) -> list[int] | None:
        """Advance past the gather of `unit` and return those before it. Return `None` if the order has none left."""
        gathers, start = self._now.gathers, self._place
        if unit not in gathers[start:]:
            return None
        place = gathers.index(unit, start)
        self._place, self._unused[unit] = place + 1, place
        return gathers[start:place]

    def rest(self) -> list[int]:
        """Advance to the end and return the gathers that are left."""
        start, self._place = self._place, len(self._now.gathers)
        return self._now.gathers[start:]

    def append(self, unit: int) -> None:
        """Record that `unit` is gathered in addition to the order."""
        self._unused[unit] = None

    def needed(self) -> list[int]:
        """Return for each gather 1 if this rank has needed it since the last revision, else 0."""
        return [int(place in self._now.needed) for place in range(len(self._now.gathers))]

    def is_due(self) -> bool:
        """Count the pass that ends, and return whether gathers that no rank needs should be removed."""
        self._now.passes += 1
        return self._now.passes % MEMORY == 0

    def shorten(self, kind: str, ranks: Sequence[Sequence[int]]) -> None:
        """Remove what was not `needed()` on any rank."""
        needed = [any(flags) for flags in zip(*ranks, strict=True)]
        gathers = self._kinds[kind].gathers
        self._replace(kind, [unit for unit, keep in zip(gathers, needed, strict=True) if keep])

    def extend(self, kind: str, ranks: Sequence[Sequence[int]]) -> None:
        """Add all that any rank `wanted`, after a pass that needed more than the order had.

        If that would more than double the order, replace it: the program does something else now.
        """
        wanted: Sequence[int] = []
        for theirs in ranks:
            wanted = merged(wanted, theirs)
        both = merged(self._kinds[kind].gathers, wanted)
        self._replace(kind, list(both if len(both) <= 2 * len(wanted) else wanted))

    def _replace(self, kind: str, gathers: list[int]) -> None:
        self._kinds[kind].gathers = gathers
        self._kinds[kind].needed = set()

    # ---- this rank's path -------------------------------------------------------------------------------------------

    def end_path(self) -> None:
        """Expect no more of the pass. One pass that left the path is ignored; after two in a row the path is theirs."""
        now = self._now
        if self._records and self.uses:
            leaves = now.path is not None and self.uses != now.path
            if leaves and not now.left_path:
                now.left_path = True
            else:
                now.path, now.left_path = self.uses, False
        self._records = self._on_path = False

    def upcoming(self, count: int) -> list[int]:
        """Return the next `count` units that this rank is expected to use: none after it has left the path."""
        if not self._on_path or self._now.path is None:
            return []
        place = len(self.uses)
        return self._now.path[place : place + count]

    def expected(self) -> list[int]:
        """Return all units that this rank is still expected to use."""
        return self.upcoming(len(self._now.path or ()))

    def is_last_use(self, unit: int) -> bool:
        """Return whether the current weights of `unit` will not be used again before they change."""
        return self._final and self._on_path and unit not in self.expected()


def merged(first: Sequence[int], second: Sequence[int]) -> Sequence[int]:
    """Return a sequence that has both as subsequences, with what they have in common only once."""
    if first == second:
        return first
    out: list[int] = []
    for tag, i, i_end, j, j_end in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        out += first[i:i_end]
        if tag != "equal":
            out += second[j:j_end]
    return out
