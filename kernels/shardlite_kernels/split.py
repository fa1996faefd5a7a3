"""Split weights: store an fp32 number, rounded to its upper 24 bits, in 3 bytes as a bf16 number and 8 more bits.

    fp32 bits     s eeeeeeee mmmmmmm mmmmmmmm ........        rounded to the upper 24, ties away from zero
    high, bf16    s eeeeeeee mmmmmmm                          the nearest bf16 number, used in forward and backward
    low, int8                        mmmmmmmm                 the remainder, which may be negative

As integers, `fp32 bits = high * 65536 + low * 256`. So joining is one addition, and splitting takes a few integer
operations. Splitting a joined number gives the same parts again. The error is at most half a unit of the 24th bit,
2^-16 relative, so an addend below 2^-17 of a number is lost. The bf16 part is the bf16 number nearest to the rounded
number. For about one number in 512, which is near a tie, the bf16 part is not the bf16 number nearest to the original
number.

Magnitudes within 2^-17 of the largest fp32 number become infinite. For magnitudes within 2^-9 of the largest fp32
number, the bf16 part is infinite too. NaN is handled separately, because rounding its bits could overflow to zero.

Bytes per element: `split` reads 4 and writes 3, `join` reads 3 and writes 4.
Legend: `S` elements.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

import torch
from torch import Tensor

from .launch import block_size, check_flat, chunks, jit, launch, tl, use_triton


@jit
def load_joined(high_ptr: tl.tensor, low_ptr: tl.tensor, offsets: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load both parts of split numbers, and return the numbers in fp32."""
    high = tl.load(high_ptr + offsets, mask=mask, eviction_policy="evict_first").to(tl.int16, bitcast=True)
    low = tl.load(low_ptr + offsets, mask=mask, eviction_policy="evict_first")
    return ((high.to(tl.int32) << 16) + (low.to(tl.int32) << 8)).to(tl.float32, bitcast=True)


@jit
def store_split(high_ptr: tl.tensor, low_ptr: tl.tensor, offsets: tl.tensor, x: tl.tensor, mask: tl.tensor) -> None:
    """Split fp32 numbers, and store both parts."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = tl.where(x == x, bits + 0x80, 0x7FC00000)  # every NaN becomes 0x7FC00000
    high, low = (rounded + 0x8000) >> 16, rounded >> 8
    tl.store(high_ptr + offsets, high.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
    tl.store(low_ptr + offsets, low.to(tl.uint8).to(tl.int8, bitcast=True), mask=mask)


@jit
def load_weight(state: tl.tuple, offsets: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load weights, and return them in fp32. Split weights are joined."""
    if state.low is None:
        return tl.load(state.param + offsets, mask=mask)
    else:
        return load_joined(state.param, state.low, offsets, mask)


@jit
def store_weight(state: tl.tuple, offsets: tl.tensor, x: tl.tensor, mask: tl.tensor) -> None:
    """Store fp32 weights. If the weights of the state are split, split them first."""
    if state.low is None:
        tl.store(state.param + offsets, x, mask=mask)
    else:
        store_split(state.param, state.low, offsets, x, mask)


@jit
def _split_kernel(
    high_ptr: tl.tensor, low_ptr: tl.tensor, source_ptr: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(source_ptr + offsets, mask=mask, eviction_policy="evict_first")
    store_split(high_ptr, low_ptr, offsets, x, mask)


@jit
def _join_kernel(
    out_ptr: tl.tensor,
    high_ptr: tl.tensor,
    low_ptr: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, load_joined(high_ptr, low_ptr, offsets, mask), mask=mask)


def split(high: Tensor, low: Tensor, source: Tensor) -> None:
    """Split fp32 numbers into bf16 numbers and 8 more bits.

    Args:
        high: output [S], bf16.
        low: output [S], int8.
        source: [S], fp32.

    Raises:
        ValueError: shapes, devices or dtypes do not match.
    """
    _check("split", source, high, low)
    if use_triton(source):
        launch(_split_kernel, high, low, source, n=source.numel(), block=block_size(high, low, source))
        return
    for parts in chunks(high, low, source):
        split_reference(*parts)


def join(out: Tensor, high: Tensor, low: Tensor) -> None:
    """Join split numbers into fp32 numbers.

    Args:
        out: output [S], fp32.
        high: upper parts [S], bf16.
        low: lower parts [S], int8.

    Raises:
        ValueError: shapes, devices or dtypes do not match.
    """
    _check("join", out, high, low)
    if use_triton(out):
        launch(_join_kernel, out, high, low, n=out.numel(), block=block_size(out, high, low))
    else:
        join_reference(out, high, low)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """Return split numbers as a new tensor [S] in fp32, given both parts as for `join`.

    Raises:
        ValueError: shapes, devices or dtypes do not match.
    """
    out = torch.empty_like(high, dtype=torch.float32)
    join(out, high, low)
    return out


def split_reference(high: Tensor, low: Tensor, source: Tensor) -> None:
    """Specification of `split`."""
    bits = source.view(torch.int32)
    rounded = bits + 0x80  # only the addition to some NaNs overflows
    nan = source.isnan()
    upper = torch.where(nan, (bits >> 16) | 0x40, (rounded + 0x8000) >> 16)
    high.view(torch.int16).copy_(upper)
    low.copy_(torch.where(nan, 0, rounded >> 8))  # the conversion to int8 keeps the lowest 8 bits


def join_reference(out: Tensor, high: Tensor, low: Tensor) -> None:
    """Specification of `join`. On the CPU, the specification takes two passes over `out`."""
    out.copy_(high)  # the conversion to fp32 shifts the bits left by 16
    out.view(torch.int32).add_(low, alpha=256)


def join_on_cpu(out: Tensor, high: Tensor, low: Tensor, memory: Tensor) -> None:
    """Join a chunk [S]. `memory` [S] holds `low` in int32, because adding int8 to int32 is slow."""
    out.copy_(high)
    out.view(torch.int32).add_(memory.copy_(low), alpha=256)


def split_on_cpu(high: Tensor, low: Tensor, source: Tensor) -> None:
    """Split a chunk [S]. The values of `source` are overwritten.

    PyTorch's fast rounding to bf16 is exact on two conditions. First, there are no ties. This is ensured by setting a
    bit below the kept bits. Second, all numbers are finite and far from the largest fp32 number. This follows if the
    sum of squares is small.
    """
    if not torch.dot(source, source).item() < 1e38:
        split_reference(high, low, source)
        return
    bits = source.view(torch.int32)
    bits.add_(0x80).bitwise_or_(1)
    high.copy_(source)
    low.copy_(bits.bitwise_right_shift_(8))  # the conversion to int8 keeps the lowest 8 bits


def _check(who: str, whole: Tensor, high: Tensor, low: Tensor) -> None:
    dtypes = {"the fp32 part": torch.float32, "the high part": torch.bfloat16, "the low part": torch.int8}
    for (name, dtype), tensor in zip(dtypes.items(), (whole, high, low), strict=True):
        check_flat(who, name, tensor, (dtype,), numel=whole.numel(), device=whole.device)
