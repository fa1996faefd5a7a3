"""How far apart two tensors are, and how far apart they may be.

Legend: `W` ranks, `r` a rank, `g_r` its gradient of one element, `u` the unit roundoff (half the distance from 1 to the
next number), `gamma(k) = k*u / (1 - k*u)`: what `k` roundings can do (Higham, 2002, Accuracy and Stability, 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from shardlite.apps.verify import twins
from shardlite.config import Precision

_FP64 = 1 + 2.0**-20
"""Roundings of fp64 are 2^-29 of those of fp32: distances that are measured in it may be off by much less than this."""


def difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the absolute difference in fp64: infinite where one is not a number, 0 where both are one infinity."""
    apart = (ours.double() - theirs.double()).abs()
    return torch.where(ours == theirs, 0.0, apart.nan_to_num(nan=math.inf, posinf=math.inf))


def unlike(ours: Tensor, theirs: Tensor) -> Tensor:
    """Tell where bits differ, or something is not a number. No bits are the same in two dtypes."""
    return (ours != theirs) | (torch.signbit(ours) != torch.signbit(theirs)) | (ours.dtype != theirs.dtype)


def in_ulps(apart: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
    """Return a difference in units of last place of the larger number: it is `m * 2^e`, `1/2 <= m < 1`.

    Of two dtypes the coarser one counts.
    """
    info = max(torch.finfo(ours.dtype), torch.finfo(theirs.dtype), key=lambda info: info.eps)
    exponent = torch.frexp(torch.maximum(ours.double().abs(), theirs.double().abs())).exponent
    unit = torch.ldexp(torch.full_like(apart, info.eps / 2), exponent).clamp(min=info.tiny * info.eps)
    return torch.where(apart == 0, 0.0, (apart / unit).nan_to_num(nan=math.inf, posinf=math.inf))


@dataclass(frozen=True)
class Judgement:
    """What a judge says of two tensors: how much of the bound is used, and what is worst."""

    share: float
    detail: str


Judge: TypeAlias = Callable[[str, Tensor, Tensor], Judgement]
"""From the name of a tensor, ours and theirs."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How each quantity is judged; `None`: not at all."""

    first_loss: Judge | None = None
    later_losses: Judge | None = None
    gradients: Judge | None = None
    weights: Judge | None = None


def same_bits(_: str, ours: Tensor, theirs: Tensor) -> Judgement:
    """Allow no difference: 0 and -0 differ, and what is not a number is never right."""
    if ours.dtype != theirs.dtype:
        return Judgement(math.inf, f"{ours.dtype} and {theirs.dtype}")
    wrong = unlike(ours, theirs)
    worst = torch.where(wrong, difference(ours, theirs), -1.0).argmax()
    allowed = torch.zeros((), dtype=torch.float64).expand(ours.shape)
    return Judgement(math.inf if bool(wrong.any()) else 0.0, _describe(ours, theirs, allowed, int(worst)))


SAME = Bounds(first_loss=same_bits, later_losses=same_bits, gradients=same_bits, weights=same_bits)


def rounding(magnitude: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return `gamma(count) * magnitude`, and what may be lost below the smallest normal number."""
    info = torch.finfo(dtype)
    unit = count * info.eps / 2
    return magnitude * (unit / (1 - unit)) + count * info.tiny * info.eps


@dataclass(frozen=True)
class Sum:
    """What the order of a sum over the ranks explains, and in which dtype it is added.

    A mean that is computed by `k` roundings on the path of any `g_r` is

        sum_r g_r/W * (1 + d_r)   with |d_r| <= gamma(k)

    in whatever order it is added, so it is within `gamma(k) * M` of the exact one, where `M` is the mean of `|g_r|`.
    Two means are as far from each other as both are from the exact one, at most. The ring and the simple twin add `W`
    gradients and divide the sum: `k = W - 1 + 1`. `DistributedDataParallel` multiplies each gradient by the rounded
    `1/W`, then adds: `k = 1 + 1 + W - 1`. Below the normal numbers additions are exact, and a division or a product is
    off by at most half the smallest number.
    """

    world_size: int
    magnitudes: Mapping[str, Tensor]
    """`M`, for each element, in fp64."""

    casts: Mapping[str, Tensor]
    """The mean of `|g_r - p_r|`, in fp64, where plain PyTorch has `p_r` instead of `g_r`."""

    precision: Precision
    """Of `g_r`."""

    def error(self, name: str, master: torch.dtype) -> Tensor:
        """Return how far the ring's mean may be from the exact one: at most `W` roundings to the dtype on the wire."""
        return rounding(self.magnitudes[name], self.world_size, self.precision.reduce_of(master))

    def simple(self, name: str, ours: Tensor, theirs: Tensor) -> Judgement:
        """Judge against the simple twin, which adds the same gradients in the dtype of the master."""
        allowed = self.error(name, ours.dtype) + rounding(self.magnitudes[name], self.world_size, theirs.dtype)
        return _within(ours, theirs, allowed)

    def data_parallel(self, name: str, ours: Tensor, theirs: Tensor) -> Judgement:
        """Judge against `DistributedDataParallel`, which adds `p_r`, in the dtype of the parameter."""
        casts = self.casts[name] * _FP64
        added = rounding(self.magnitudes[name] + casts, self.world_size + 1, theirs.dtype)
        return _within(ours, theirs, self.error(name, ours.dtype) + casts + added)


@dataclass(frozen=True)
class Batching:
    """What explains that one process with the batches of all ranks gets other numbers than the ranks.

    It sums over another batch, in an order that only the matrix library knows: no bound that counts roundings is close
    to what happens. But all of it is PyTorch's, so it can be measured, without ShardLite. With `x_r` for what a rank
    computes in fp64 and `x` for what one process does, `w` for its result in the precision of the model,

        ours - w = (ours - mean g_r) + (mean g_r - mean x_r) + (mean x_r - x) + (x - w)

    The first is what ShardLite itself may do, average: at most `gamma(W) * M`, see `Sum`. The second is at most the
    mean of `|g_r - x_r|`, the errors of the ranks by themselves, with all casts that `Precision` asks for. The third is
    what there is to be shown: that the mean of the ranks is what one process computes; it is zero, but for roundings of
    fp64, which `_FP64` allows for. The last is the error of the one process. So every element has its bound, as large
    as roundings are in this model and no larger: an element whose errors all have one sign uses the whole of it.
    """

    summed: Sum
    survey: twins.Survey
    exact: twins.Step
    """`x`."""

    def gradient(self, name: str, ours: Tensor, theirs: Tensor) -> Judgement:
        """Judge one gradient."""
        errors = self._errors().gradients[name] + difference(theirs, self.exact.gradients[name])
        return _within(ours, theirs, errors * _FP64 + self.summed.error(name, ours.dtype))

    def loss(self, _: str, ours: Tensor, theirs: Tensor) -> Judgement:
        """Judge the loss, whose mean over the ranks is rounded once."""
        errors = self._errors().loss + difference(theirs, self.exact.loss)
        return _within(ours, theirs, errors * _FP64 + torch.finfo(ours.dtype).eps / 2 * self.survey.magnitudes.loss)

    def _errors(self) -> twins.Step:
        assert self.survey.errors is not None
        return self.survey.errors


def _within(ours: Tensor, theirs: Tensor, allowed: Tensor) -> Judgement:
    """Judge by the element that uses the largest share of what is allowed."""
    apart = difference(ours, theirs)
    shares = torch.where(apart == 0, 0.0, apart / allowed)
    worst = int(shares.argmax())
    return Judgement(float(shares.flatten()[worst]), _describe(ours, theirs, allowed, worst))


def _describe(ours: Tensor, theirs: Tensor, allowed: Tensor, worst: int) -> str:
    """Say what is at an element, which is counted as if tensors were flat."""
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), ours.shape)] if ours.dim() else []
    a, b = ours.flatten()[worst].item(), theirs.flatten()[worst].item()
    place = f"at {index} " if index else ""
    return f"{place}{a:.9g} and {b:.9g}, {abs(a - b):.3g} apart, allowed are {float(allowed.flatten()[worst]):.3g}"
