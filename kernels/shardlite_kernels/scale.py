"""Clip gradients: multiply a tensor by a factor in device memory, which is usually 1.

Bytes per element: none if the factor is 1. Otherwise each element is read and written once: 8 in fp32, 4 in bf16.
Legend: `S` elements.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

import torch
from torch import Tensor

from .launch import block_size, check_flat, jit, launch, tl, use_triton
from .rounding import as_stored, load_fp32, store_rounded

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@jit
def _scale_kernel(
    x_ptr: tl.tensor, factor_ptr: tl.tensor, n: tl.tensor, NATIVE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    if NATIVE:
        factor = tl.load(factor_ptr).to(tl.float64)
        if factor != 1.0:
            tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) * factor, mask=mask)
    else:
        factor = as_stored(x_ptr, tl.load(factor_ptr).to(tl.float32), False)
        if factor != 1.0:
            store_rounded(x_ptr, offsets, load_fp32(x_ptr, offsets, mask) * factor, mask)


def scale(x: Tensor, factor: Tensor) -> None:
    """Multiply `x` in place by `factor`, rounded to the dtype of `x`. If the rounded factor is 1, `x` is not read.

    The result has the bits of `torch._foreach_mul_` with the rounded factor: `x` in fp32, bf16 or fp16 is multiplied in
    fp32, and `x` in fp64 in fp64. Each product is rounded once.

    Args:
        x: [S], fp32, bf16, fp16 or fp64.
        factor: [], fp32 or fp64, on the device of `x`.

    Raises:
        ValueError: shapes, devices or dtypes do not match.
    """
    _check(x, factor)
    if use_triton(x):
        launch(_scale_kernel, x, factor, n=x.numel(), block=block_size(x), NATIVE=x.dtype == torch.float64)
    elif (near := factor.to(x.dtype)) != 1:  # the comparison waits for no device, because the factor is in host memory
        x.mul_(near)


def scale_reference(x: Tensor, factor: Tensor) -> None:
    """Specification of `scale`."""
    _check(x, factor)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x.copy_(x.to(wide) * factor.to(x.dtype).to(wide))  # PyTorch rounds fp64 to narrow dtypes through fp32


def _check(x: Tensor, factor: Tensor) -> None:
    check_flat("scale", "x", x, _DTYPES)
    if factor.dim() != 0 or factor.dtype not in (torch.float32, torch.float64) or factor.device != x.device:
        raise ValueError(
            f"scale: factor must be a single fp32 or fp64 number on {x.device}, got shape {tuple(factor.shape)}, "
            f"{factor.dtype} on {factor.device}"
        )
