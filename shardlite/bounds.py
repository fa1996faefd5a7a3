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

from shardlite import twins


def difference(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the absolute difference in fp64: infinite where one is not a number, 0 where both are one infinity."""
    apart = (ours.double() - theirs.double()).abs()
    return torch.where(ours == theirs, 0.0, apart.nan_to_num(nan=math.inf, posinf=math.inf))


def unlike(ours: Tensor, theirs: Tensor) -> Tensor:
    """Tell where bits differ, or something is not a number."""
    return (ours != theirs) | (torch.signbit(ours) != torch.signbit(theirs))


def in_ulps(apart: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
    """Return a difference in units of last place of the larger number: it is `m * 2^e`, `1/2 <= m < 1`."""
    info = torch.finfo(ours.dtype)
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
    wrong = unlike(ours, theirs)
    worst = torch.where(wrong, difference(ours, theirs), -1.0).argmax()
    allowed = torch.zeros((), dtype=torch.float64).expand(ours.shape)
    return Judgement(math.inf if bool(wrong.any()) else 0.0, _describe(ours, theirs, allowed, int(worst)))


SAME = Bounds(first_loss=same_bits, later_losses=same_bits, gradients=same_bits, weights=same_bits)


@dataclass(frozen=True)
class Sum:
    """What the order of a sum over the ranks explains, given that all ranks have the same `g_r` in both systems."""

    world_size: int
    magnitudes: Mapping[str, Tensor]
    """`M`, for each element: the mean of `|g_r|` over the ranks, in fp64."""

    def limit(self, name: str, roundings: int, dtype: torch.dtype) -> Tensor:
        """Return `gamma(roundings) * M`, and what may be lost below the smallest normal number."""
        info = torch.finfo(dtype)
        unit = roundings * info.eps / 2
        return self.magnitudes[name] * (unit / (1 - unit)) + roundings * info.tiny * info.eps

    def within(self, roundings: int) -> Judge:
        """Allow what `roundings` in both systems together can do to the mean of one element.

        A mean that is computed by `k` roundings on the path of any `g_r` is

            sum_r g_r/W * (1 + d_r)   with |d_r| <= gamma(k)

        in whatever order it is added, so it is within `gamma(k) * M` of the exact one, and two of them are within
        `(gamma(k) + gamma(l)) * M <= gamma(k + l) * M` of each other. The ring and the simple twin add `W` gradients
        and divide the sum: `k = W - 1 + 1`. `DistributedDataParallel` multiplies each gradient by the rounded `1/W`,
        then adds: `l = 1 + 1 + W - 1`. Below the normal numbers additions are exact, and a division or a product is off
        by at most half the smallest number.
        """

        def judge(name: str, ours: Tensor, theirs: Tensor) -> Judgement:
            allowed = self.limit(name, roundings, ours.dtype)
            shares = difference(ours, theirs) / allowed
            worst = int(shares.argmax())
            return Judgement(float(shares.flatten()[worst]), _describe(ours, theirs, allowed, worst))

        return judge


class Accuracy:
    """What may be between our gradients and those of one process, by how far each is from the same in fp64.

    Inside of a layer all sums are over another batch and in an order of its own, so there is no bound for an element
    that would not be far too wide. But both compute the same in the same precision, so we may not be much less exact:
    for each tensor, with RMS distances over its elements,

        |ours - exact| <= 2 * yardstick + |what W roundings explain|

    The last term is what ShardLite itself may do: average the gradients of the ranks. That the ranks' gradients by
    themselves are at most twice as inexact as PyTorch's for the whole batch is the first. The yardstick is PyTorch's
    own distance, but for a few elements that may be zero by luck. So it is at least what PyTorch's distance is for the
    model as a whole: per element, or relative to the gradient, whichever is more.

    A wrong sum is off by about itself, ten million roundings. What is so small that it hides here, the comparisons
    elementwise and to the bit see.
    """

    def __init__(self, exact: twins.Exact, whole: twins.Record, summed: Sum) -> None:
        self._exact = exact
        self._whole = whole
        self._summed = summed
        pairs = [(exact.gradients[n], whole.gradients[n]) for n in exact.gradients]
        known = [(true, near) for true, near in pairs if true is not None and near is not None]
        error = math.sqrt(sum(float((near.double() - true).square().sum()) for true, near in known))
        size = math.sqrt(sum(float(true.square().sum()) for true, _ in known))
        self._relative = error / size if size else 0.0
        self._absolute = error / math.sqrt(max(1, sum(true.numel() for true, _ in known)))

    def gradient(self, name: str, ours: Tensor, theirs: Tensor) -> Judgement:
        """Judge one gradient."""
        exact = self._exact.gradients[name]
        if exact is None:
            return Judgement(math.inf, "fp64 has none")
        own, reference = _rms(ours - exact), _rms(theirs - exact)
        yardstick = max(reference, self._relative * _rms(exact), self._absolute)
        allowed = 2 * yardstick + _rms(self._summed.limit(name, self._summed.world_size, ours.dtype))
        return _judge_accuracy(own, reference, allowed)

    def loss(self, _: str, ours: Tensor, theirs: Tensor) -> Judgement:
        """Judge the loss of the first step, the mean over the ranks, which is rounded once more for this."""
        exact = self._exact.loss
        own, reference = _rms(ours - exact), _rms(theirs - exact)
        yardstick = max(reference, self._relative * _rms(exact))
        allowed = 2 * yardstick + torch.finfo(ours.dtype).eps / 2 * _rms(exact)
        return _judge_accuracy(own, reference, allowed)


def _judge_accuracy(own: float, reference: float, allowed: float) -> Judgement:
    share = 0.0 if own == 0 else own / allowed if allowed else math.inf
    detail = (
        f"its RMS distance to fp64 is {own:.3g}, PyTorch's own is {reference:.3g}, and {allowed:.3g} would be allowed"
    )
    return Judgement(share if math.isfinite(own) else math.inf, detail)


def _rms(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.double().square().mean()))


def _describe(ours: Tensor, theirs: Tensor, allowed: Tensor, worst: int) -> str:
    """Say what is at an element, which is counted as if tensors were flat."""
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), ours.shape)] if ours.dim() else []
    a, b = ours.flatten()[worst].item(), theirs.flatten()[worst].item()
    place = f"at {index} " if index else ""
    limit = float(allowed.flatten()[worst])
    return f"{place}it is {a:.9g} and not {b:.9g}: {abs(a - b):.3g} apart, {limit:.3g} would be allowed"
