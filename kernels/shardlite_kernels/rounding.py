"""Round exactly: in conversions on the device, and in the fused multiply-add of the references.

All conversions round once, to nearest even, as the conversions of GPUs do. Triton's interpreter truncates fp32 to bf16
and misreads subnormal bf16 numbers, so in the interpreter `rounded` and `widened` use integer arithmetic. No other part
of a kernel depends on the interpreter.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

import torch
from torch import Tensor

from .launch import INTERPRETED, jit, libdevice, tl


@jit
def load_fp32(pointer: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load the values at `pointer + offsets`, and return them in fp32, which is exact for bf16 and fp16.

    The values are marked for early eviction from the L2 cache, because they are read once. Outside `mask`, the returned
    values are zero.
    """
    return widened(tl.load(pointer + offsets, mask=mask, other=0, eviction_policy="evict_first"))


@jit
def load_wide(pointer: tl.tensor, offsets: tl.tensor, mask: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Load the values at `pointer + offsets`, and return them in their dtype if `NATIVE`, else in fp32."""
    if NATIVE:
        return tl.load(pointer + offsets, mask=mask)
    else:
        return load_fp32(pointer, offsets, mask)


@jit
def as_stored(pointer: tl.tensor, value: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Return the value that `load_wide` would load after `store_rounded` has stored `value` at `pointer`."""
    if NATIVE:
        return value
    else:
        return widened(rounded(pointer, value))


@jit
def store_rounded(pointer: tl.tensor, offsets: tl.tensor, value: tl.tensor, mask: tl.tensor) -> None:
    """Store `value` at `pointer + offsets`, rounded to the pointer's dtype."""
    tl.store(pointer + offsets, rounded(pointer, value), mask=mask)


@jit
def rounded(pointer: tl.tensor, value: tl.tensor) -> tl.tensor:
    """Return `value` in the dtype that `pointer` points to."""
    if INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:
        value = _bf16_by_integers(value)
    return value.to(pointer.dtype.element_ty)


@jit
def widened(value: tl.tensor) -> tl.tensor:
    """Return a bf16, fp16 or fp32 `value` in fp32, which is exact."""
    if INTERPRETED and value.dtype == tl.bfloat16:
        bits = value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@jit
def ratio(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """Return `x / y` with an error of at most two units in the last place. A `y` below 2^-126 counts as zero.

    A plain `/` gives accurate results for all `y`, but takes nine instructions instead of two.
    """
    if INTERPRETED:
        return x / y
    else:
        return libdevice.fast_dividef(x, y)


@jit
def _bf16_by_integers(x: tl.tensor) -> tl.tensor:
    """Return fp32 `x` rounded to bf16 by integer arithmetic.

    Half a unit of the last kept bit is added if this bit is 1, and slightly less than half a unit if the bit is 0. The
    sum is then truncated. A carry out of the mantissa correctly increases the exponent, up to infinity. A NaN is
    truncated and stays NaN.
    """
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, (bits >> 16) | 0x40, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit
def fp32_by_odd(x: tl.tensor) -> tl.tensor:
    """Return fp64 `x` in fp32, rounded to odd as in `round_to_odd`."""
    near = x.to(tl.float32)
    back = near.to(tl.float64)
    bits = near.to(tl.int32, bitcast=True)
    moves = (x == x) & (back != x) & ((bits & 1) == 0)
    other = tl.where(tl.abs(back) < tl.abs(x), bits + 1, bits - 1)  # bits of a float grow away from zero
    return tl.where(moves, other, bits).to(tl.float32, bitcast=True)


def fp32_by_odd_reference(x: Tensor) -> Tensor:
    """Specification of `fp32_by_odd`."""
    near = x.float()
    back = near.double()
    return round_to_odd(near, inexact=(x == x) & (back != x), outwards=back.abs() < x.abs())


def round_to_odd(near: Tensor, *, inexact: Tensor, outwards: Tensor) -> Tensor:
    """Round exact numbers to odd: of the two neighbours of a number, return the neighbour whose last bit is set.

    If the result is then rounded to a narrower format, there is never a false tie (Boldo and Melquiond 2008).

    Args:
        near: one of the neighbours of each number, fp32 or fp64.
        inexact: whether each exact number differs from `near`. For exact numbers equal to `near`, `near` is returned.
        outwards: whether each exact number is further from zero than `near`.
    """
    bits = near.view(torch.int32 if near.dtype == torch.float32 else torch.int64)
    neighbour = torch.where(outwards, bits + 1, bits - 1)  # bits of a float grow away from zero
    return torch.where(inexact & (bits & 1 == 0), neighbour, bits).view(near.dtype)


def fma_reference(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """Return `a * b + c` of fp32 numbers, rounded once to fp32, as the hardware's fused multiply-add does.

    The product of two fp32 numbers is exact in fp64 (48 bits). The fp64 sum may be inexact. If it was rounded to
    nearest and gave a tie, rounding this tie to fp32 could be off by one unit in the last place. So the sum is rounded
    to odd instead. `b` may be a Python float that is exact in fp32. Infinities, NaNs and signed zeros follow IEEE 754.
    """
    product = a.double() * b
    addend = c.double()
    total = product + addend
    virtual = total - product  # Knuth's TwoSum: `total + error` is the exact sum
    error = (product - (total - virtual)) + (addend - virtual)
    inexact = (error != 0) & total.isfinite()
    return round_to_odd(total, inexact=inexact, outwards=(error > 0) == (total > 0)).float()
