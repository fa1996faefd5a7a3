"""The state that a step of AdamW updates: weights and two moments, in one of six formats.

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
from .split import joined


class State(NamedTuple):
    """Weights and moments. All tensors are 1-D and contiguous."""

    param: Tensor
    """Weights [S], fp32, or the upper part of split weights [S], bf16."""

    exp_avg: Tensor
    """First moments [S], fp32, bf16 or int8 codes."""

    exp_avg_sq: Tensor
    """Second moments [S], fp32, bf16 or uint8 codes."""

    low: Tensor | None = None
    """Lower part of split weights [S], int8."""

    avg_exponent: Tensor | None = None
    """Exponents of the codes in `exp_avg` [G], uint8."""

    sq_exponent: Tensor | None = None
    """Exponents of the codes in `exp_avg_sq` [G], uint8."""

    @property
    def exact(self) -> bool:
        """Whether all tensors are stored in the dtype in which a step is computed."""
        return self.low is None and self.exp_avg.dtype == self.param.dtype

    def part(self, start: int, stop: int) -> State:
        """Return the state of elements `[start, stop)`. `start` must be a multiple of 32."""
        here, groups = slice(start, stop), slice(start // SCALE_BLOCK, -(-stop // SCALE_BLOCK))
        param, exp_avg, exp_avg_sq, low, *exponents = self
        avg, sq = (None if each is None else each[groups] for each in exponents)
        return State(param[here], exp_avg[here], exp_avg_sq[here], None if low is None else low[here], avg, sq)

    def split(self, numel: int) -> Iterator[State]:
        """Yield parts of `numel` elements. The last part may be shorter. An empty state has one part.

        `numel` must be a multiple of 32.
        """
        for start in range(0, max(1, self.param.numel()), numel):
            yield self.part(start, start + numel)

    def weight(self) -> Tensor:
        """Return the weights [S] in the dtype in which a step is computed. Split weights are joined."""
        return self.param if self.low is None else joined(self.param, self.low)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return both moments [S] in the dtype in which a step is computed."""
        return (self.exp_avg, self.exp_avg_sq) if self.exact else decode(*self.codes())

    def codes(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the tensors in which moments are stored, in the order of the arguments of `decode` and `encode`."""
        return self.exp_avg, self.exp_avg_sq, self.avg_exponent, self.sq_exponent

    def clone(self) -> State:
        """Return a copy of all tensors."""
        return State(*(None if each is None else each.clone() for each in self))  # type: ignore[arg-type]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are not `None`."""
        return [tensor for tensor in self if tensor is not None]

    def check(self, who: str) -> None:
        """Check that the tensors match each other.

        Raises:
            ValueError: a shape, device or dtype contradicts the format.
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
            raise ValueError(f"{who}: moments in {moments} cannot be combined with a param in {weights}")
        if codes != (self.avg_exponent is not None) or codes != (self.sq_exponent is not None):
            raise ValueError(f"{who}: moments in int8 codes need exponents, and other moments must have none")
