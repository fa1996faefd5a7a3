"""Passes (stage 3): which unit is gathered when, so that all ranks gather the same, whatever each of them needs.

Ranks whose forwards take other branches need other units. What is on the agenda of a pass all ranks gather in its
order; a rank that needs something else goes down the agenda first, then talks. One that has come to the end of its pass
serves the others from its lane until all are there, while its own computation goes on.

A gather that a rank only takes part in goes to memory of its own, which is freed at once: it costs the bytes of the
unit on the wire, and for its duration in memory. `traffic()` counts it under `take part`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from shardlite.comm import Flight, Shared
from shardlite.errors import CommError
from shardlite.params import Unit
from shardlite.weights.agenda import Agenda
from shardlite.weights.all_gather import Filler
from shardlite.weights.negotiation import END, Talks


@dataclass
class _Pass:
    """One pass, as the lane sees it, which may still be busy with its end when the next one begins."""

    kind: str
    prefer: Callable[[Sequence[int]], int]
    """Chooses among the units that ranks want."""

    beyond: bool = False
    """Whether any rank has needed more than what was on the agenda."""

    ending: Flight | None = None
    revise: Callable[[], None] = lambda: None
    """Changes the agenda by what all ranks have told each other at the end."""


class Passes:
    """The passes of one wrapped model, one at a time, over the units of all ranks that share it."""

    def __init__(self, units: Sequence[Unit], shared: Shared) -> None:
        self._units = units
        self._alone = shared.transport.world_size == 1
        self._owner = shared.owner
        self._progress = shared.progress
        self._filler = Filler(shared)
        self._agenda = Agenda()
        self._talks = Talks(shared, [unit.name for unit in units])
        self._now: _Pass | None = None
        self._ended: list[_Pass] = []
        self._failed = False

    def begin(self, kind: str, *, backwards: bool = False) -> None:
        """Start a pass. Those of one kind are expected to need the same units.

        Where ranks need different ones, those registered first come first or, `backwards`, last.

        Raises:
            CommError: the last pass of the kind could not be ended: a peer failed, is late, or does something else.
        """
        self.end()  # of one that an interrupt left
        if any(each.kind == kind for each in self._ended):
            self.settle()
        self._now = _Pass(kind, max if backwards else min)
        self._agenda.begin(kind)

    @contextmanager
    def inside(self, kind: str) -> Iterator[None]:
        """Gather within the pass in progress or, if there is none, in one of its own."""
        if self._now is not None:
            yield
            return
        self.begin(kind)
        try:
            yield
        finally:
            self.end()

    def comes_next(self, unit: Unit) -> bool:
        """Whether all ranks gather `unit` next, so that it may be gathered before it is needed."""
        return self._alone or (self._now is not None and self._agenda.coming() == unit.index)

    def gather(self, unit: Unit) -> None:
        """Start gathering `unit` into its memory, when all ranks do."""
        if self._now is None:
            self.begin("what follows an inner pass")
            assert self._now is not None
        now, fill = self._now, self._filler.filling(unit)
        if self._alone:
            unit.flight = self._filler.submit(fill)
            return
        before = self._agenda.turn(unit.index)
        if before != []:
            self._progress.tell()
        if before is not None:
            unit.flight = self._submit(now, before, fill)
            return
        now.beyond = True
        self._agenda.add(unit.index)
        unit.flight = self._submit(now, self._agenda.rest(), partial(self._talk, now, unit, fill))

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
        """Take part in what is left of the pass, and in what others need beyond it. The host does not wait.

        A forked child takes no part: its pass has used weights that it has, or has failed.
        """
        now, self._now = self._now, None
        if now is None or self._alone or self._failed or not self._owner.is_here:
            return
        self._progress.tell_of_the_end()
        flags = self._agenda.needed() if self._agenda.is_due() else None
        serve = partial(self._serve, now, flags, list(self._agenda.wanted))
        now.ending = self._submit(now, self._agenda.rest(), serve)
        self._ended.append(now)

    def settle(self) -> None:
        """Wait until all passes are over for every rank: weights must not change before.

        Raises:
            CommError: one could not be ended.
        """
        while self._ended:
            first = self._ended[0]
            assert first.ending is not None
            with self._noting_failure():
                first.ending.wait()
            del self._ended[0]  # after an interrupt it is waited for again: all ranks revise their agendas
            first.revise()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """After a failure nobody is served: the ranks are no longer in step."""
        try:
            yield
        except CommError:
            self._failed = True
            self._ended.clear()
            raise

    # ---- on the lane --------------------------------------------------------------------------------------------

    def _submit(self, now: _Pass, before: Sequence[int], last: Callable[[], None]) -> Flight:
        """Have the lane take part in the gathers of some units, and do something after them."""

        def go_down() -> None:
            self._filler.during = now.kind
            for index in before:
                self._filler.take_part(self._units[index])
            last()

        return self._filler.submit(go_down)

    def _talk(self, now: _Pass, unit: Unit, fill: Callable[[], None]) -> None:
        """Gather what all ranks agree on, until that is `unit`."""
        while (choice := self._talks.agree(unit.index, now.kind, 0, now.prefer).choice) != unit.index:
            self._filler.take_part(self._units[choice])
        fill()

    def _serve(self, now: _Pass, flags: Sequence[int] | None, wanted: Sequence[int]) -> None:
        """Take part in what others need, until all ranks are at the end; then look through the agenda with them."""
        while (round_ := self._talks.agree(END, now.kind, len(wanted), now.prefer)).choice != END:
            now.beyond = True
            self._filler.take_part(self._units[round_.choice])
        if now.beyond:
            now.revise = partial(self._agenda.extend, now.kind, self._talks.lists(wanted, round_.needed))
        elif flags is not None:
            ranks = self._talks.lists(flags, [len(flags)] * len(round_.needed))
            now.revise = partial(self._agenda.shorten, now.kind, ranks)
