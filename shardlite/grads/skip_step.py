"""Skip an optimizer's step if a gradient has a NaN or infinity on any rank. A flag on the device shows this.

On the CPU the gradients are hidden from any optimizer. On a GPU the host must not wait for the flag. So a fused
optimizer gets the flag as `found_inf`, as PyTorch's gradient scalers pass it, and its kernels change nothing if the
flag is set. Other optimizers on a GPU step as in plain PyTorch, and skipped steps are not counted.
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
"""Number of steps skipped in a row at which an error is raised."""


class Skips:
    """Skips steps of one wrapped model, counts the skipped steps, and warns about the first."""

    def __init__(
        self,
        flag: Callable[[], Tensor | None],
        device: torch.device,
        rank: int,
        *,
        explain: Callable[[], None] = lambda: None,
        warns: bool = True,
    ) -> None:
        """Initialize the counts with zeros.

        Args:
            flag: function that returns a tensor [], which is 1 if a gradient has a NaN or infinity, else 0. It returns
                `None` if there are no gradients.
            device: device of the flag.
            rank: rank that the warning mentions.
            explain: function that raises if too many steps were skipped for a reason other than NaNs or infinities.
            warns: whether to warn about the first skipped step.
        """
        self.flag = flag
        self._rank = rank
        self._explain = explain
        self._warns = warns
        self._seen_until = 0  # the latest step whose counts the host has seen
        self._counts = torch.zeros(
            3, device=device
        )  # the numbers of skipped steps, of steps skipped in a row until now, and of all steps
        self._lagged: LaggedNumbers | None = None
        self._counted: Tensor | None = None
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._lent: Optimizer | None = None

    def total(self) -> int:
        """Return the number of skipped steps. The host waits for the device."""
        return int(self._counts[0].item())

    def before_step(self, optimizer: Optimizer) -> None:
        """Prevent the next step from changing anything if a gradient is not finite.

        Raises:
            NonFiniteError: too many successive steps were skipped.
            LayoutError: the steps were skipped because ranks step with different options.
        """
        if getattr(optimizer, "in_backward", False):
            return  # already stepped during the backward
        flag = self.flag()
        if flag is not self._counted:
            self._hidden = []  # these gradients belong to a step that raised, and were replaced since
        self.after_step()
        if flag is None or getattr(optimizer, "found_inf", None) is not None:
            return  # a gradient scaler has checked the gradients, and counts skipped steps itself
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
        """Undo the changes that `before_step` has made."""
        for param, grad in self._hidden:
            param.grad = grad
        self._hidden = []
        if self._lent is not None:
            del self._lent.found_inf  # type: ignore[attr-defined]
            self._lent = None

    def _count(self, flag: Tensor) -> None:
        """Count the step. Count once per backward, even if several optimizers step.

        On a GPU the counts of an earlier step are checked. The host waits for the current counts only after many steps
        in a row were skipped, so that all ranks reach the limit in the same step.
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
        """Warn about the first skipped step, and raise after too many steps skipped in a row."""
        total, in_a_row, step = map(int, counts)
        first, self._seen_until = self._seen_until + 1, step
        if total and self._warns:
            self._warns = False
            which = f"step {step}" if first == step else f"one of the steps {first} to {step}"
            warnings.warn(
                f"rank {self._rank}: {which} since the model was wrapped was skipped on all ranks, because a gradient "
                "on some rank has a NaN or infinity, or ranks step with different options. Further skipped steps are "
                "counted in `skipped_steps` of the "
                f"model, and {LIMIT} in a row raise an error. `Precision(diagnose=True)` reports the parameter "
                "and the rank of each bad gradient",
                NonFiniteWarning,
                stacklevel=2,
            )
        if in_a_row >= LIMIT:
            self._explain()
            raise NonFiniteError(
                f"{in_a_row} steps in a row were skipped, because gradients have a NaN or infinity: the model has "
                "diverged, or its input is bad. `Precision(diagnose=True)` reports the first bad gradient"
            )
