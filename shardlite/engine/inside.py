"""Steps inside a backward: what a reduction and the optimizer that steps by it know of each other."""

from weakref import ref

from torch import Tensor

from shardlite.engine.stepping import Stepping
from shardlite.errors import PhaseError
from shardlite.grads import Step
from shardlite.optim import AdamW, steps_in_backward
from shardlite.params import Flat


class Inside:
    """Lets the optimizer of one wrapped model step inside the backward, if it is one that does."""

    def __init__(self, stepping: Stepping) -> None:
        self._stepping = stepping
        self._now: ref[AdamW] | None = None

    def optimizer(self) -> AdamW | None:
        """Return the optimizer that steps inside the backward, if there is one.

        Raises:
            LayoutError: there are several, or it lacks parameters.
        """
        return steps_in_backward(self._stepping.shards.names)

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
            self._stepping.announce_change()
            self._stepping.shards.check()
            self._check_gradients()
        return steps

    def _check_gradients(self) -> None:
        for shard, name in self._stepping.shards.names().items():
            if shard.grad is not None:
                raise PhaseError(
                    f"AdamW(in_backward=True) steps by what a backward brings, but the shard of {name!r} has a "
                    "gradient already, which it would leave out: call zero_grad() first, and accumulate in no_sync()"
                )

    def step(self, flat: Flat) -> Step:
        """Prepare the step of one flat."""
        own = flat.own_range(flat.gradients)
        starts = [slot.within(*own)[0] for slot in flat.gradients.slots]
        return self._optimizer().hop([(flat.shards[row], start) for row, start in zip(flat.rows, starts, strict=True)])

    def end(self, bad: Tensor) -> None:
        """Note that shards have changed; `bad`, [], is above 0 if any rank has found a NaN or an infinity."""
        self._optimizer().note(bad)
        self._stepping.mark_stepped()

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
