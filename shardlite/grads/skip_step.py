"""Steps that are left out because a gradient, on any rank, has a NaN or an infinity.

On the CPU the gradients are hidden from the optimizer, any optimizer. On a GPU the host must not wait for the flag, so
it is handed over as `found_inf`, PyTorch's own protocol for fused optimizers: their kernels then change nothing. Other
optimizers there step as in plain PyTorch, and nothing is counted.
"""

import warnings
from collections.abc import Callable

import torch
from shardlite_kernels import is_here
from torch import Tensor
from torch.optim import Optimizer

from shardlite.errors import NonFiniteError, NonFiniteWarning

LIMIT = 20
"""Steps left out in a row that are an error."""


class Skips:
    """Leaves out steps of one wrapped model, counts them, and warns of the first."""

    def __init__(
        self, flag: Callable[[], Tensor | None], device: torch.device, rank: int, *, warns: bool = True
    ) -> None:
        """`flag` returns [], 1 where gradients are bad, else 0; the warning names `rank`."""
        self.flag = flag
        self._rank = rank
        self._warns = warns
        self._seen_until = 0  # the last of them whose count the host has seen
        self._counts = torch.zeros(3, device=device)  # left out: all, in a row; and the step as of which
        self._counted: Tensor | None = None
        self._seen = torch.zeros(3, pin_memory=device.type == "cuda")
        self._here = self._seen.numpy()  # the same memory, which the host reads as it is
        self._on_its_way: torch.cuda.Event | None = None
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._lent: Optimizer | None = None

    def total(self) -> int:
        """Return how many steps were left out. The host waits."""
        return int(self._counts[0].item())

    def before_step(self, optimizer: Optimizer) -> None:
        """Make the coming step change nothing, if gradients are not finite.

        Raises:
            NonFiniteError: too many in a row were left out.
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
                self._hide(optimizer)
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

    def _hide(self, optimizer: Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._hidden = [(param, param.grad) for param in params if param.grad is not None]
        for param, _ in self._hidden:
            param.grad = None

    def _count(self, flag: Tensor) -> None:
        """Count once per backward, however many optimizers step."""
        if flag is self._counted:
            return
        self._counted = flag
        self._counts[:2] += flag
        self._counts[1] *= flag
        self._counts[2] += 1
        if is_here(flag):
            self._seen.copy_(self._counts)
            self._check()
        else:
            self._look_later(flag.device)

    def _look_later(self, device: torch.device) -> None:
        """Look at the counts that have arrived at the host, of some earlier step, and send those of now.

        The host does not wait for them, until many steps have been left out: then it does, so that all ranks find the
        limit reached in the same step. These few bytes arrive at once.
        """
        if torch.cuda.is_current_stream_capturing():
            return  # a replay does not come here, and while it is recorded nothing may be asked
        if self._on_its_way is not None and self._here[1] > LIMIT // 2:
            self._on_its_way.synchronize()
        self._check()
        self._seen.copy_(self._counts, non_blocking=True)
        self._on_its_way = torch.cuda.current_stream(device).record_event()

    def _check(self) -> None:
        """Warn of the first step that was left out, and raise after too many, by what the host has seen."""
        total, in_a_row, step = map(int, self._here)
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
