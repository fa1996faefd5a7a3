"""Quantize each block of 32 numbers to 32 8-bit codes and one scale: 33 bytes, which decode to fp32 and bf16 exactly.

    step  = 2^(scale - 133)                 scale = the exponent bits, as in fp32, of the largest |x| in the block
    code  = x / step, to nearest even       from -127 to 127; the largest |x| has a code of 64 or more
    value = code * step

This is MXINT8 of the OCP Microscaling Formats (version 1.0, 2023), without the code -128. A scale is a power of two, so
only the codes are rounded. The magnitude of a code has 7 bits, which fit into the mantissa of bf16. For a scale of 0
the step is 2^-133, the smallest bf16 number. So decoding to fp32 and bf16 is exact, and encoding the result gives the
same codes and scales. Decoding to fp16 rounds once, and is exact if the largest number of the block is from 2^-18 to
65504.

The error of an element is at most half a step, which is 1/128 of the largest |x| in the block. Only elements above
127.5 steps have a larger error, of less than one step, which is 1/127.5 of their magnitude. In blocks whose elements
are all below 2^-126, the error is at most 2^-134.

A block with a NaN or infinity has the scale 255 and codes of zero, and decodes to NaN as a whole, so that the error
stays visible. -0 becomes 0.

Bytes per element: `quantize` moves 5.03 from fp32, and 3.03 from bf16 or fp16; `dequantize` moves 5.03 to fp32, and
3.03 to bf16 or fp16.
Legend: `S` elements per row, `W` rows.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

import torch
from torch import Tensor

from .launch import CPU_CHUNK, GROUP, SCALE_BLOCK, block_size, check_flat, jit, launch, tl, use_triton
from .rounding import load_fp32, store_rounded

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_POISON = 255  # the scale of a block with a NaN or infinity


@jit
def _quantize_kernel(
    codes_ptr: tl.tensor, scales_ptr: tl.tensor, source_ptr: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr
) -> None:
    blocks = (tl.program_id(0).to(tl.int64) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP))[:, None]
    offsets = blocks * GROUP + tl.arange(0, GROUP)[None, :]
    x = load_fp32(source_ptr, offsets, offsets < n)
    # As integers, the bits of positive floats have the order of the floats. Infinity and NaN give 255 after the shift.
    scale = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1, keep_dims=True) >> 23
    # `power` is 2^(127 - scale): the largest |x| times `power` is from 1 to 2. 2^-127 is subnormal, a mantissa bit
    # only.
    power = tl.where(scale >= 254, 0x400000, (254 - scale) << 23).to(tl.float32, bitcast=True)
    # The unit in the last place of 1.5 * 2^23 is 1, so the addition rounds to an integer in the lowest bits.
    shifted = x * power * 64.0 + 12582912.0
    codes = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    codes = tl.minimum(tl.maximum(codes, -127), 127)
    codes = tl.where(scale == 255, 0, codes)
    tl.store(codes_ptr + offsets, codes.to(tl.int8), mask=offsets < n)
    tl.store(scales_ptr + blocks, scale.to(tl.uint8), mask=blocks * GROUP < n)


@jit
def _dequantize_kernel(
    out_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    codes_stride: tl.tensor,
    scales_stride: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    blocks = (tl.program_id(0).to(tl.int64) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP))[:, None]
    offsets = blocks * GROUP + tl.arange(0, GROUP)[None, :]  # in the row
    codes = tl.load(codes_ptr + row * codes_stride + offsets, mask=offsets < n, eviction_policy="evict_first")
    scale = tl.load(scales_ptr + row * scales_stride + blocks, mask=blocks * GROUP < n, other=0).to(tl.int32)
    power = tl.where(scale == 0, 0x400000, scale << 23)  # 2^(scale - 127)
    power = tl.where(scale == 255, 0x7FC00000, power).to(tl.float32, bitcast=True)
    value = codes.to(tl.float32) * 0.015625 * power
    store_rounded(out_ptr, row * n + offsets, value, offsets < n)


def quantize(codes: Tensor, scales: Tensor, source: Tensor) -> None:
    """Encode blocks of 32 numbers.

    Args:
        codes: output [S], int8.
        scales: output [S/32], uint8.
        source: [S], fp32, bf16 or fp16.

    Raises:
        ValueError: `S` is not a multiple of 32; shapes, devices or dtypes do not match.
    """
    _check("quantize", "source", source, codes, scales)
    if codes.dim() != 1:
        raise ValueError(f"quantize: codes must be 1-D, got {list(codes.shape)}")
    if not use_triton(source):
        chunks = _chunks(codes), _chunks(scales, SCALE_BLOCK), _chunks(source)
        for codes_chunk, scales_chunk, source_chunk in zip(*chunks, strict=True):
            _quantize_cpu(codes_chunk, scales_chunk, source_chunk)
        return
    launch(_quantize_kernel, codes, scales, source, n=source.numel(), block=block_size(source))


def quantize_reference(codes: Tensor, scales: Tensor, source: Tensor) -> None:
    """Specification of `quantize`."""
    _check("quantize", "source", source, codes, scales)
    blocks = source.float().view(-1, SCALE_BLOCK)
    exponent = blocks.abs().amax(1).view(torch.int32) >> 23
    step = _step_reference(exponent).unsqueeze(1)
    rounded = (blocks.double() / step).round().clamp(-127, 127)
    poisoned = (exponent == _POISON).unsqueeze(1)
    codes.copy_(torch.where(poisoned, 0.0, rounded).view(-1))
    scales.copy_(exponent)


def dequantize(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Decode blocks of 32 numbers.

    Codes and scales may also have `W` rows, which need not be adjacent in memory. So one launch decodes the messages of
    several ranks into one tensor.

    Args:
        out: output [S] or [W*S], fp32, bf16 or fp16.
        codes: [S] or [W, S], int8.
        scales: [S/32] or [W, S/32], uint8.

    Raises:
        ValueError: `S` is not a multiple of 32; shapes, devices or dtypes do not match.
    """
    _check("dequantize", "out", out, codes, scales)
    rows = (codes.view(1, -1), scales.view(1, -1)) if codes.dim() == 1 else (codes, scales)
    if not use_triton(out):
        _dequantize_cpu(out, *rows)
        return
    strides, (number, n) = [each.stride(0) for each in rows], rows[0].shape
    launch(_dequantize_kernel, out, *rows, *strides, n=n, rows=number, block=block_size(out))


def dequantize_reference(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Specification of `dequantize`."""
    _check("dequantize", "out", out, codes, scales)
    step = _step_reference(scales.reshape(-1, 1))
    values = codes.reshape(-1, SCALE_BLOCK).double() * step
    out.copy_(torch.where(scales.reshape(-1, 1) == _POISON, torch.nan, values).view(-1))


def _step_reference(scales: Tensor) -> Tensor:
    """Return `2^(scale - 133)` in fp64. It is computed from bits, because a device's power function may be inexact."""
    return ((scales.long() + (1023 - 133)) << 52).view(torch.float64)


def _check(who: str, name: str, floats: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Check that `floats` [W*S], `codes` [W, S] and `scales` [W, S/32] match. `codes` and `scales` may also be 1-D."""
    check_flat(who, name, floats, _FLOATS)
    if (codes.dtype, scales.dtype) != (torch.int8, torch.uint8):
        raise ValueError(f"{who}: codes must be int8 and scales uint8, got {codes.dtype} and {scales.dtype}")
    if not codes.device == scales.device == floats.device:
        raise ValueError(f"{who}: {name} is on {floats.device}, codes on {codes.device}, scales on {scales.device}")
    *rows, length = codes.shape or (0,)
    if codes.dim() not in (1, 2) or length % SCALE_BLOCK or scales.shape != (*rows, length // SCALE_BLOCK):
        raise ValueError(
            f"{who}: the length of codes must be a multiple of {SCALE_BLOCK}, with one scale per {SCALE_BLOCK} codes, "
            f"got {list(codes.shape)} codes and {list(scales.shape)} scales"
        )
    if codes.numel() != floats.numel():
        raise ValueError(f"{who}: {name} has {floats.numel()} elements, but there are {codes.numel()} codes")
    if length and (codes.stride(-1) != 1 or scales.stride(-1) != 1):
        raise ValueError(f"{who}: rows must be contiguous, got strides {codes.stride()} and {scales.stride()}")


def _quantize_cpu(codes: Tensor, scales: Tensor, source: Tensor) -> None:
    blocks = source.float().view(-1, SCALE_BLOCK)
    exponent = blocks.abs().amax(1).view(torch.int32) >> 23
    power = torch.where(exponent >= 254, 0x400000, (254 - exponent) << 23).view(torch.float32)
    rounded = (blocks * power.unsqueeze(1)).mul_(64.0).round_().clamp_(-127, 127)
    rounded.masked_fill_((exponent == _POISON).unsqueeze(1), 0.0)
    codes.copy_(rounded.view(-1))
    scales.copy_(exponent)


def _dequantize_cpu(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    for out_row, codes_row, scales_row in zip(out.view(codes.shape), codes, scales, strict=True):
        chunks = _chunks(out_row), _chunks(codes_row), _chunks(scales_row, SCALE_BLOCK)
        for out_chunk, codes_chunk, scales_chunk in zip(*chunks, strict=True):
            step = _step_cpu(scales_chunk).unsqueeze(1)
            torch.mul(codes_chunk.view(-1, SCALE_BLOCK), step, out=out_chunk.view(-1, SCALE_BLOCK))


def _step_cpu(scales: Tensor) -> Tensor:
    exponent = scales.to(torch.int32)
    power = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent == _POISON, 0x7FC00000, power).view(torch.float32).mul_(2.0**-6)


def _chunks(tensor: Tensor, shared: int = 1) -> tuple[Tensor, ...]:
    """Split a tensor into chunks of `CPU_CHUNK` encoded numbers. `shared` encoded numbers share one element."""
    return torch.split(tensor, CPU_CHUNK // shared)
