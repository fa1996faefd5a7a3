"""Skip steps if a gradient has a NaN or an infinity on any rank.

On the CPU the gradients are hidden from the optimizer, whichever it is. On a GPU the host must not wait for the flag,
so it is passed on as `found_inf`, PyTorch's own protocol for fused optimizers: their kernels then change nothing. Other
optimizers on a GPU step as in plain PyTorch, and nothing is counted.
"""

import warnings
from collections.abc import Callable, Sequence

import torch
from shardlite_kernels import is_here
from torch import Tensor
from torch.optim import Optimizer

from shardlite.errors import NonFiniteError, NonFiniteWarning
from shardlite.telemetry import LaggedNumbers

LIMIT = 20
"""Number of steps skipped in a row that is an error."""


class Skips:
    """Skips steps of one wrapped model, counts them, and warns of the first."""

    def __init__(
        self, flag: Callable[[], Tensor | None], device: torch.device, rank: int, *, warns: bool = True
    ) -> None:
        """Skip nothing yet.

        Args:
            flag: returns [], 1 if gradients are bad, else 0.
            device: where the flag is.
            rank: named by the warning.
            warns: whether to warn of the first skipped step.
        """
        self.flag = flag
        self._rank = rank
        self._warns = warns
        self._seen_until = 0  # the last step whose count the host has seen
        self._counts = torch.zeros(3, device=device)  # skipped: all, in a row; and the step as of which
        self._lagged: LaggedNumbers | None = None
        self._counted: Tensor | None = None
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._lent: Optimizer | None = None

    def total(self) -> int:
        """Return the number of skipped steps. The host waits."""
        return int(self._counts[0].item())

    def before_step(self, optimizer: Optimizer) -> None:
        """Make the coming step change nothing, if gradients are not finite.

        Raises:
            NonFiniteError: too many in a row were skipped.
        """
        if getattr(optimizer, "in_backward", False):
            return  # it has stepped already
        flag = self.flag()
        if flag is not self._counted:
            self._hidden = []  # left over from a step that ended in an exception, and outdated by another backward
        self.after_step()
        if flag is None or getattr(optimizer, "found_inf", None) is not None:
            return  # a gradient scaler has looked already, and counts for itself
        if is_here(flag):
            self._count(flag)
            if flag.item():
                params = [param for group in optimizer.param_groups for param in group["params"]]
                self._hidden = [(param, param.grad) for param in params if param.grad is not None]
                for param, _ in self._hidden:
                    param.grad = None
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            self._count(flag)
            optimizer.found_inf = flag  # type: ignore[attr-defined]
            self._lent = optimizer

    def after_step(self) -> None:
        """Undo what was done before the step."""
        for param, grad in self._hidden:
            param.grad = grad
        self._hidden = []
        if self._lent is not None:
            del self._lent.found_inf  # type: ignore[attr-defined]
            self._lent = None

    def _count(self, flag: Tensor) -> None:
        """Count once per backward, however many optimizers step.

        On a GPU the counts of some earlier step are checked. The host waits for those of now only after many steps in a
        row were skipped, so that all ranks reach the limit in the same step.
        """
        if flag is self._counted:
            return
        self._counted = flag
        self._counts[:2] += flag
        self._counts[1] *= flag
        self._counts[2] += 1
        if is_here(flag):
            self._check(self._counts.tolist())
            return
        self._lagged = self._lagged or LaggedNumbers(self._counts)
        seen = self._lagged.read()
        if seen is not None:
            if seen[1] > LIMIT // 2:
                seen = self._lagged.read(wait=True) or seen
            self._check(seen)
            self._lagged.send()

    def _check(self, counts: Sequence[float]) -> None:
        """Warn of the first step that was skipped, and raise after too many."""
        total, in_a_row, step = map(int, counts)
        first, self._seen_until = self._seen_until + 1, step
        if total and self._warns:
            self._warns = False
            which = f"step {step}" if first == step else f"one of the steps {first} to {step}"
            warnings.warn(
                f"rank {self._rank}: {which} since the model was wrapped was left out on all ranks, because a gradient "
                "on some rank has a NaN or an infinity. Further ones are counted in `skipped_steps` of the model, and "
                f"{LIMIT} in a row are an error. `ShardLite(..., diagnose=True)` names the parameter and the rank of "
                "each",
                NonFiniteWarning,
                stacklevel=2,
            )
        if in_a_row >= LIMIT:
            raise NonFiniteError(
                f"{in_a_row} steps in a row were left out, because gradients have a NaN or an infinity: the model has "
                "diverged, or its input is bad. `ShardLite(..., diagnose=True)` names the first such gradient"
            )
