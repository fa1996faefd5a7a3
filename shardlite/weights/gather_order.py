"""The gather order: the order in which all ranks gather units in a pass. It is recorded in one pass and then replayed.

A pass is, for example, a forward or a backward of the model. A gather needs all ranks, but not every rank uses every
unit in every pass. So the ranks agree on a list of gathers, and each rank goes through its own copy of the list. Before
a rank gathers a unit, it takes part in the earlier gathers of the list. At the end of the pass, the rank takes part in
the remaining gathers. If ranks needed further gathers, these gathers are merged into the list for the next pass of the
same kind.

    order    blocks.0   blocks.1   blocks.2   head
    rank 0   needs      needs      needs      needs
    rank 1   needs      takes part takes part needs      (its forward skipped two blocks)

A rank also records its path: the sequence of units that it uses, including units that are already gathered. The path
decides which units are gathered ahead and which are evicted.

This file handles only integers and names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

MEMORY = 8
"""A gather is removed from the order if no rank has needed the gather in this number of passes of one kind."""


@dataclass
class _Kind:
    """Records of passes of one kind (training forward, backward, evaluation, ...)."""

    gathers: list[int] = field(default_factory=list)
    """Units that all ranks gather, in order. Equal on all ranks, because every change uses data of all ranks."""

    needed: set[int] = field(default_factory=set)
    """Places in `gathers` that this rank has needed since the latest revision of `gathers`."""

    passes: int = 0
    path: list[int] | None = None
    """Units that this rank is expected to use, in order."""

    left_path: bool = False
    """Whether the latest pass of this kind deviated from `path`."""


class GatherOrder:
    """One rank's copy of the gather order, its current place in the order, and its path."""

    def __init__(self) -> None:
        self.uses: list[int] = []
        """Units that this rank has used in this pass."""

        self.wanted: list[int] = []
        """The units in `uses` that were gathered in this pass."""

        self._kinds: dict[str, _Kind] = {}
        self._now = _Kind()
        self._place = 0  # the place of the next gather in the order
        self._unused: dict[int, int | None] = {}  # units gathered but not yet used in this pass, with their places
        self._records = False  # whether this pass is expected to repeat the previous pass of its kind
        self._on_path = False
        self._final = False

    def begin_pass(self, kind: str, *, final: bool = False, repeats: bool = True) -> None:
        """Start a pass.

        Args:
            kind: name of the kind. Passes of one kind are expected to use the same units.
            final: whether the weights change after the pass, because it is the backward before a step.
            repeats: whether this rank is expected to use the same units as in the previous pass of this kind.
        """
        self.end_path()
        self._now = now = self._kinds.setdefault(kind, _Kind())
        self._place, self._unused = 0, {}
        self.uses, self.wanted = [], []
        self._records, self._final = repeats, final
        self._on_path = repeats and now.path is not None

    def use(self, unit: int, ahead: int = 0) -> list[int]:
        """Record that this rank begins to use a unit. Return the next units in the path, at most `ahead`."""
        now, used = self._now, len(self.uses)
        self.uses.append(unit)
        if unit in self._unused:
            place = self._unused.pop(unit)
            self.wanted.append(unit)
            if place is not None:
                now.needed.add(place)
        if not self._on_path or now.path is None:
            return []
        self._on_path = now.path[used : used + 1] == [unit]
        return now.path[used + 1 : used + 1 + ahead] if self._on_path else []

    # ---- the gathers of all ranks -----------------------------------------------------------------------------------

    def knows(self, kind: str) -> bool:
        """Return whether a pass of this kind has begun before."""
        return kind in self._kinds

    def next_gather(self) -> int | None:
        """Return the next unit in the order, or `None` at the end of the order."""
        gathers = self._now.gathers
        return gathers[self._place] if self._place < len(gathers) else None

    def turn(self, unit: int) -> list[int] | None:
        """Advance past the next gather of `unit` in the order. Return the gathers before that gather.

        Return `None` if the rest of the order has no gather of `unit`.
        """
        gathers, start = self._now.gathers, self._place
        if gathers[start : start + 1] == [unit]:  # in most cases
            self._place, self._unused[unit] = start + 1, start
            return []
        if unit not in gathers[start:]:
            return None
        place = gathers.index(unit, start)
        self._place, self._unused[unit] = place + 1, place
        return gathers[start:place]

    def rest(self) -> list[int]:
        """Advance to the end of the order. Return the remaining gathers."""
        start, self._place = self._place, len(self._now.gathers)
        return self._now.gathers[start:]

    def append(self, unit: int) -> None:
        """Record that `unit` is gathered in addition to the order."""
        self._unused[unit] = None

    def needed(self) -> list[int]:
        """For each gather of the order, return 1 if this rank has needed it since the latest revision, else 0."""
        return [int(place in self._now.needed) for place in range(len(self._now.gathers))]

    def is_due(self) -> bool:
        """Count the ending pass. Return whether to remove gathers that no rank has needed."""
        self._now.passes += 1
        return self._now.passes % MEMORY == 0

    def shorten(self, kind: str, ranks: Sequence[Sequence[int]]) -> None:
        """Remove gathers that no rank has needed. `ranks` has the result of `needed()` of every rank."""
        needed = [any(flags) for flags in zip(*ranks, strict=True)]
        gathers = self._kinds[kind].gathers
        self._replace(kind, [unit for unit, keep in zip(gathers, needed, strict=True) if keep])

    def extend(self, kind: str, ranks: Sequence[Sequence[int]]) -> None:
        """Merge the lists `wanted` of all ranks into the order, after a pass that needed further gathers.

        If less than half of the merged order was wanted, replace the order, because the program has changed.
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
        """End the path of this pass.

        If one pass deviates from the expected path, the path is kept. If the next pass of this kind deviates too,
        the path of that second pass becomes the expected path.
        """
        now = self._now
        if self._records and self.uses:
            leaves = now.path is not None and self.uses != now.path
            if leaves and not now.left_path:
                now.left_path = True
            else:
                now.path, now.left_path = self.uses, False
        self._records = self._on_path = False

    def upcoming(self, count: int) -> list[int]:
        """Return the next `count` units that this rank is expected to use, or `[]` after a deviation."""
        if not self._on_path or self._now.path is None:
            return []
        place = len(self.uses)
        return self._now.path[place : place + count]

    def left(self) -> list[int] | None:
        """Return all units that this rank is expected to use before a step, or `None` if no step follows this pass."""
        path = self._now.path if self._final and self._on_path else None
        return None if path is None else path[len(self.uses) :]


def merged(first: Sequence[int], second: Sequence[int]) -> Sequence[int]:
    """Return a sequence that has both sequences as subsequences. Elements that match appear only once in it."""
    if first == second:
        return first
    out: list[int] = []
    for tag, i, i_end, j, j_end in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        out += first[i:i_end]
        if tag != "equal":
            out += second[j:j_end]
    return out
