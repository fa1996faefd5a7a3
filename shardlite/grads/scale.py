"""Divide sums of gradients by the number of items (such as tokens) of all ranks instead of the number of ranks.

Each rank counts the items of each of its backwards. The counts travel with the flags of gradients, in `SHARE_NUMEL`
integers that every reduction sends, also without counts:

    3 integers   how this rank divides: by counts, not at all, or by counts of only some of its backwards
    5 integers   the count in the base 4096: multiples of 4096, 1, 1/4096, 1/4096^2 and 1/4096^3

Sums of these integers are exact in any order. So the total depends neither on the number of ranks nor on the order of
messages. The host does not read a count that is on a device.
"""

from collections.abc import Sequence
from functools import cache
from math import isfinite
from numbers import Real
from typing import NamedTuple

import torch
from shardlite_kernels import is_here, send
from torch import Tensor

from shardlite.errors import PhaseError
from shardlite.grads.flags import SentNumbers
from shardlite.telemetry import LaggedNumbers

_BASE = 4096
_PLACES = tuple(float(_BASE) ** power for power in (1, 0, -1, -2, -3))
STATE_NUMEL = 3
SHARE_NUMEL = STATE_NUMEL + len(_PLACES)
"""Number of integers that a rank sends."""

_BAD = -(2.0**36)
"""Count that stands for a count on a GPU that is negative or not finite. It makes the total negative."""

_MEAN, _COUNTED, _SUM, _MIXED = (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)
_NOTHING = (0,) * len(_PLACES)

LATER = 4
"""Number of backwards from a disagreement of ranks on a GPU to the error. By then, hosts have read the flag."""


class Share(NamedTuple):
    """What one rank tells the other ranks about the scale of its gradients."""

    state: tuple[int, int, int]
    """How this rank divides: `_MEAN`, `_COUNTED`, `_SUM` or `_MIXED`."""

    digits: Tensor | None
    """The digits of this rank's count, int32 [5]. `None` without counts."""

    @property
    def counted(self) -> bool:
        """Whether sums are divided by counts."""
        return self.digits is not None

    def message(self, numbers: Sequence[int], sent: SentNumbers) -> Tensor:
        """Return `numbers` and this share as one int32 tensor [n + `SHARE_NUMEL`]. The caller must not write to it."""
        if self.digits is None:
            return sent((*numbers, *self.state, *_NOTHING))
        return torch.cat([sent((*numbers, *self.state)), self.digits])

    def disagree(self, sums: Tensor, ranks: int, sent: SentNumbers) -> Tensor:
        """Return a boolean tensor [], whether ranks divide differently, given the sums [`SHARE_NUMEL`] of shares."""
        expected = [-1] if self.state == _MIXED else [ranks * each for each in self.state]
        wrong = (sums[:STATE_NUMEL] != sent(expected)).any()
        return wrong | (sums[STATE_NUMEL] < 0) if self.counted else wrong  # a bad count on some rank

    def total(self, sums: Tensor) -> Tensor:
        """Return the total of all counts [] in fp64, given the sums [`SHARE_NUMEL`] of all shares.

        A bad count on a GPU gives NaN.
        """
        total = (sums[STATE_NUMEL:] * _places(sums.device)).sum()
        return torch.where(total < 0, torch.nan, total)


class Scale:
    """Counts this rank's items. Base of `SharedScale` (several ranks) and `SoloScale` (`solo.py`)."""

    def __init__(self, device: torch.device) -> None:
        """Initialize without counts."""
        self.divides = True
        """Whether sums are divided."""

        self.is_repeated = False
        """Whether a CUDA graph will repeat what the program does now."""

        self._device = device
        self._next: Tensor | None = None  # the digits of the count of the next backward
        self._digits: Tensor | None = None  # the digits of the counts since the latest reduction
        self._backwards = self._counted = 0  # the numbers of backwards since the latest reduction
        self._version = 0  # the version of the weights when the gradients in `.grad` were divided

    def count(self, items: float | Tensor) -> None:
        """Set the number of this rank's items in the next backward.

        Raises:
            TypeError, ValueError: `items` is not a number, is negative or is not finite.
            PhaseError: sums are not divided, or a captured step counts a number on the host.
        """
        if not self.divides:
            raise PhaseError(
                "count_items(): set_gradient_reduction('sum') was called, so gradients are not divided: call "
                "set_gradient_reduction('mean') to divide them by the counts"
            )
        if self.is_repeated and (not isinstance(items, Tensor) or is_here(items)):
            raise PhaseError(
                f"count_items(): each replay of the captured step would count {items}, which is on the host: pass a "
                "tensor that the step computes on the GPU, such as (labels != -100).sum()"
            )
        self._next = _digits(items, self._device)

    def begin_backward(self, *, counts: bool) -> None:
        """Add the count of a backward that begins. `counts`: whether this rank's gradients count."""
        self._backwards += 1
        if self._next is None:
            return
        digits = self._next if counts else torch.zeros_like(self._next)
        self._digits = digits if self._digits is None else self._digits + digits
        self._counted += 1
        self._next = None

    @property
    def counted(self) -> bool:
        """Whether the gradients since the latest reduction are divided by counts."""
        return self._counted > 0

    def share(self) -> Share:
        """Return this rank's share of the gradients since the latest reduction."""
        if not self._counted:
            return Share(_MEAN if self.divides else _SUM, None)
        return Share(_COUNTED if self._counted == self._backwards else _MIXED, self._digits)

    @property
    def is_next_counted(self) -> bool:
        """Whether the next backward has a count."""
        return self._next is not None

    @property
    def accumulates(self) -> bool:
        """Whether there were backwards since the latest reduction."""
        return self._backwards > 0

    def reset(self) -> None:
        """Forget the counts since the latest reduction, whose gradients were reduced or dropped."""
        self._digits = None
        self._backwards = self._counted = 0

    def before_step(self) -> None:
        """Check that gradients are divided, before an optimizer steps."""

    def forget(self, *, accumulates: bool) -> None:
        """Forget the counts of gradients in `.grad` that were used or dropped.

        `accumulates` says whether other gradients are not reduced yet, so that their counts are still needed.
        """
        del accumulates  # with a single rank, all gradients are in `.grad`
        self.reset()


class SharedScale(Scale):
    """Decides by what the sums over several ranks are divided. Undivided gradients are in buckets, not in `.grad`."""

    def __init__(self, device: torch.device, rank: int, world_size: int) -> None:
        """Initialize: sums are divided by the number of ranks."""
        super().__init__(device)
        self._where = f"rank {rank} of {world_size}"
        self._earlier: Tensor | None = None  # the total by which the gradients in `.grad` are divided
        self._reductions = 0
        self._wrong: LaggedNumbers | None = None  # on a device, [1]: the first reduction in which ranks disagreed, or 0

    @property
    def by_ranks(self) -> bool:
        """Whether sums are divided by the number of ranks."""
        return self.divides and not self.counted

    def divisors(self, total: Tensor, *, version: int, graded: bool) -> tuple[Tensor, Tensor | None]:
        """Add a total to the total of the gradients in `.grad`, unless a step has used these gradients.

        Args:
            total: the total of the counts of a reduction.
            version: number that grows with every change of the weights.
            graded: whether any shard has a gradient.

        Returns:
            The divisor of the sums of the reduction, [] in fp64, and the divisor of the gradients in `.grad`. The
            latter is `None` if these gradients stay as they are.
        """
        earlier = self._earlier if graded and self._version == version else None
        self._earlier, self._version = total if earlier is None else earlier + total, version
        own = divisor_of(self._earlier)
        return own, None if earlier is None else own / divisor_of(earlier)

    def check_uncounted(self, *, version: int, graded: bool) -> None:
        """Check that a reduction without counts is not added to gradients with counts.

        Raises:
            PhaseError: an earlier backward was counted, and no step has used its gradients.
        """
        if graded and self._earlier is not None and self._version == version:
            raise PhaseError(UNCOUNTED)

    def forget(self, *, accumulates: bool) -> None:
        """Forget the counts of gradients in `.grad` that were used or dropped."""
        self._earlier = None
        if not accumulates:
            self.reset()

    def check(self, share: Share, sums: Tensor, ranks: int, disagree: Tensor | None) -> None:
        """Raise if ranks divide by different numbers, given the sums [`SHARE_NUMEL`] of the shares of all `ranks`.

        On a GPU, raise some backwards later, because the host does not wait. The steps in between are skipped.

        Raises:
            PhaseError: ranks divide by different numbers. Raised on every rank.
        """
        self._reductions += 1
        if is_here(sums):
            counted, summed, mixed = sums[:STATE_NUMEL].tolist()
            if mixed or (counted, summed, mixed) != tuple(ranks * each for each in share.state):
                raise PhaseError(self._explain(share, counted, summed, mixed, ranks))
            return
        if share.state == _MEAN and self._wrong is None:
            return  # the ranks that count raise
        disagree = sums.any() if disagree is None else disagree
        if self._wrong is None:
            self._wrong = LaggedNumbers(torch.zeros(1, dtype=torch.int32, device=sums.device))
        elif (seen := self._wrong.read()) and seen[0] and self._reductions >= seen[0] + LATER:
            raise PhaseError(
                f"{self._where}: since {self._reductions - seen[0]} backwards, ranks divide gradients by different "
                f"numbers, or a count is negative or not finite, and steps are skipped. {_REMEDY}"
            )
        first = self._wrong.numbers
        first.copy_(torch.where(first > 0, first, disagree * self._reductions))
        self._wrong.send()

    def _explain(self, share: Share, counted: int, summed: int, mixed: int, ranks: int) -> str:
        own = {
            _MEAN: "called neither",
            _COUNTED: "called count_items() for every backward",
            _SUM: "called set_gradient_reduction('sum')",
            _MIXED: "called count_items() for some backwards",
        }
        what = {
            "count_items() was called for every backward": counted,
            "count_items() was called for only some of the backwards": mixed,
            "set_gradient_reduction('sum') was called": summed,
        }
        several = ", and ".join(f"{each} on {number} of {ranks} ranks" for each, number in what.items() if number)
        return (
            f"{self._where}: ranks divide gradients by different numbers: {several}; this rank "
            f"{own[share.state]}. {_REMEDY}"
        )


def divisor_of(total: Tensor) -> Tensor:
    """Return the divisor for a total of counts []. It is 1 for a total of 0."""
    return torch.where(total == 0, 1.0, total)


def divide(sums: Tensor, total: Tensor) -> None:
    """Divide in place by a total [] in fp64, which is first rounded to fp32 if the sums are not in fp64."""
    sums.copy_(quotient(sums, total)) if sums.dtype.itemsize < 4 else sums.div_(total.to(sums.dtype))


def quotient(sums: Tensor, total: Tensor) -> Tensor:
    """Return `sums` divided as by `divide`."""
    wide = sums.float() if sums.dtype.itemsize < 4 else sums
    return (wide / total.to(wide.dtype)).to(sums.dtype)


UNCOUNTED = (
    "count_items() was called before an earlier backward whose gradients are not used yet, but not before this one. "
    "Call it before every backward whose gradients are added"
)

_REMEDY = (
    "Call count_items() on every rank before every backward whose gradients are added, also with a count of 0, and "
    "set_gradient_reduction() on every rank"
)


def _digits(items: float | Tensor, device: torch.device) -> Tensor:
    """Return the digits of a count, int32 [5] on `device`. A bad count on a GPU gives digits that are negative."""
    if isinstance(items, Tensor):
        if items.numel() != 1 or items.dtype == torch.bool or items.is_complex():
            raise TypeError(
                f"count_items() takes a number or a tensor with one number, got {items.dtype} {tuple(items.shape)}"
            )
        if not is_here(items):
            count = items.detach().reshape(()).to(device, torch.float64, non_blocking=True)
            return _places_of(torch.where((count >= 0) & count.isfinite(), count, _BAD), device)
        items = items.item()
    if isinstance(items, bool) or not isinstance(items, Real):
        raise TypeError(f"count_items() takes a number or a tensor with one number, got {items!r}")
    count = float(items)
    if not isfinite(count) or not 0 <= count < 2**42:
        raise ValueError(f"count_items() takes a number from 0 to 2^42, got {items!r}")
    rest, digits = count, []
    for place in _PLACES:
        digits.append(int(rest // place))
        rest -= digits[-1] * place
    return send(digits, torch.int32, device)


def _places_of(count: Tensor, device: torch.device) -> Tensor:
    """Return the digits of a count [] in fp64 on a device, without a wait of the host."""
    quotients = (count / _places(device)).floor()
    return torch.cat([quotients[:1], quotients[1:].remainder(_BASE)]).to(torch.int32)


@cache
def _places(device: torch.device) -> Tensor:
    return send(_PLACES, torch.float64, device)
