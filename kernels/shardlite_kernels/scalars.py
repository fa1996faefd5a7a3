"""Compute the scalars of an AdamW step, which all elements of a parameter share: one row per parameter, on the device.

Scalars are not arguments of the kernel, because the host may not know the scalars. A step that is skipped because of
infinities is not counted, and the host would have to wait for the device to learn whether a step was skipped. So the
device computes the scalars of all rows together, with a few operators of PyTorch. A second table has the number of the
row for each group of 32 elements. So one launch can update parameters with different hyper-parameters and step counts,
and a new learning rate never recompiles a kernel.

Legend: `R` rows. `fp32(x)` is `x` rounded to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from math import inf, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import SCALE_BLOCK, constexpr
from .noise import random_bits_by_group


class Hyper(NamedTuple):
    """Hyper-parameters of a step, in the order of the columns of `hyper_table`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_update: float = inf
    """Maximum magnitude of an element's update, as a multiple of the learning rate."""

    def check(self) -> None:
        """Check the betas, so that the bias correction never divides by zero.

        Raises:
            ValueError: a beta is not in [0, 1) in fp32.
        """
        if not all(0 <= _fp32(beta) < 1 for beta in (self.beta1, self.beta2)):
            raise ValueError(f"adamw: betas must be in [0, 1) in fp32, got {self.beta1}, {self.beta2}")


class Scalars(NamedTuple):
    """The fp32 scalars of a step: one row of the table."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    step_size: float
    root_bias2: float
    limit: float
    """Maximum magnitude of an element's update."""

    factor: float
    """Factor by which gradients are multiplied in registers."""

    grad_scale: float
    """Divisor of gradients, which is applied before `factor`. With `unscale` the quotient is also written back."""

    active: float
    """0 if the elements of this row are not stepped, otherwise another number."""


COLUMNS = len(Scalars._fields)
WIDTH = constexpr(COLUMNS)
BETA1, BETA2, EPS, DECAY, STEP_SIZE, ROOT_BIAS2, LIMIT, FACTOR, GRAD_SCALE, ACTIVE = map(constexpr, range(COLUMNS))
"""The column of each scalar in a row. A row has `WIDTH` numbers."""


class Table(NamedTuple):
    """Tables that a launch reads in addition to the state and the gradient, which have `G` groups of 32 elements."""

    rows: Tensor
    """The number of each group's row in `keys` and `scalars` [G], int16 or int32."""

    keys: Tensor
    """Keys of stochastic rounding [R], int32, from `noise.keys`."""

    scalars: Tensor
    """Scalars [R, COLUMNS], from `adamw_scalars`. On the CPU, steps do not read these scalars."""

    first: int = 0
    """Position of the first element, from which its random bits are computed. A multiple of 32."""

    def part(self, start: int, stop: int) -> Table:
        """Return the table of elements `[start, stop)`. `start` must be a multiple of 32."""
        return self._replace(rows=self.rows[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)], first=self.first + start)

    def row_of_each(self, numel: int) -> Tensor:
        """Return the number of each element's row, [S], int64."""
        return self.rows.long().repeat_interleave(SCALE_BLOCK)[:numel]

    def random_bits(self, numel: int) -> Tensor:
        """Return 32 random bits for each element, [S], int32."""
        return random_bits_by_group(self.keys[self.rows.long()].long(), self.first, SCALE_BLOCK)[:numel]


def hyper_table(hypers: Sequence[Hyper], device: torch.device) -> Tensor:
    """Return hyper-parameters as a table [R, 6], fp32, on `device`.

    Raises:
        ValueError: a beta is not in [0, 1) in fp32.
    """
    for hyper in hypers:
        hyper.check()
    return send(hypers, torch.float32, device)


def send(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on `device`. The host does not wait for the device.

    The copy to a GPU runs in stream order, and reads pinned memory. PyTorch does not reuse this memory before the copy
    has finished.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def is_here(tensor: Tensor) -> bool:
    """Return whether the host can read a tensor without waiting for a device."""
    return tensor.device.type == "cpu"


def adamw_scalars(
    steps: Tensor,
    hyper: Tensor,
    *,
    active: Tensor | None = None,
    factor: Tensor | None = None,
    grad_scale: Tensor | None = None,
) -> Tensor:
    """Return the rows of scalars for one update of each parameter.

    The result of every operation is the exact result, rounded to fp32 once. PyTorch's operations on fp32 numbers round
    in this way. The results of operations in fp64 are so accurate that only the rounding to fp32 matters. The exception
    is `beta^step`: the device computes this power in fp64 with an error that changes the fp32 result about once in a
    hundred million numbers.

    Args:
        steps: numbers of the updates, from 1, [R].
        hyper: hyper-parameters [R, 6], from `hyper_table`.
        active: [R] or [], 0 for rows that are not stepped. `None`: all rows are stepped.
        factor: factor of gradients []. `None`: 1.
        grad_scale: divisor of gradients []. `None`: 1.

    Returns:
        [R, COLUMNS], fp32, on the device of `hyper`.
    """
    lr, betas, weight_decay, max_update = hyper[:, 0:1], hyper[:, 1:3], hyper[:, 4:5], hyper[:, 5:6]
    bias = 1 - (betas.double() ** steps.double().unsqueeze(1)).float()
    limit = torch.where(max_update.isinf(), max_update, lr * max_update)
    ones = torch.ones_like(lr)
    given = [
        ones if each is None else each.float().reshape(-1, 1).expand_as(lr) for each in (factor, grad_scale, active)
    ]
    root_bias2 = bias[:, 1:2].double().sqrt().float()
    return torch.cat([hyper[:, 1:4], lr * weight_decay, lr / bias[:, 0:1], root_bias2, limit, *given], dim=1)


def adamw_scalars_reference(
    step: float, hyper: Hyper, *, active: float = 1.0, factor: float = 1.0, grad_scale: float = 1.0
) -> Scalars:
    """Specification of one row of `adamw_scalars`: every operation is computed in fp64 and rounded to fp32."""
    lr, beta1, beta2, eps, weight_decay, max_update = (_fp32(number) for number in hyper)
    bias1, bias2 = (_fp32(1 - _fp32(beta**step)) for beta in (beta1, beta2))
    return Scalars(
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        decay=_fp32(lr * weight_decay),
        step_size=_fp32(lr / bias1),
        root_bias2=_fp32(sqrt(bias2)),
        limit=inf if max_update == inf else _fp32(lr * max_update),
        factor=_fp32(factor),
        grad_scale=_fp32(grad_scale),
        active=_fp32(active),
    )


def _fp32(x: float) -> float:
    return c_float(x).value
