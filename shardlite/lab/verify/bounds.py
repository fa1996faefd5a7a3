"""Differences of two tensors, and bounds on them.

Legend: `W` ranks, `g_r` the gradient of one element on rank `r`, `u` the unit roundoff (half the distance from 1 to the
next number), `gamma(k) = k*u / (1 - k*u)` the bound on `k` roundings (Higham, 2002, Accuracy and Stability, 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from shardlite.config import Precision
from shardlite.lab.verify import twins

_FP64 = 1 + 2.0**-20
"""Factor that allows for the rounding errors of fp64, in which differences are computed.

These errors are 2^-29 of the rounding errors of fp32.
"""


def difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the absolute difference in fp64: infinite if a value is NaN, 0 if both values are the same infinity."""
    apart = (ours.double() - theirs.double()).abs()
    return torch.where(ours == theirs, 0.0, apart.nan_to_num(nan=math.inf, posinf=math.inf))


def unlike(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return a mask of the elements whose bits differ or that are NaN. Elements of different dtypes always differ."""
    return (ours != theirs) | (torch.signbit(ours) != torch.signbit(theirs)) | (ours.dtype != theirs.dtype)


def in_ulps(apart: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
    """Return a difference in units in the last place (ulps) of the larger number, `m * 2^e` with `1/2 <= m < 1`.

    The coarser of the two dtypes determines the unit.
    """
    info = max(torch.finfo(ours.dtype), torch.finfo(theirs.dtype), key=lambda info: info.eps)
    exponent = torch.frexp(torch.maximum(ours.double().abs(), theirs.double().abs())).exponent
    unit = torch.ldexp(torch.full_like(apart, info.eps / 2), exponent).clamp(min=info.tiny * info.eps)
    return torch.where(apart == 0, 0.0, (apart / unit).nan_to_num(nan=math.inf, posinf=math.inf))


@dataclass(frozen=True)
class Judgement:
    """Result of a judge: the largest difference as a share of the bound, and a description of its element."""

    share: float
    detail: str


Judge: TypeAlias = Callable[[str, Tensor, Tensor], Judgement]
"""Function that judges a tensor, given its name, ShardLite's values and the other system's values."""


Bounds: TypeAlias = Mapping[str, Judge]
"""Judges of "first loss", "later losses", "gradients" and "weights". A quantity without a judge is only reported."""


def same_bits(_: str, ours: Tensor, theirs: Tensor) -> Judgement:
    """Judge two tensors whose bits must be equal: 0 and -0 differ, and NaN is never equal."""
    if ours.dtype != theirs.dtype:
        return Judgement(math.inf, f"{ours.dtype} and {theirs.dtype}")
    wrong = unlike(ours, theirs)
    worst = torch.where(wrong, difference(ours, theirs), -1.0).argmax()
    return Judgement(math.inf if bool(wrong.any()) else 0.0, _describe(ours, theirs, 0.0, int(worst)))


SAME: Bounds = dict.fromkeys(("first loss", "later losses", "gradients", "weights"), same_bits)


def rounding(magnitude: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return `gamma(count) * magnitude`, plus the error of roundings below the smallest normal number."""
    info = torch.finfo(dtype)
    unit = count * info.eps / 2
    return magnitude * (unit / (1 - unit)) + count * info.tiny * info.eps


@dataclass(frozen=True)
class Sum:
    """Bounds on differences caused by the order and the dtype of a sum over the ranks.

    If at most `k` roundings affect each `g_r`, the computed mean is

        sum_r g_r/W * (1 + d_r)   with |d_r| <= gamma(k)

    in any order of additions. So the distance of this mean from the exact mean is at most `gamma(k) * M`, where `M` is
    the mean of `|g_r|`. The distance of two means is at most the sum of their distances from the exact mean. The ring
    and the simple twin add `W` gradients and divide the sum: `k = W - 1 + 1`. `DistributedDataParallel` multiplies each
    gradient by the rounded `1/W`, then adds the products: `k = 1 + 1 + W - 1`. If a result is subnormal, an addition is
    exact, and the error of a division or a product is at most half the smallest number.
    """

    world_size: int
    magnitudes: Mapping[str, Tensor]
    """`M` of each element, in fp64."""

    casts: Mapping[str, Tensor]
    """The mean of `|g_r - p_r|` in fp64, where `p_r` is the gradient that plain PyTorch computes instead of `g_r`."""

    precision: Precision
    """Precision of `g_r`."""

    def error(self, name: str, master: torch.dtype) -> Tensor:
        """Return the bound on the error of the ring's mean, after `W` roundings to the reduce dtype."""
        return rounding(self.magnitudes[name], self.world_size, self.precision.reduce_of(master))

    def simple(self, name: str, ours: Tensor, theirs: Tensor) -> Judgement:
        """Judge a gradient against the simple twin, which adds the same gradients in the dtype of the master."""
        allowed = self.error(name, ours.dtype) + rounding(self.magnitudes[name], self.world_size, theirs.dtype)
        return _within(ours, theirs, allowed)

    def data_parallel(self, name: str, ours: Tensor, theirs: Tensor) -> Judgement:
        """Judge a gradient against `DistributedDataParallel`, which adds the `p_r` in the parameter's dtype."""
        casts = self.casts[name] * _FP64
        added = rounding(self.magnitudes[name] + casts, self.world_size + 1, theirs.dtype)
        return _within(ours, theirs, self.error(name, ours.dtype) + casts + added)


@dataclass(frozen=True)
class Batching:
    """Bounds on differences between the ranks and one process with the batches of all ranks.

    The process sums over a different batch, in an order that only the matrix library knows, so a bound that counts
    roundings is not tight. However, PyTorch's errors can be measured without ShardLite. Let `x_r` be the fp64 result of
    a rank, `x` the fp64 result of the one process, and `w` the result of the one process in the model's dtype. Then

        ours - w = (ours - mean g_r) + (mean g_r - mean x_r) + (mean x_r - x) + (x - w)

    The first term is ShardLite's own error: at most `gamma(W) * M`, see `Sum`. The second term is at most the
    mean of `|g_r - x_r|`, the errors of the ranks' own computations, including all casts of `Precision`. The third term
    must be verified: if the mean over the ranks is the result of one process, this term is zero except for roundings of
    fp64, for which `_FP64` allows. The fourth term is the error of the one process. So every element has its own bound,
    as large as the roundings of this model. An element whose errors all have the same sign reaches its bound.
    """

    summed: Sum
    magnitude: Tensor
    """Mean of the ranks' absolute losses, [], in fp64."""

    errors: twins.Step
    """Means over the ranks of `|g_r - x_r|`."""

    exact: twins.Step
    """The fp64 results of the one process, `x`."""

    def gradient(self, name: str, ours: Tensor, theirs: Tensor) -> Judgement:
        """Judge one gradient."""
        errors = self.errors.gradients[name] + difference(theirs, self.exact.gradients[name])
        return _within(ours, theirs, errors * _FP64 + self.summed.error(name, ours.dtype))

    def loss(self, _: str, ours: Tensor, theirs: Tensor) -> Judgement:
        """Judge the loss, whose mean over the ranks is rounded once."""
        errors = self.errors.loss + difference(theirs, self.exact.loss)
        return _within(ours, theirs, errors * _FP64 + torch.finfo(ours.dtype).eps / 2 * self.magnitude)


def _within(ours: Tensor, theirs: Tensor, allowed: Tensor) -> Judgement:
    """Judge two tensors by the element with the largest difference relative to its allowed difference."""
    apart = difference(ours, theirs)
    shares = torch.where(apart == 0, 0.0, apart / allowed)
    worst = int(shares.argmax())
    return Judgement(float(shares.flatten()[worst]), _describe(ours, theirs, float(allowed.flatten()[worst]), worst))


def _describe(ours: Tensor, theirs: Tensor, allowed: float, worst: int) -> str:
    """Describe the element with flat index `worst`."""
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), ours.shape)] if ours.dim() else []
    a, b = ours.flatten()[worst].item(), theirs.flatten()[worst].item()
    place = f"at {index} " if index else ""
    return f"{place}{a:.9g} and {b:.9g}, {abs(a - b):.3g} apart, allowed are {allowed:.3g}"
