"""The bridge from optimizers to a wrapped model: its reactions to steps and to clipping, after or inside a backward."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet, ref

from torch import Tensor
from torch.optim import Optimizer

from shardlite.comm import Context
from shardlite.engine.backward import Backward
from shardlite.engine.local_shards import Shards
from shardlite.engine.module_hooks import ModuleHooks
from shardlite.errors import PhaseError
from shardlite.grads import Clipper, Skips, Step, Stepping
from shardlite.optim import AdamW, steps_in_backward
from shardlite.params import Flat
from shardlite.weights import Gathering


class Follower(Protocol):
    """Keeps an average of the weights, or the like, and is called before they change."""

    def before_change(self) -> None:
        """Prepare for a change of the trained weights. Raise if the model has other weights now."""


class InBackwardOptimizer:
    """Steps the optimizer of one wrapped model inside the backward, if it was made with `in_backward`."""

    def __init__(self, shards: Shards, gatherer: Gathering) -> None:
        self._shards = shards
        self._gatherer = gatherer
        self._now: ref[AdamW] | None = None
        self.followers: WeakSet[Follower] = WeakSet()

    def announce_change(self) -> None:
        """Call followers before the trained weights change. They raise if the model has others now."""
        for each in self.followers:
            each.before_change()

    def mark_stepped(self) -> None:
        """Note that shards were stepped in a backward. The step is counted when it is closed."""
        self._shards.mark_changed(list(self._shards))
        self._gatherer.expire()

    def optimizer(self) -> AdamW | None:
        """Return the optimizer that steps inside the backward, if there is one.

        Raises:
            LayoutError: there are several, or it lacks parameters.
        """
        return steps_in_backward(self._shards.names)

    def begin(self, *, steps: bool) -> Stepping | None:
        """Note the first gradient of a backward. Return what steps by means, if it is so. `steps` if it may.

        Raises:
            PhaseError: an earlier backward has stepped, and its step is not closed.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            return None
        self._now = ref(optimizer)  # an optimizer that the program drops is gone
        optimizer.ready()
        if steps:
            self.announce_change()
            self._shards.check()
            self._check_gradients()
        return Stepping(self._prepare, self._end) if steps else None

    def _check_gradients(self) -> None:
        for shard, name in self._shards.names().items():
            if shard.grad is not None:
                raise PhaseError(
                    f"AdamW(in_backward=True) steps by what a backward brings, but the shard of {name!r} has a "
                    "gradient already, which it would leave out: call zero_grad() first, and accumulate in no_sync()"
                )

    def _prepare(self, flat: Flat) -> Step:
        """Prepare the step of one flat."""
        own = flat.own_range(flat.gradients)
        starts = [slot.within(*own)[0] for slot in flat.gradients.slots]
        step = self._optimizer().prepare_in_backward(
            [(flat.shards[row], start) for row, start in zip(flat.rows, starts, strict=True)]
        )
        return Step(step.activate, step, step.fused, step.bad)

    def _end(self, bad: Tensor) -> None:
        """Note that shards have changed; `bad`, [], is above 0 if any rank has found a NaN or an infinity."""
        self._optimizer().note(bad)
        self.mark_stepped()

    def _optimizer(self) -> AdamW:
        optimizer = None if self._now is None else self._now()
        assert optimizer is not None, "an optimizer lives while its backward runs"
        return optimizer

    def check(self) -> None:
        """Raise if steps in a backward have left NaNs: weights are going to be kept. The host waits for a GPU.

        Raises:
            NonFiniteError: they have.
        """
        if (optimizer := self.optimizer()) is not None:
            optimizer.check()

    def refuse(self, what: str) -> None:
        """Raise if an optimizer steps inside the backward: `what` would come too late, or not at all.

        Raises:
            PhaseError: there is.
        """
        if self.optimizer() is not None:
            raise PhaseError(
                f"{what}: AdamW(in_backward=True) has stepped by each gradient as soon as it was there, and keeps "
                "none. Use AdamW without it; to bound updates without a look at all gradients, AdamW(max_update=...)"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class OptimizerBridge:
    """The parts of one wrapped model that optimizers use."""

    shards: Shards
    skips: Skips
    clipper: Clipper
    context: Context
    in_backward: InBackwardOptimizer
    backward: Backward
    hooks: ModuleHooks
    gatherer: Gathering
    place: str
    """This rank, the number of ranks and the stage, in words."""

    optimizers: WeakSet[Optimizer] = field(default_factory=WeakSet)
    """Optimizers that have stepped the model."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise if a step would be a wrong one, and make it change nothing if gradients are not finite.

        Raises:
            PhaseError: gradients are not what a step needs, or were stepped by inside the backward.
        """
        self.optimizers.add(optimizer)
        self.hooks.reset()
        graded = any(shard.grad is not None for shard in self.shards)
        self.backward.check_step(graded=graded, inside=self.in_backward.optimizer() is not None)
        if not getattr(optimizer, "in_backward", False):
            self.in_backward.refuse(f"a step of {type(optimizer).__name__}")
        self.in_backward.announce_change()
        self.gatherer.settle()
        self.shards.check()
        self.skips.before_step(optimizer)

    def after_step(self, stepped: Sequence[Tensor]) -> None:
        """Note what was changed."""
        self.context.version.number += 1
        self.skips.after_step()
        self.clipper.gradients_written()  # fused optimizers divide them by the scale of a gradient scaler
        self.shards.after_step(stepped)
        self.gatherer.expire()

    def mark_changed(self) -> None:
        """Note that all shards were changed by other means than a step, on every rank."""
        self.context.version.number += 1  # ranks that did not do the same are found out by it
        self.in_backward.mark_stepped()
