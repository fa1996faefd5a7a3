"""Unsharded parameters (stages 0 to 2): full weights have memory of their own, and are made anew after a step.

    FULL, used -> IDLE -> [step] -> SHARDED, placeholders -> [gather] -> FULL

After a step each rank has new weights in its own shard only. The next pass starts all gathers at once, in the order of
registration and whatever it is going to use, and each unit waits for its own: so they run beside the computation, and
ranks whose forwards take different branches still do the same. Where every rank steps everything (stage 0) nothing is
ever gathered, and nothing but a cast from the master weights, if they have another dtype, is ever due.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shardlite.comm import Context
from shardlite.errors import PhaseError
from shardlite.params import Unit, Weights
from shardlite.weights.all_gather import GatherQueue, is_fresh, isolated
from shardlite.weights.writeback import take_over_all


class ResidentWeights:
    """Keeps the full weights of one wrapped model in memory. The counterpart of `Gatherer`."""

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        self._units = [unit for unit in units if unit.needs_gather]
        self._queue = GatherQueue(context)
        self._trace = context.trace
        self._streams = context.streams
        self._left: dict[Unit, int] = {}  # how often copies of shards were written to when their last use ended

    def unshard(self, unit: Unit) -> None:
        """Make the unit's full weights readable until `reshard`. Calls nest."""
        if unit.needs_gather and unit.users == 0:
            # Inside a `torch.func` transform the new views would be of its kind, and outlive it.
            self._take_over(unit)
            with isolated(self._streams), torch._C._DisableFuncTorch():
                self._request(unit)
                self._land(unit)
        elif unit.needs_gather and not is_fresh(unit):
            raise PhaseError(
                f"unit {unit.name!r}: its shards were changed while its full weights were in use (a step inside "
                "`gathered()`, say), so these are a mixture of old and new ones. Step outside"
            )
        unit.users += 1

    def reshard(self, unit: Unit) -> None:
        """End one use."""
        unit.users -= 1
        if unit.needs_gather and unit.users == 0:
            self._trace.emit("reshard", unit.name)
            self._rest(unit)

    def begin_pass(self, kind: str) -> None:
        """Start all gathers that are due."""
        del kind  # all passes need all units
        for unit in self._units:
            if unit.users == 0:
                self._request(unit)

    def begin_backward(self, *, final: bool) -> None:
        """No-op. A backward uses the weights of its forward."""

    def stop_prefetching(self) -> None:
        """No-op. A backward gathers nothing."""

    def end_pass(self) -> None:
        """No-op. All gathers were started when the pass began."""

    def inside_pass(self, kind: str) -> AbstractContextManager[None]:
        """No-op. Every rank gathers every unit."""
        return nullcontext()

    def after_backward(self, *, final: bool) -> None:
        """Nothing: the weights stay."""

    def confirm_ends(self) -> None:
        """No-op. What is gathered does not depend on what passes need."""

    def in_step(self) -> bool:
        """Return true: every rank gathers every unit."""
        return True

    def settle(self) -> None:
        """Finish all gathers, also of what no forward has used: other ranks may be waiting for their part."""
        for unit in self._units:
            if unit.phase is Weights.GATHERING:
                self._land(unit)
                self._rest(unit)
            self._take_over(unit)

    def forget(self, units: Sequence[Unit]) -> None:
        """Gather each unit again at its next use, because its full weights may have been written to."""
        for unit in units:
            unit.needs_regather = True
        self.expire()

    def spare(self) -> Iterable[Tensor]:
        """Return nothing: all memory belongs to some unit."""
        return ()

    def expire(self) -> None:
        """Make parameters whose shards have changed read as NaN until they are gathered, not as a mixture."""
        for unit in self._units:
            self._expire(unit)

    def _rest(self, unit: Unit) -> None:
        unit.move(Weights.IDLE)
        if unit.copied:
            self._left[unit] = unit.writes()

    def _take_over(self, unit: Unit) -> None:
        """Take over into shards what every rank alike has written into their copies since the last use."""
        if unit.copied and unit.phase is Weights.IDLE and unit.writes() != self._left.get(unit):
            take_over_all(unit)
            self._left[unit] = unit.writes()

    @staticmethod
    def _expire(unit: Unit) -> None:
        if unit.phase is Weights.IDLE and not is_fresh(unit):
            with isolated():
                unit.unbind()
            unit.outdate()  # what autograd has saved would read as NaN
            unit.move(Weights.SHARDED)

    def _request(self, unit: Unit) -> None:
        if is_fresh(unit):
            return
        if unit.phase is Weights.GATHERING:  # the weights were changed once more
            self._land(unit)
            self._rest(unit)
        self._expire(unit)
        unit.work = self._queue.submit(self._queue.gather(unit).run)

    def _land(self, unit: Unit) -> None:
        if unit.phase is Weights.GATHERING:
            self._queue.wait(unit)
            with isolated():
                unit.bind()
        unit.move(Weights.FULL)
