"""Clip gradients: multiply a tensor by a factor in device memory, which is usually 1.

Bytes per element: none if the factor is 1. Otherwise each element is read and written once: 8 in fp32, 4 in bf16.
`scale_all` multiplies several tensors in one launch. A table in device memory tells each program which part of which
tensor is its own.

Legend: `S` elements, `R` tensors, padded to a power of two.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from .launch import block_size, check_flat, jit, launch, tl, use_triton
from .rounding import as_stored, load_fp32, store_rounded
from .scalars import send

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


_MOST_TOGETHER = 1024
"""Maximum number of tensors of a launch. Each program compares its number with the table's entries for all of them."""


@jit
def _scale_kernel(
    x_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    table_ptr: tl.tensor,
    n: tl.tensor,
    RUNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    factor = tl.load(factor_ptr).to(tl.float64) if NATIVE else tl.load(factor_ptr).to(tl.float32)
    if not NATIVE:
        factor = as_stored(x_ptr, factor, False)
    if factor != 1.0:
        block = tl.program_id(0).to(tl.int64)
        if RUNS > 0:
            begins = tl.load(table_ptr + tl.arange(0, RUNS))
            run = tl.sum((begins <= block).to(tl.int32)) - 1
            offsets = (block - tl.load(table_ptr + run)) * BLOCK + tl.arange(0, BLOCK)
            start, length = tl.load(table_ptr + RUNS + run), tl.load(table_ptr + 2 * RUNS + run)
            if ALIGNED:
                start, length = tl.multiple_of(start, 16), tl.multiple_of(length, 16)
            mask = offsets < length
            offsets += start
        else:
            offsets = block * BLOCK + tl.arange(0, BLOCK)
            mask = offsets < n
        if NATIVE:
            tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) * factor, mask=mask)
        else:
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
        _launch(x, factor, None, x.numel())
    elif (near := factor.to(x.dtype)) != 1:  # the comparison waits for no device, because the factor is in host memory
        x.mul_(near)


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by `factor`, as `scale` does, in one launch for each dtype.

    The addresses of the tensors are sent to the device, unless they are those of an earlier call. While a CUDA graph is
    captured, nothing may be sent, so each tensor has its own launch.

    Args:
        tensors: tensors on one device that `scale` would take.
        factor: as for `scale`.

    Raises:
        ValueError: as for `scale`.
    """
    if not use_triton(factor) or (factor.is_cuda and torch.cuda.is_current_stream_capturing()):
        for each in tensors:
            scale(each, factor)
        return
    for dtype in {each.dtype: None for each in tensors}:
        alike = [each for each in tensors if each.dtype == dtype and each.numel()]
        for at in range(0, len(alike), _MOST_TOGETHER):
            _scale_together(alike[at : at + _MOST_TOGETHER], factor)


def _scale_together(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one dtype in one launch."""
    for each in tensors:
        _check(each, factor)
    first, block = tensors[0], block_size(tensors[0])
    base, size = first.data_ptr(), first.itemsize
    runs = tuple([((each.data_ptr() - base) // size, each.numel()) for each in tensors])
    stream = torch.cuda.current_stream(first.device).cuda_stream if first.is_cuda else 0
    table, blocks = _table(runs, block, first.device, stream)
    _launch(first, factor, table, blocks * block, aligned=all(start % 16 == n % 16 == 0 for start, n in runs))


@lru_cache(maxsize=16)
def _table(runs: Sequence[tuple[int, int]], block: int, device: torch.device, stream: int) -> tuple[Tensor, int]:
    """Return a table of runs, int64 [3, R], and their number of blocks of `block` elements.

    The rows are the number of the first block of each run, the distance of the run from the first, and its length. The
    memory of the table belongs to `stream`, as does its use.
    """
    padded = [*runs, *[(0, 0)] * ((1 << (len(runs) - 1).bit_length()) - len(runs))]
    *begins, blocks = accumulate((-(-n // block) for _, n in padded), initial=0)
    return send([begins, *zip(*padded, strict=True)], torch.int64, device), blocks


def _launch(x: Tensor, factor: Tensor, table: Tensor | None, n: int, *, aligned: bool = False) -> None:
    flags = {"RUNS": 0 if table is None else table.shape[1], "ALIGNED": aligned, "NATIVE": x.dtype == torch.float64}
    launch(_scale_kernel, x, factor, table, n=n, block=block_size(x), **flags)


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
