"""PyTorch's implementations of an AdamW step (peers), to compare with ShardLite's kernels.

Each implementation steps one flat tensor. This is the fastest case, because lists of many parameters take longer.

Legend: `S` elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from shardlite_kernels import State
from torch import Tensor, nn

from bench.kernels.clock import Result, Run, Work
from bench.kernels.inputs import HYPER, STEP, exact_weights, gradient, nbytes, state_of
from bench.kernels.work import WEIGHT_BOUND

_OPTIONS: dict[str, Any] = {
    "lr": HYPER.lr,
    "betas": (HYPER.beta1, HYPER.beta2),
    "eps": HYPER.eps,
    "weight_decay": HYPER.weight_decay,
}
_FP32 = "fp32 weights, fp32 moments, fp32 gradient"


def peers(device: torch.device) -> Iterator[Work]:
    """Yield the peers for a device."""
    yield from (_optimizer("AdamW(fused=True)", fused=True), _optimizer("AdamW(foreach=True)", foreach=True))
    if device.type != "cpu":
        yield _optimizer("AdamW(foreach=True), compiled", foreach=True, capturable=True)


def raw_fused() -> Work:
    """Return PyTorch's fused operator without an optimizer: it is the baseline of all works."""

    def make(numel: int, device: torch.device) -> Run:
        state, grad = state_of("fp32", "fp32", numel, device), gradient(numel, device, torch.float32)
        step = torch.tensor(float(STEP), device=device)
        hyper = HYPER._asdict()
        del hyper["max_update"]
        lists = [state.param], [grad], [state.exp_avg], [state.exp_avg_sq], [], [step]
        return _run(
            state, grad, lambda: torch._fused_adamw_(*lists, **hyper, amsgrad=False, maximize=False), state.param
        )

    return Work(system="torch", operation="_fused_adamw_", format=_FP32, make=make)


def _optimizer(name: str, **flags: bool) -> Work:
    def make(numel: int, device: torch.device) -> Run:
        state, grad = state_of("fp32", "fp32", numel, device), gradient(numel, device, torch.float32)
        param = nn.Parameter(state.param)
        param.grad = grad
        step = adamw_of_torch(param, state, flags).step
        temporaries = 12 * numel if "foreach" in flags else 0
        return _run(state, grad, torch.compile(step) if "capturable" in flags else step, param, temporaries)

    return Work(system="torch", operation=name, format=_FP32, make=make, optional="capturable" in flags)


def adamw_of_torch(param: nn.Parameter, state: State, flags: dict[str, bool]) -> torch.optim.AdamW:
    """Return PyTorch's optimizer with these moments, before step `STEP`."""
    optimizer = torch.optim.AdamW([param], **_OPTIONS, **flags)
    on_device = "fused" in flags or "capturable" in flags
    optimizer.state[param] = {
        "step": torch.tensor(STEP - 1.0, device=param.device if on_device else "cpu"),
        "exp_avg": state.exp_avg,
        "exp_avg_sq": state.exp_avg_sq,
    }
    return optimizer


def _run(state: State, grad: Tensor, step: Callable[[], object], param: Tensor, temporaries: int = 0) -> Run:
    return Run(
        step=step,
        results=lambda: [Result(param.detach(), WEIGHT_BOUND)],
        expected=lambda: [exact_weights(state, grad)],
        moved=2 * nbytes(*state.tensors()) + nbytes(grad),
        held=nbytes(*state.tensors(), grad) + temporaries,
    )
