"""What all elements of a parameter have in common in one AdamW step: a row of a table, on the device that steps it.

They are not arguments of the kernel, because the host may not know them: a step that found an infinity does not count,
and asking the device whether it did would mean to wait for it. So the device computes them, all rows at once, with a
few operators of PyTorch, and kernels read their row.

Legend: `R` rows. `fp32(x)` is `x` rounded to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Hyper(NamedTuple):
    """The hyper-parameters of a step, in the order of the rows of `hyper_table`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def check(self) -> None:
        """Raise where the bias correction would divide by zero.

        Raises:
            ValueError: a beta is not in [0, 1) in fp32.
        """
        if not all(0 <= _fp32(beta) < 1 for beta in (self.beta1, self.beta2)):
            raise ValueError(f"adamw: betas must be in [0, 1) in fp32, got {self.beta1}, {self.beta2}")


class Scalars(NamedTuple):
    """What the elements of one step have in common, each an fp32 number: a row that the kernel reads in this order."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    step_size: float
    root_bias2: float
    grad_scale: float
    found_inf: float


def hyper_table(hypers: Sequence[Hyper], device: torch.device) -> Tensor:
    """Hyper-parameters as a table [R, 5] in fp32 on `device`.

    Raises:
        ValueError: a beta is not in [0, 1) in fp32.
    """
    for hyper in hypers:
        hyper.check()
    return send(hypers, torch.float32, device)


def send(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor on `device`, which is not waited for.

    A GPU reads pinned memory by itself when its stream comes to it; PyTorch keeps the memory from reuse until then.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def adamw_scalars(
    steps: Tensor, hyper: Tensor, *, found_inf: Tensor | None = None, grad_scale: Tensor | None = None
) -> Tensor:
    """Return the rows [R, 8] for updates number `steps` [R] (from 1) with `hyper` [R, 5], computed where these are.

    `found_inf` [] is not zero where nothing shall change, `grad_scale` [] is what gradients are to be divided by.

    Each line rounds to fp32 once: sums, products and quotients of fp32 numbers do, and those that detour through fp64
    have enough bits there for the second rounding to be the only one that counts. `beta^step` alone is computed, not
    rounded, by fp64 code of the device, whose error reaches the fp32 result about once in a hundred million numbers.
    """
    lr, betas, weight_decay = hyper[:, 0:1], hyper[:, 1:3], hyper[:, 4:5]
    bias = 1 - (betas.double() ** steps.double().unsqueeze(1)).float()
    scale = torch.ones_like(lr) if grad_scale is None else grad_scale.expand_as(lr)
    flag = torch.zeros_like(lr) if found_inf is None else found_inf.expand_as(lr)
    root_bias2 = bias[:, 1:2].double().sqrt().float()
    return torch.cat([hyper[:, 1:4], lr * weight_decay, lr / bias[:, 0:1], root_bias2, scale, flag], dim=1)


def adamw_scalars_reference(step: float, hyper: Hyper, *, found_inf: float = 0.0, grad_scale: float = 1.0) -> Scalars:
    """One row of `adamw_scalars`, as Python's numbers: every operation in fp64, then rounded to fp32."""
    lr, beta1, beta2, eps, weight_decay = (_fp32(number) for number in hyper)
    bias1, bias2 = (_fp32(1 - _fp32(beta**step)) for beta in (beta1, beta2))
    return Scalars(
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        decay=_fp32(lr * weight_decay),
        step_size=_fp32(lr / bias1),
        root_bias2=_fp32(sqrt(bias2)),
        grad_scale=_fp32(grad_scale),
        found_inf=_fp32(found_inf),
    )


def _fp32(x: float) -> float:
    return c_float(x).value
