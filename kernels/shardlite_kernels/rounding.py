"""Rounding to the bit: conversions on the device, and the fused multiply-add for the references.

Everything rounds to nearest even, once. A GPU's own conversions do; Triton's interpreter truncates fp32 to bf16 and
mistakes the subnormal numbers of bf16, so there the conversions take a detour through integers.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

import torch
from torch import Tensor

from .launch import jit, tl


@jit
def load_fp32(pointer: tl.tensor, offsets: tl.tensor, mask: tl.tensor, INTERPRET: tl.constexpr) -> tl.tensor:
    """The values at `pointer + offsets` in fp32, which holds every bf16 and fp16 number exactly.

    They are read once and will not be needed again, so they should not push anything out of the L2 cache.
    """
    return widened(tl.load(pointer + offsets, mask=mask, eviction_policy="evict_first"), INTERPRET)


@jit
def store_rounded(
    pointer: tl.tensor, offsets: tl.tensor, value: tl.tensor, mask: tl.tensor, INTERPRET: tl.constexpr
) -> None:
    """Store `value` at `pointer + offsets`, rounded to the pointer's dtype."""
    tl.store(pointer + offsets, rounded(pointer, value, INTERPRET), mask=mask)


@jit
def rounded(pointer: tl.tensor, value: tl.tensor, INTERPRET: tl.constexpr) -> tl.tensor:
    """`value` in the dtype of what `pointer` points to."""
    if INTERPRET and pointer.dtype.element_ty == tl.bfloat16:
        value = _bf16_by_integers(value)
    return value.to(pointer.dtype.element_ty)


@jit
def widened(value: tl.tensor, INTERPRET: tl.constexpr) -> tl.tensor:
    """A bf16, fp16 or fp32 `value` in fp32, which holds it exactly."""
    if INTERPRET and value.dtype == tl.bfloat16:
        bits = value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@jit
def _bf16_by_integers(x: tl.tensor) -> tl.tensor:
    """Fp32 `x` in bf16: add just under half a unit of the last kept bit, a full half where that bit is odd, and cut.

    A carry out of the mantissa runs into the exponent, up to infinity, which is right. A NaN is only cut, and kept NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, (bits >> 16) | 0x40, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)


def fma_reference(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """`a * b + c` of fp32 numbers, rounded once to fp32: what the hardware's fused multiply-add gives.

    The product of two fp32 numbers is exact in fp64 (48 bits). The fp64 sum is not always, and rounding it again to
    fp32 would be wrong by one unit where the first rounding landed on a tie. So the sum is rounded to odd instead: the
    last bit of an inexact sum is set, and it can no longer look like a tie (Boldo and Melquiond 2008).

    `b` may be a Python float that fp32 represents exactly. Infinities, NaNs and signed zeros follow IEEE 754.
    """
    product = a.double() * b
    addend = c.double()
    total = product + addend
    virtual = total - product  # Knuth's TwoSum: `total + error` is the exact sum
    error = (product - (total - virtual)) + (addend - virtual)
    return _round_to_odd(total, error).float()


def _round_to_odd(total: Tensor, error: Tensor) -> Tensor:
    """Of the two fp64 neighbours of the exact `total + error`, the one whose last bit is set; `total` where exact."""
    bits = total.view(torch.int64)
    outwards = (error > 0) == (total > 0)  # bits of a float grow away from zero
    neighbour = torch.where(outwards, bits + 1, bits - 1)
    must_move = (error != 0) & total.isfinite() & (bits & 1 == 0)
    return torch.where(must_move, neighbour, bits).view(torch.float64)
