"""The state that one step of AdamW changes: weights and two moments, in one of six formats.

| | weight | bytes | moments | bytes |
|---|---|---|---|---|
| exact | `param` in fp32 | 4 | fp32 | 8 |
| narrow | `param` in bf16 and `low` in 8 bits (`split.py`) | 3 | `"bf16"` / `"int8"` (`moments.py`) | 4 / 2.0625 |

Legend: `S` elements, `G = ceil(S / 32)` groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .launch import SCALE_BLOCK, check_flat
from .moments import FORMATS, decode
from .split import join


class State(NamedTuple):
    """Weights and moments; all tensors are 1-D and contiguous."""

    param: Tensor
    """[S], fp32; or bf16, the upper part of a split weight."""

    exp_avg: Tensor
    """[S], fp32, bf16 or int8 codes."""

    exp_avg_sq: Tensor
    """[S], fp32, bf16 or uint8 codes."""

    low: Tensor | None = None
    """[S], int8: the lower part of a split weight."""

    avg_exponent: Tensor | None = None
    """[G], uint8, exponents of the codes."""

    sq_exponent: Tensor | None = None
    """[G], uint8, exponents of the codes."""

    @property
    def exact(self) -> bool:
        """Whether all tensors are stored in the dtype of the computation."""
        return self.low is None and self.exp_avg.dtype == self.param.dtype

    def part(self, start: int, stop: int) -> State:
        """Return the state of elements `[start, stop)`; `start` is a multiple of 32."""
        here, groups = slice(start, stop), slice(start // SCALE_BLOCK, -(-stop // SCALE_BLOCK))
        param, exp_avg, exp_avg_sq, low, *exponents = self
        avg, sq = (None if each is None else each[groups] for each in exponents)
        return State(param[here], exp_avg[here], exp_avg_sq[here], None if low is None else low[here], avg, sq)

    def split(self, numel: int) -> Iterator[State]:
        """Yield parts of `numel` elements, a multiple of 32; the last may be shorter. An empty state has one part."""
        for start in range(0, max(1, self.param.numel()), numel):
            yield self.part(start, start + numel)

    def weight(self) -> Tensor:
        """Return the weights [S] in the dtype of the computation: `param`, or the joined fp32 numbers."""
        if self.low is None:
            return self.param
        out = torch.empty_like(self.param, dtype=torch.float32)
        join(out, self.param, self.low)
        return out

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return both moments [S] in the dtype of the computation."""
        if self.exact:
            return self.exp_avg, self.exp_avg_sq
        return decode(*self.codes())

    def codes(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the stored form of the moments, which `encode` writes."""
        return self.exp_avg, self.exp_avg_sq, self.avg_exponent, self.sq_exponent

    def clone(self) -> State:
        """Return a copy."""
        return State(*(None if each is None else each.clone() for each in self))  # type: ignore[arg-type]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are not `None`."""
        return [tensor for tensor in self if tensor is not None]

    def check(self, who: str) -> None:
        """Check that the tensors match.

        Raises:
            ValueError: a shape, device or dtype does not fit the format.
        """
        numel, device, weights, moments = self.param.numel(), self.param.device, self.param.dtype, self.exp_avg.dtype
        groups, codes = -(-numel // SCALE_BLOCK), moments == torch.int8
        lengths = (numel, numel, numel, numel, groups, groups)
        dtypes = (
            *(weights if self.low is None else torch.bfloat16, moments, torch.uint8 if codes else moments),
            *(torch.int8, torch.uint8, torch.uint8),
        )
        for name, tensor, length, dtype in zip(self._fields, self, lengths, dtypes, strict=True):
            if tensor is not None:
                check_flat(who, name, tensor, (dtype,), numel=length, device=device)
        if moments not in (weights, *FORMATS.values()):
            raise ValueError(f"{who}: moments in {moments} do not go with a param in {weights}")
        if codes != (self.avg_exponent is not None) or codes != (self.sq_exponent is not None):
            raise ValueError(f"{who}: exponents go with moments in int8 codes, and only with those")
