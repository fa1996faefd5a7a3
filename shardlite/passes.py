"""Passes (stage 3): which unit is gathered when, so that all ranks gather the same, whatever each of them needs.

Ranks whose forwards take other branches need other units. What is on the agenda of a pass all ranks gather in its
order; a rank that needs something else goes down the agenda first, then talks. One that has come to the end of its pass
serves the others from its lane until all are there, while its own computation goes on.

A gather that a rank only takes part in goes to memory of its own, which is freed at once: it costs the bytes of the
unit on the wire, and for its duration in memory. `traffic()` counts it under `take part`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shardlite.agenda import Agenda
from shardlite.errors import CommError
from shardlite.fill import Filler
from shardlite.lane import Flight
from shardlite.shared import Shared
from shardlite.talks import END, Talks
from shardlite.unit import Unit


class Passes:
    """The passes of one wrapped model, one at a time, over the units of all ranks that share it."""

    def __init__(self, units: Sequence[Unit], shared: Shared) -> None:
        self._units = units
        self._alone = shared.transport.world_size == 1
        self._filler = Filler(shared)
        self._agenda = Agenda()
        self._talks = Talks(shared, [unit.name for unit in units])
        self._kind = ""
        self._beyond = False
        self._open = False
        self._failed = False
        self._prefer: Callable[[Sequence[int]], int] = min
        self._ending: Flight | None = None
        self._revise: Callable[[], None] = _nothing

    def begin(self, kind: str, *, backwards: bool = False) -> None:
        """Start a pass. Those of one kind are expected to need the same units; a kind is a name.

        Where ranks need different ones, those registered first come first or, `backwards`, last.

        Raises:
            CommError: the pass before could not be ended: a peer failed, is late, or does something else.
        """
        self.end()  # of one that an interrupt left
        self.settle()
        self._kind, self._beyond, self._open = kind, False, True
        self._filler.during = kind
        self._prefer = max if backwards else min
        self._agenda.begin(kind)

    @contextmanager
    def inside(self, kind: str) -> Iterator[None]:
        """Gather within the pass in progress or, if there is none, in one of its own."""
        if self._open:
            yield
            return
        self.begin(kind)
        try:
            yield
        finally:
            self.end()

    def comes_next(self, unit: Unit) -> bool:
        """Whether all ranks gather `unit` next, so that it may be gathered before it is needed."""
        return self._alone or self._agenda.coming() == unit.index

    def gather(self, unit: Unit) -> None:
        """Start gathering `unit` into its memory, when all ranks do."""
        if not self._open:
            self.begin("what follows an inner pass")
        fill = self._filler.filling(unit)
        if self._alone:
            unit.flight = self._filler.submit(fill)
            return
        before = self._agenda.turn(unit.index)
        if before is not None:
            unit.flight = self._filler.submit(self._after(before, fill))
            return
        self._beyond = True
        self._agenda.add(unit.index)
        unit.flight = self._filler.submit(self._after(self._agenda.rest(), lambda: self._talk(unit, fill)))

    def wait(self, unit: Unit) -> None:
        """Wait for the weights.

        Raises:
            CommError: a peer failed, is late, or does something else.
        """
        with self._noting_failure():
            self._filler.finish(unit)

    def need(self, unit: Unit) -> None:
        """Note that this pass uses the unit."""
        self._agenda.need(unit.index)

    def end(self) -> None:
        """Take part in what is left of the pass, and in what others need beyond it. The host does not wait."""
        if not self._open:
            return
        self._open = False
        self._revise = _nothing
        if not (self._alone or self._failed):
            due, needed, wanted = self._agenda.is_due(), self._agenda.needed(), list(self._agenda.wanted)
            ending = self._after(self._agenda.rest(), lambda: self._serve(due, needed, wanted))
            self._ending = self._filler.submit(ending)

    def settle(self) -> None:
        """Wait until the last pass is over for every rank: weights must not change before.

        Raises:
            CommError: it could not be ended.
        """
        if self._ending is not None:
            with self._noting_failure():
                self._ending.wait()
            self._ending = None  # after an interrupt it is waited for again: all ranks revise the agenda
            self._revise()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """After a failure nobody is served: the ranks are no longer in step."""
        try:
            yield
        except CommError:
            self._failed = True
            raise

    # ---- on the lane --------------------------------------------------------------------------------------------

    def _after(self, before: Sequence[int], then: Callable[[], None]) -> Callable[[], None]:
        def go_down() -> None:
            for index in before:
                self._filler.take_part(self._units[index])
            then()

        return go_down

    def _talk(self, unit: Unit, fill: Callable[[], None]) -> None:
        """Gather what all ranks agree on, until that is `unit`."""
        while (choice := self._talks.agree(unit.index, self._kind, 0, self._prefer).choice) != unit.index:
            self._filler.take_part(self._units[choice])
        fill()

    def _serve(self, due: bool, flags: Sequence[int], wanted: Sequence[int]) -> None:
        """Take part in what others need, until all ranks are at the end; then look through the agenda with them."""
        beyond = self._beyond
        while (round_ := self._talks.agree(END, self._kind, len(wanted), self._prefer)).choice != END:
            beyond = True
            self._filler.take_part(self._units[round_.choice])
        if beyond:
            ranks = self._talks.lists(wanted, round_.needed)
            self._revise = lambda: self._agenda.extend(ranks)
        elif due:
            ranks = self._talks.lists(flags, [len(flags)] * len(round_.needed))
            self._revise = lambda: self._agenda.shorten(ranks)


def _nothing() -> None:
    pass
