"""Unsharded parameters (stages 0 to 2): full weights have permanent memory and are gathered again after a step.

    FULL, used -> IDLE -> [step] -> SHARDED, placeholders -> [gather] -> FULL

After a step each rank has new weights in its own shard only. The next pass starts all gathers at once, in the order of
registration, whatever it is going to use, and each unit waits for its own. So they overlap the computation, and
ranks whose forwards take different branches still gather the same units. At stage 0, where every rank steps everything,
nothing is gathered; weights are cast if the master weights have another dtype.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shardlite.comm import Context
from shardlite.errors import PhaseError
from shardlite.params import Unit, Weights
from shardlite.weights.all_gather import GatherQueue, isolated, take_over_all
from shardlite.weights.unshard import Gatherer


class ResidentWeights:
    """Keeps the full weights of one wrapped model in memory."""

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        self._units = [unit for unit in units if unit.needs_gather]
        self._queue = GatherQueue(context)
        self._trace = context.trace
        self._streams = context.streams
        self._writes: dict[Unit, int] = {}  # into copies of shards, counted when their last use ended

    def unshard(self, unit: Unit) -> None:
        """Make the unit's full weights readable until `reshard`. Calls nest."""
        if unit.needs_gather and unit.users == 0:
            # Inside a `torch.func` transform the new views would be of its kind, and outlive it.
            self._take_over(unit)
            with isolated(self._streams), torch._C._DisableFuncTorch():
                if self._is_due(unit):
                    self._queue.gather(unit)
                if unit.phase is Weights.GATHERING:
                    self._land(unit)
        elif unit.needs_gather and not unit.is_fresh:
            raise PhaseError(
                f"unit {unit.name!r}: its shards were changed while its full weights were in use (for example by a "
                "step inside `gathered()`), so these mix old and new values. Step outside"
            )
        unit.use()

    def reshard(self, unit: Unit) -> None:
        """End one use."""
        if unit.end_use() and unit.needs_gather:
            self._trace.emit("reshard", unit.name)
            self._rest(unit)

    def begin_forward(self, kind: str) -> None:
        """Start all gathers that are due: every pass needs all units."""
        del kind
        for unit in self._units:
            if unit.users == 0 and self._is_due(unit):
                self._queue.gather(unit)

    def settle(self) -> None:
        """Finish all gathers, also of units that no forward has used: other ranks may wait for this rank's part."""
        for unit in self._units:
            if unit.phase is Weights.GATHERING:
                self._land(unit)
                self._rest(unit)
            self._take_over(unit)

    def expire(self) -> None:
        """Make parameters whose shards have changed read as NaN until they are gathered, not as a mixture."""
        for unit in self._units:
            if unit.phase is Weights.IDLE and not unit.is_fresh:
                with isolated():
                    unit.expire()

    def forget(self, units: Sequence[Unit]) -> None:
        """Gather each unit again at its next use, because its full weights may have been written to."""
        for unit in units:
            unit.invalidate()
        self.expire()

    # ---- what only a `Gatherer` has to do: here every rank gathers every unit, and full weights stay -----------------

    def begin_backward(self, *, final: bool) -> None:
        """Gather nothing: the weights of the forward are still there."""

    def after_backward(self, *, final: bool) -> None:
        """Keep the weights until the step."""

    def stop_prefetching(self) -> None:
        """Gather nothing ahead, as always."""

    def end_pass(self) -> None:
        """Wait for nothing: no other rank may need more gathers."""

    def inside_pass(self, kind: str) -> AbstractContextManager[None]:
        """Unshard without a pass."""
        return nullcontext()

    def confirm_ends(self) -> None:
        """Confirm nothing: no pass has an end."""

    def in_step(self) -> bool:
        """Return `True`: all ranks gather the same units."""
        return True

    def spare(self) -> Iterable[Tensor]:
        """Return no memory."""
        return ()

    def _is_due(self, unit: Unit) -> bool:
        """Return whether a unit must be gathered, and prepare it."""
        if unit.is_fresh:
            return False
        if unit.phase is Weights.GATHERING:  # the weights were changed once more
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
        """Take over into shards what every rank has written into its copies since the last use."""
        if unit.copied and unit.phase is Weights.IDLE and unit.writes() != self._writes.get(unit):
            take_over_all(unit)
            self._writes[unit] = unit.writes()


Gathering = Gatherer | ResidentWeights
"""Provides full weights while they are used."""
