"""Compute statistics of gradients. The statistics are used to clip gradients and to skip steps with NaNs or infinities.

A row describes a block of `B` elements by two numbers: the sum of their squares, and a flag, which is 1 if one of the
elements is NaN or infinite, else 0. Row `i` covers elements `[i*B, (i+1)*B)`. So every kernel that has computed a block
can write the block's row, and no two programs write the same row. There are no atomics, and the order of additions is
fixed. The flag is separate because the sum of squares of finite numbers may overflow.

Bytes per element: `stats` reads each element once. Other kernels that write rows have the elements in registers, and
read nothing for the statistics.
Legend: `S` elements, `B` elements per block, `P = ceil(S / B)` rows.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .launch import block_size, check_flat, jit, launch, tl, use_triton
from .rounding import load_wide

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FP32 = torch.empty(0)
_CPU_BLOCK = 1 << 10
"""`B` on a CPU, equal to `B` on a GPU. PyTorch sums fewer than 32768 elements in one thread, so the number of threads
changes no bit."""

_CPU_CHUNK = 256 * _CPU_BLOCK  # number of elements that are widened at a time
_CPU_BAD_ROWS = 64  # blocks with a non-finite norm, whose elements are checked together in a second pass


def stats_block(like: Tensor) -> int:
    """Return `B`, the number of elements per row, for tensors of any dtype on the device of `like`.

    All kernels that write rows are launched with this block size.
    """
    return block_size(_FP32) if use_triton(like) else _CPU_BLOCK


def stats_rows(numel: int, like: Tensor) -> int:
    """Return `P`, the number of rows for `numel` elements on the device of `like`."""
    return -(-numel // stats_block(like))


def new_stats(x: Tensor) -> Tensor:
    """Return uninitialized memory [P, 2] for the rows of `x` [S]. The memory is fp64 if `x` is fp64, otherwise fp32."""
    return x.new_empty(stats_rows(x.numel(), x), 2, dtype=torch.promote_types(x.dtype, torch.float32))


@jit
def store_row(stats_ptr: tl.tensor, values: tl.tensor, mask: tl.tensor) -> None:
    """Write this program's row, given `B` values of any shape, fp32 or fp64. Values outside `mask` are ignored."""
    kept = tl.where(mask, values, 0.0)
    bad = tl.where(tl.abs(kept) < float("inf"), 0.0, 1.0)  # comparisons with NaN are false
    row = stats_ptr + 2 * tl.program_id(0).to(tl.int64)
    tl.store(row, tl.sum(kept * kept))
    tl.store(row + 1, tl.max(bad))


@jit
def _stats_kernel(
    x_ptr: tl.tensor, stats_ptr: tl.tensor, n: tl.tensor, NATIVE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    store_row(stats_ptr, load_wide(x_ptr, offsets, mask, NATIVE), mask)


def stats(x: Tensor, out: Tensor) -> None:
    """Write the statistics of `x` in a separate pass. Kernels with an argument `stats` need no such pass.

    Elements in fp32, bf16 and fp16 are squared and added in fp32, elements in fp64 in fp64. The order of additions
    within a block depends on the device.

    Args:
        x: [S], fp32, bf16, fp16 or fp64.
        out: output [P, 2] from `new_stats`.

    Raises:
        ValueError: shapes, devices or dtypes do not match.
    """
    _check(x, out)
    if not use_triton(x):
        stats_cpu(x, out)
        return
    native = x.dtype == torch.float64
    launch(_stats_kernel, x, out, n=x.numel(), block=stats_block(x), NATIVE=native)


def stats_reference(x: Tensor, out: Tensor) -> None:
    """Specification of `stats`. Flags are exact.

    A sum is off by a factor of at most `(1 + u)**(B + 3)`, where `u` is the unit roundoff of `out`. A sum has `B`
    products and `B - 1` additions of nonnegative numbers, and PyTorch may compute it as the square of a root (Higham
    2002, 4.2). Squares that are too small for the dtype of `out` are lost. Each lost square adds an error of at most
    the smallest number of this dtype.
    """
    _check(x, out)
    block = stats_block(x)
    blocks = pad(x.double(), (0, -x.numel() % block)).view(-1, block)
    out[:, 0] = blocks.square().sum(1)
    out[:, 1] = (~blocks.isfinite()).any(1)


def stats_total(stats: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the sum of rows [P, 2]: the sum of all squares, and the number of blocks with a NaN or infinity.

    Args:
        stats: rows [P, 2].
        out: optional output.

    Returns:
        A tensor [2] in fp64, which is `out` if `out` is given.
    """
    return torch.sum(stats, 0, dtype=torch.float64, out=out)


def check_stats(name: str, x: Tensor, stats: Tensor) -> None:
    """Check that `stats` is memory for the rows of `x`.

    Raises:
        ValueError: `stats` is not contiguous, or has the wrong shape, device or dtype, or `x` is not floating-point.
    """
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name}: statistics need fp32, bf16, fp16 or fp64, got {x.dtype}")
    expected, dtype = [stats_rows(x.numel(), x), 2], torch.promote_types(x.dtype, torch.float32)
    if list(stats.shape) != expected or not stats.is_contiguous() or stats.dtype != dtype:
        raise ValueError(
            f"{name}: statistics of {x.numel()} elements of {x.dtype} must be a contiguous {expected} of "
            f"{dtype}, got {list(stats.shape)} of {stats.dtype}"
        )
    if stats.device != x.device:
        raise ValueError(f"{name}: statistics are on {stats.device}, the elements on {x.device}")


def stats_cpu(x: Tensor, out: Tensor) -> None:
    """Write the statistics of a CPU tensor by PyTorch's operators. Narrow dtypes are widened chunk by chunk."""
    if x.dtype == out.dtype:
        _stats_cpu(x, out)
        return
    for chunk, rows in zip(torch.split(x, _CPU_CHUNK), torch.split(out, _CPU_CHUNK // _CPU_BLOCK), strict=True):
        _stats_cpu(chunk.to(out.dtype), rows)


def _stats_cpu(x: Tensor, out: Tensor) -> None:
    whole = x.numel() // _CPU_BLOCK * _CPU_BLOCK
    _stats_of_blocks(x[:whole].view(whole // _CPU_BLOCK, _CPU_BLOCK), out[: whole // _CPU_BLOCK])
    if whole < x.numel():
        _stats_of_blocks(x[whole:].view(1, -1), out[-1:])


def _stats_of_blocks(blocks: Tensor, out: Tensor) -> None:
    norms = torch.linalg.vector_norm(blocks, dim=1)
    torch.square(norms, out=out[:, 0])
    out[:, 1] = 0
    # A norm of finite elements may be infinite, because their squares may overflow. So the elements are checked.
    for rows in torch.split((~norms.isfinite()).nonzero().flatten(), _CPU_BAD_ROWS):
        out[rows, 1] = (~blocks[rows].isfinite().all(1)).to(out.dtype)


def _check(x: Tensor, out: Tensor) -> None:
    check_flat("stats", "x", x)
    check_stats("stats", x, out)
