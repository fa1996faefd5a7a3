"""The order in which all ranks gather units in a pass: recorded in one pass, replayed and merged in the next.

A gather takes all ranks, and not every rank needs every unit in every pass. So the ranks agree on a list. Each goes
down its own copy: to gather a unit it first takes part in the gathers that stand before it, and at the end of the pass
in those that are left. The list of a pass holds what ranks have needed in the last one of its kind, merged.

    order    blocks.0   blocks.1   blocks.2   head
    rank 0   needs      needs      needs      needs
    rank 1   needs      takes part takes part needs      (its forward skipped two blocks)

Integers and names only.
"""

from collections.abc import Sequence
from difflib import SequenceMatcher


class UseOrder:
    """The order in which this rank uses units, recorded per kind of pass (training forward, backward, evaluation, ...).

    Prefetching and eviction follow it. A pass that leaves the recorded order predicts nothing more. One such pass is
    forgotten; after a second one in a row its order is the recorded one.
    """

    def __init__(self) -> None:
        self._recorded: dict[str | None, list[int]] = {}
        self._strayed: set[str] = set()  # the kinds whose last pass was another one than recorded
        self._kind: str | None = None
        self._now: list[int] = []
        self._on_path = False
        self._final = False

    def begin(self, kind: str, *, final: bool = False) -> None:
        """Start a pass; what the pass needs is what the next of its kind will be expected to need.

        `final` says that the weights are going to change after it: it is the backward before a step.
        """
        self.end()
        self._kind, self._final = kind, final
        self._on_path = kind in self._recorded

    def end(self) -> None:
        """Finish the pass in progress, if there is one."""
        if self._kind is not None and self._now:
            strays = self._now != self._recorded.get(self._kind, self._now)
            if strays and self._kind not in self._strayed:
                self._strayed.add(self._kind)
            else:
                self._recorded[self._kind] = self._now
                self._strayed.discard(self._kind)
        self._kind, self._now, self._on_path = None, [], False

    def need(self, unit: int) -> None:
        """Note that the pass needs `unit` now."""
        if self._kind is None:
            return
        place = len(self._now)
        self._now.append(unit)
        if self._on_path:
            recorded = self._recorded[self._kind]
            self._on_path = place < len(recorded) and recorded[place] == unit

    def upcoming(self, count: int) -> list[int]:
        """Return the next `count` units that the pass is expected to need: none where it has left the path."""
        if not self._on_path:
            return []
        place = len(self._now)
        return self._recorded[self._kind][place : place + count]

    def rest(self) -> list[int]:
        """Return all units that the pass is expected to need yet."""
        return self.upcoming(len(self._recorded.get(self._kind, ())))

    def is_last_use(self, unit: int) -> bool:
        """Whether weights of `unit` that are here now will not be used again before they change."""
        return self._final and self._on_path and unit not in self.rest()


MEMORY = 8
"""Passes of one kind after which a gather that no rank has needed in any of them leaves the order."""


class GatherOrder:
    """One rank's copy of the order, and how far it is in it. Copies are equal: they change by what all ranks know."""

    def __init__(self) -> None:
        self.items: list[int] = []
        """The units that are gathered in this pass."""

        self._agreed: dict[str, list[int]] = {}
        self._passes: dict[str, int] = {}
        self._needed: dict[str, set[int]] = {}
        self._kind = ""
        self._place = 0
        self._came: dict[int, int | None] = {}
        self._wanted: list[int] = []

    def begin(self, kind: str) -> None:
        """Start a pass."""
        self._kind = kind
        self._place = 0
        self._came = {}
        self._wanted = []
        self.items = self._agreed.setdefault(kind, [])
        self._needed.setdefault(kind, set())

    def knows(self, kind: str) -> bool:
        """Return whether a pass of that kind has begun before."""
        return kind in self._agreed

    def coming(self) -> int | None:
        """Return the unit that is gathered next, if the order has one left."""
        return self.items[self._place] if self._place < len(self.items) else None

    def turn(self, unit: int) -> list[int] | None:
        """Advance past the gather of `unit` and return those before it. Return `None` if the order has none left."""
        if unit not in self.items[self._place :]:
            return None
        start, self._place = self._place, self.items.index(unit, self._place) + 1
        self._came[unit] = self._place - 1
        return list(self.items[start : self._place - 1])

    def rest(self) -> list[int]:
        """Advance to the end and return the gathers that are left."""
        start, self._place = self._place, len(self.items)
        return list(self.items[start:])

    def add(self, unit: int) -> None:
        """Note that `unit` is gathered in addition to the order."""
        self._came[unit] = None

    def need(self, unit: int) -> None:
        """Note that this rank uses what was gathered."""
        if unit in self._came:
            place = self._came.pop(unit)
            self._wanted.append(unit)
            if place is not None:
                self._needed[self._kind].add(place)

    @property
    def wanted(self) -> Sequence[int]:
        """The gathers of this pass that this rank needed, in its own order."""
        return self._wanted

    def needed(self) -> list[int]:
        """Return for each gather 1 if this rank has needed it since the last revision, else 0."""
        return [int(place in self._needed[self._kind]) for place in range(len(self.items))]

    def is_due(self) -> bool:
        """Count the pass that ends, and return whether gathers that no rank needs should be removed."""
        self._passes[self._kind] = self._passes.get(self._kind, 0) + 1
        return self._passes[self._kind] % MEMORY == 0

    def shorten(self, kind: str, ranks: Sequence[Sequence[int]]) -> None:
        """Remove what was not `needed()` on any rank."""
        needed = [any(flags) for flags in zip(*ranks, strict=True)]
        self._replace(kind, [unit for unit, wanted in zip(self._agreed[kind], needed, strict=True) if wanted])

    def extend(self, kind: str, ranks: Sequence[Sequence[int]]) -> None:
        """Add all that any rank `wanted`, after a pass that needed more than the order had.

        If that would more than double the order, replace it: the program does something else now.
        """
        wanted: Sequence[int] = []
        for theirs in ranks:
            wanted = merged(wanted, theirs)
        both = merged(self._agreed[kind], wanted)
        self._replace(kind, list(both if len(both) <= 2 * len(wanted) else wanted))

    def _replace(self, kind: str, items: list[int]) -> None:
        self._agreed[kind] = items
        self._needed[kind] = set()
        if kind == self._kind:
            self.items = items


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
