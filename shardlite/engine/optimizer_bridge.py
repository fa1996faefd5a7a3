"""What a wrapped model does when an optimizer steps its shards or clips their gradients, after or inside a backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet, ref

from torch import Tensor
from torch.optim import Optimizer

from shardlite.comm import WeightVersion
from shardlite.engine.local_shards import Shards
from shardlite.errors import PhaseError
from shardlite.grads import Clipper, ShardStep, Skips
from shardlite.optim import AdamW, steps_in_backward
from shardlite.params import Flat
from shardlite.weights import Gathering


class Follower(Protocol):
    """Who keeps something beside the weights, and so has to know before these change."""

    def before_change(self) -> None:
        """Look at the trained weights of now. Raises if the model has others."""


@dataclass(frozen=True, eq=False)
class OptimizerBridge:
    """The ends of one wrapped model that optimizers touch."""

    shards: Shards
    skips: Skips
    clipper: Clipper
    gatherer: Gathering
    steps: WeightVersion
    ready: Callable[[], None]
    """Raises if gradients are not what a step needs."""

    refuse: Callable[[str], None]
    """Raises if gradients are gone after a backward; to be told what wants them."""

    on_any_rank: Callable[[Tensor], Tensor]
    """Returns whether a flag, [], is more than 0 on any rank, as 0 or 1. To be called by every rank."""

    exchange: Callable[[int, str], list[int]]
    """Returns the numbers of all ranks. To be called by every rank, which says what for."""

    place: str
    """Which rank of how many this is, and at which stage."""

    followers: "WeakSet[Follower]" = field(default_factory=WeakSet)

    optimizers: "WeakSet[Optimizer]" = field(default_factory=WeakSet)
    """Those that have stepped the model."""

    def announce_change(self) -> None:
        """Let followers look at the trained weights; they raise if the model has others now."""
        for each in self.followers:
            each.before_change()

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise if a step would be a wrong one, and see to it that it does nothing if gradients are not finite."""
        self.optimizers.add(optimizer)
        self.ready()
        if not getattr(optimizer, "in_backward", False):
            self.refuse(f"a step of {type(optimizer).__name__}")
        self.announce_change()
        self.gatherer.settle()
        self.shards.check()
        self.skips.before_step(optimizer)

    def after_step(self, stepped: Sequence[Tensor]) -> None:
        """Take note of what was changed."""
        self.steps.taken += 1
        self.skips.after_step()
        self.clipper.gradients_written()  # fused optimizers divide them by the scale of a gradient scaler
        self.shards.after_step(stepped)
        self.gatherer.expire()

    def mark_stepped(self) -> None:
        """Take note that shards were stepped in a backward; that is counted when the step is closed."""
        self.shards.mark_changed(list(self.shards))
        self.gatherer.expire()

    def mark_changed(self) -> None:
        """Take note that all shards were changed by other means than a step, on every rank."""
        self.steps.taken += 1  # ranks that did not do the same are found out by it
        self.mark_stepped()


class InBackwardOptimizer:
    """Lets the optimizer of one wrapped model step inside the backward, if it is one that does."""

    def __init__(self, bridge: OptimizerBridge) -> None:
        self._bridge = bridge
        self._now: ref[AdamW] | None = None

    def optimizer(self) -> AdamW | None:
        """Return the optimizer that steps inside the backward, if there is one.

        Raises:
            LayoutError: there are several, or it lacks parameters.
        """
        return steps_in_backward(self._bridge.shards.names)

    def begin(self, *, steps: bool) -> bool:
        """Note the first gradient of a backward, and return whether means are stepped by. `steps` if it may.

        Raises:
            PhaseError: an earlier backward has stepped, and its step is not closed.
        """
        optimizer = self.optimizer()
        if optimizer is None:
            return False
        self._now = ref(optimizer)  # whoever drops an optimizer is rid of it
        optimizer.ready()
        if steps:
            self._bridge.announce_change()
            self._bridge.shards.check()
            self._check_gradients()
        return steps

    def _check_gradients(self) -> None:
        for shard, name in self._bridge.shards.names().items():
            if shard.grad is not None:
                raise PhaseError(
                    f"AdamW(in_backward=True) steps by what a backward brings, but the shard of {name!r} has a "
                    "gradient already, which it would leave out: call zero_grad() first, and accumulate in no_sync()"
                )

    def step(self, flat: Flat) -> ShardStep:
        """Prepare the step of one flat."""
        own = flat.own_range(flat.gradients)
        starts = [slot.within(*own)[0] for slot in flat.gradients.slots]
        return self._optimizer().hop([(flat.shards[row], start) for row, start in zip(flat.rows, starts, strict=True)])

    def end(self, bad: Tensor) -> None:
        """Note that shards have changed; `bad`, [], is above 0 if any rank has found a NaN or an infinity."""
        self._optimizer().note(bad)
        self._bridge.mark_stepped()

    def _optimizer(self) -> AdamW:
        optimizer = None if self._now is None else self._now()
        assert optimizer is not None, "an optimizer lives while its backward runs"
        return optimizer

    def refuse(self, what: str) -> None:
        """Raise if there is such an optimizer: `what` would come too late, or not at all.

        Raises:
            PhaseError: there is.
        """
        if self.optimizer() is not None:
            raise PhaseError(
                f"{what}: AdamW(in_backward=True) has stepped by each gradient as soon as it was there, and keeps "
                "none. Use AdamW without it; to bound updates without a look at all gradients, AdamW(max_update=...)"
            )
