"""What our kernels are measured beside: PyTorch's own ways to make the same step, and optimizers of other packages.

All work on one flat tensor, which suits each of them best: with many parameters lists of tensors cost more. Other
packages begin without moments, so what they are compared with is a first step; their moments in 8 bits round it later
only. FlashOptim's weights are bf16 to the outside: it starts from zeros, and they are compared as such.

Legend: `S` elements.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from shardlite_kernels import State
from torch import Tensor, nn

from bench.kernels.inputs import HYPER, STEP, exact_weights, gradient, nbytes, numbers, state_of
from bench.kernels.timing import Result, Run, Work
from bench.kernels.work import WEIGHT_BOUND

_OPTIONS: dict[str, Any] = {
    "lr": HYPER.lr,
    "betas": (HYPER.beta1, HYPER.beta2),
    "eps": HYPER.eps,
    "weight_decay": HYPER.weight_decay,
}
_FP32 = "fp32 weights, fp32 moments, fp32 gradient"
_BLOCK_SCALES = 2 * 4 / 256  # bytes per element: an fp32 number for 256 elements of each moment
_HALF_BOUND = 2.0**-8
"""Of weights that are only seen in bf16."""


def peers(device: torch.device) -> Iterator[Work]:
    """All that there are for that device."""
    yield from (_optimizer("AdamW(fused=True)", fused=True), _optimizer("AdamW(foreach=True)", foreach=True))
    if device.type != "cpu":
        yield _optimizer("AdamW(foreach=True), compiled", foreach=True, capturable=True)
        yield from packages()


def raw_fused() -> Work:
    """PyTorch's fused operator, without an optimizer around it: what others are compared with."""

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


def packages() -> Iterator[Work]:
    """Optimizers with moments in 8 bits."""
    codes = "8-bit moments"
    for module, name in (("bitsandbytes.optim", "AdamW8bit"), ("torchao.optim", "AdamW8bit")):
        yield Work(
            system=module.partition(".")[0],
            operation=name,
            format=f"fp32 weights, {codes}, fp32 gradient",
            make=_of_package(module, name, torch.float32, state_bytes=2 + _BLOCK_SCALES),
            optional=True,
        )
    yield Work(
        system="flashoptim",
        operation="FlashAdamW",
        format=f"bf16 and 8-bit weights, {codes}, bf16 gradient",
        make=_of_package(
            "flashoptim", "FlashAdamW", torch.bfloat16, state_bytes=3 + 2 * 2 / 32, options={"master_weight_bits": 24}
        ),
        optional=True,
    )


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


def _of_package(
    module: str, name: str, dtype: torch.dtype, *, state_bytes: float, options: dict[str, Any] | None = None
) -> Callable[[int, torch.device], Run]:
    """Set up an optimizer of a package, which keeps `state_bytes` per element beside weights and gradients."""

    def make(numel: int, device: torch.device) -> Run:
        kind = getattr(importlib.import_module(module), name)
        narrow = dtype != torch.float32
        start = torch.zeros(numel, device=device, dtype=dtype) if narrow else numbers(numel, device, 2)
        param = nn.Parameter(start)
        param.grad = gradient(numel, device, dtype)
        optimizer = kind([param], **_OPTIONS, **(options or {}))
        own = int(state_bytes * numel)

        def expected() -> list[Tensor]:
            nothing = torch.zeros(numel, device=device)
            return [exact_weights(State(param.detach().float(), nothing, nothing), param.grad, step=1)]

        return Run(
            step=optimizer.step,
            results=lambda: [Result(param.detach(), _HALF_BOUND if narrow else WEIGHT_BOUND)],
            expected=expected,
            moved=2 * (nbytes(param) + own) + nbytes(param.grad),
            held=nbytes(param, param.grad) + own,
        )

    return make
