"""Statistics of gradients, row by row, for clipping and for skipping steps.

A row holds two numbers about a block of `B` elements: the sum of their squares, and 1 if one of them is a NaN or an
infinity, else 0. Row `i` covers elements `[i*B, (i+1)*B)`, so every kernel that has just computed a block can write its
row, and no two programs write the same row: there are no atomics, and the order of additions is fixed. The flag is
separate, because squares of finite numbers may overflow in the sum.

Bytes per element: `stats` reads each element once; a kernel that has them in registers reads nothing.
Legend: `S` elements, `B` in a block, `P = ceil(S / B)` rows.
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
"""As on a GPU. Below 32768 elements PyTorch sums a tensor in one thread: the number of threads changes no bit."""

_CPU_CHUNK = 256 * _CPU_BLOCK  # elements that are widened at a time
_CPU_BAD_ROWS = 64  # blocks that are looked at together once more


def stats_block(like: Tensor) -> int:
    """Return `B`, the number of elements per row, for a tensor of any dtype on the device of `like`.

    Equal for all kernels that write rows: they are launched with this block.
    """
    return block_size(_FP32) if use_triton(like) else _CPU_BLOCK


def stats_rows(numel: int, like: Tensor) -> int:
    """Return `P`, the number of rows for `numel` elements on the device of `like`."""
    return -(-numel // stats_block(like))


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the rows of a tensor: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def new_stats(x: Tensor) -> Tensor:
    """Allocate uninitialized memory for the rows of `x` [S]: [P, 2]."""
    return x.new_empty(stats_rows(x.numel(), x), 2, dtype=stats_dtype(x.dtype))


@jit
def store_row(stats_ptr: tl.tensor, values: tl.tensor, mask: tl.tensor) -> None:
    """Write this program's row about its `B` values, fp32 or fp64, in any shape. Values outside `mask` do not count."""
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
    """Write the statistics of `x` [S] to `out` [P, 2] in a separate pass, where no previous kernel could.

    fp32, bf16 and fp16 are squared and added in fp32, fp64 in fp64; the order of additions within a block is the
    device's.

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
    """Specification of `stats`: flags are exact.

    A sum is off by a factor of at most `(1 + u)**(B + 3)`, with `u` the unit roundoff of `out`, since it has `B`
    products and `B - 1` additions of nonnegative numbers, and PyTorch may use a root (Higham 2002, 4.2). Squares that
    are too small for `out` are lost, at most its smallest number each.
    """
    _check(x, out)
    block = stats_block(x)
    blocks = pad(x.double(), (0, -x.numel() % block)).view(-1, block)
    out[:, 0] = blocks.square().sum(1)
    out[:, 1] = (~blocks.isfinite()).any(1)


def stats_total(stats: Tensor, out: Tensor | None = None) -> Tensor:
    """Add rows [P, 2] up: the sum of all squares, and the number of blocks with a NaN or an infinity; [2] in fp64."""
    return torch.sum(stats, 0, dtype=torch.float64, out=out)


def check_stats(name: str, x: Tensor, stats: Tensor) -> None:
    """Check that `stats` is memory for the rows of `x`.

    Raises:
        ValueError: it is not contiguous, or of another shape, device or dtype; or `x` is not floating-point.
    """
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name}: there are no statistics of {x.dtype}, only of fp32, bf16, fp16 and fp64")
    expected = [stats_rows(x.numel(), x), 2]
    if list(stats.shape) != expected or not stats.is_contiguous() or stats.dtype != stats_dtype(x.dtype):
        raise ValueError(
            f"{name}: statistics of {x.numel()} elements of {x.dtype} are a contiguous {expected} of "
            f"{stats_dtype(x.dtype)}, got {list(stats.shape)} of {stats.dtype}"
        )
    if stats.device != x.device:
        raise ValueError(f"{name}: statistics are on {stats.device}, the elements on {x.device}")


def stats_cpu(x: Tensor, out: Tensor) -> None:
    """`stats` by PyTorch's operators. Narrow dtypes are widened chunk by chunk, in the cache."""
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
    for rows in torch.split((~norms.isfinite()).nonzero().flatten(), _CPU_BAD_ROWS):  # squares may have overflowed
        out[rows, 1] = (~blocks[rows].isfinite().all(1)).to(out.dtype)


def _check(x: Tensor, out: Tensor) -> None:
    check_flat("stats", "x", x)
    check_stats("stats", x, out)
