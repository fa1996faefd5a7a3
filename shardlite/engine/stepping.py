"""What happens to one wrapped model when some optimizer steps its shards, or clips their gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from shardlite.comm import Steps
from shardlite.engine.local_shards import Shards
from shardlite.grads import Clipper, Skips
from shardlite.weights import Gathering


class Follower(Protocol):
    """Who keeps something beside the weights, and so has to know before these change."""

    def before_change(self) -> None:
        """Look at the trained weights of now. Raises if the model has others."""


@dataclass(frozen=True, eq=False)
class Stepping:
    """The ends of one wrapped model that optimizers touch."""

    shards: Shards
    skips: Skips
    clipper: Clipper
    gatherer: Gathering
    steps: Steps
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
