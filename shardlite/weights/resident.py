"""Unsharded parameters (stages 0 to 2): full weights have permanent memory, and are gathered again after each step.

    FULL, used -> IDLE -> [step] -> SHARDED, placeholders -> [gather] -> FULL

After a step each rank has new weights in its own shard only. The next pass starts with the gathers of all units, in the
order of registration, and each unit waits for its own gather. So gathers overlap the computation, and all ranks gather
the same units even if their forwards take different branches. At stage 0 every rank steps all weights, so nothing is
gathered. But weights are cast if the master weights have a different dtype.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from shardlite.comm import Context
from shardlite.errors import PhaseError
from shardlite.params import Unit, Weights
from shardlite.weights.all_gather import GatherQueue, isolated, take_over_all
from shardlite.weights.replicated import ReplicatedWeights
from shardlite.weights.unshard import Gatherer


class NoPasses:
    """Passes of ranks that gather the same units without an agreement."""

    def end_pass(self) -> None:
        """Do nothing, because no rank needs further gathers."""

    def inside_pass(self, kind: str) -> AbstractContextManager[None]:
        """Return a context that does nothing, because gathers need no pass."""
        return nullcontext()

    def confirm_ends(self) -> None:
        """Do nothing, because the end of a pass needs no other rank."""

    def in_step(self) -> bool:
        """Return `True`, because all ranks gather the same units."""
        return True


class ResidentWeights:
    """Keeps the full weights of one wrapped model in memory."""

    passes = NoPasses()

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        self._units = [unit for unit in units if unit.needs_gather and not unit.replicated]
        self._replicated = ReplicatedWeights(units)
        self._queue = GatherQueue(context)
        self._emit = context.trace.emit
        self._streams = context.streams
        self._writes: dict[Unit, int] = {}  # `Unit.writes()` of each copied unit at the end of its latest use

    def unshard(self, unit: Unit) -> None:
        """Make the unit's full weights readable until `reshard`. Calls may nest."""
        if unit.needs_gather and unit.users == 0:
            self._take_over(unit)
            with isolated(self._streams):
                if self._is_due(unit):
                    self._queue.gather(unit)
                if unit.phase is Weights.GATHERING:
                    self._land(unit)
        elif unit.needs_gather and not unit.is_fresh:
            raise PhaseError(
                f"unit {unit.name!r}: shards were changed while the full weights were in use (for example by a step "
                "inside `gathered()`), so the full weights mix old and new values. Step outside of `gathered()`"
            )
        unit.use()

    def reshard(self, unit: Unit) -> None:
        """End one use of a unit."""
        if unit.end_use() and unit.needs_gather:
            self._emit(("reshard", unit.name))
            self._rest(unit)

    def begin_forward(self, kind: str) -> None:
        """Start the gathers of all stale units."""
        del kind
        self._replicated.refresh()
        for unit in self._units:
            if unit.users == 0 and self._is_due(unit):
                self._queue.gather(unit)

    def settle(self) -> None:
        """Finish all gathers, including those of unused units, because other ranks may wait for this rank's part."""
        for unit in self._units:
            if unit.phase is Weights.GATHERING:
                self._land(unit)
                self._rest(unit)
            self._take_over(unit)
        self._replicated.refresh()

    def expire(self) -> None:
        """If shards have changed, make parameters placeholders, so that no code reads a mix of old and new values."""
        for unit in self._units:
            if unit.phase is Weights.IDLE and not unit.is_fresh:
                with isolated():
                    unit.expire()
        self._replicated.refresh()

    def forget(self, units: Sequence[Unit]) -> None:
        """Require a gather of each unit at its next use, because its full weights may have been written to."""
        for unit in units:
            unit.invalidate()
        self.expire()

    def abandon_capture(self) -> None:
        """Forget what a capture that has failed would have gathered."""
        self._queue.abandon_capture()
        for unit in self._units:
            unit.abandon_capture()

    # ---- methods that only a `Gatherer` needs: here every rank gathers every unit, and full weights stay -------------

    def begin_backward(self, *, final: bool) -> None:
        """Do nothing, because the full weights of the forward are still valid."""

    def after_backward(self, *, final: bool) -> None:
        """Do nothing, because full weights stay until the step."""

    def stop_prefetching(self) -> None:
        """Do nothing, because no unit is gathered ahead."""

    def prepare_capture(self) -> None:
        """Do nothing, because full weights have permanent memory."""

    def spare(self) -> Iterable[Tensor]:
        """Return an empty tuple, because no memory is kept for later gathers."""
        return ()

    def _is_due(self, unit: Unit) -> bool:
        """Return whether a unit must be gathered. If so, prepare the unit for the gather."""
        if unit.is_fresh:
            return False
        if unit.phase is Weights.GATHERING:  # the weights have changed again since that gather started
            self._land(unit)
            self._rest(unit)
        if unit.phase is Weights.IDLE:
            with isolated():
                unit.expire()
        return True

    def _land(self, unit: Unit) -> None:
        self._queue.wait(unit)
        with isolated():
            unit.bind()

    def _rest(self, unit: Unit) -> None:
        unit.rest()
        if unit.copied:
            self._writes[unit] = unit.writes()

    def _take_over(self, unit: Unit) -> None:
        """Copy changed elements to the shards, if the program has written to full weights since their last use."""
        if unit.copied and unit.phase is Weights.IDLE and unit.writes() != self._writes.get(unit):
            take_over_all(unit)
            self._writes[unit] = unit.writes()


Gathering = Gatherer | ResidentWeights
"""The type of the object that provides full weights while modules use them."""
