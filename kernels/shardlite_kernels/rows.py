"""Add the summands of a ring reduction when those of all ranks are already in this rank's memory.

Rank `k` has one row from each rank, which contains that rank's summand of segment `k`. A ring adds this segment in the
order `k+1, k+2, ..., k`, and `add_rows` adds the rows in the same order, from row `first = k+1` on. Partial sums are
rounded to the dtype of the rows, in which a ring would send partial sums. So the result has the bits of the ring.

With `first=None` the rows are added as a balanced binary tree instead, `((0 + 1) + (2 + 3)) + ...`, which is the order
of recursive halving. A row may itself be the sum of a balanced tree. The result then has the bits of the larger tree.

Bytes per element: each row is read once and `out` is written once, which is `4 * W + 4` in fp32. Statistics of `out`
cost 8 bytes per block.
Legend: `W` ranks and rows, `S` elements, `P` rows of statistics (`stats.py`).
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .hop import NATIVE_DTYPES, check_hop, divided_reference, dtype_of_sums, hop_cpu, write_mean
from .launch import CPU_CHUNK, block_size, jit, launch, tl, use_triton
from .rounding import as_stored, load_wide
from .stats import stats_block, stats_cpu, stats_reference

_MOST_UNROLLED = 64
"""Maximum number of rows for which the kernel is unrolled: all loads then overlap. More rows are added in a loop."""


@jit
def sum_rows(
    rows_ptr: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    UNROLL: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Return the sum of `count` rows, added from row `begin` on.

    `UNROLL` is `count`, or 0 to add the rows in a loop. With `NATIVE` rows are added in their dtype. Otherwise they are
    added in fp32, and partial sums are rounded to the dtype of the rows.
    """
    row = begin.to(tl.int64)
    total = load_wide(rows_ptr + row * stride, offsets, mask, NATIVE)
    for i in tl.static_range(1, UNROLL):
        if i > 1:
            total = as_stored(rows_ptr, total, NATIVE)
        row = tl.where(row + 1 < UNROLL, row + 1, 0)
        total += load_wide(rows_ptr + row * stride, offsets, mask, NATIVE)
    if UNROLL == 0:
        for _ in tl.range(1, count):
            row = tl.where(row + 1 < count, row + 1, 0)
            # In the first iteration `total` is a row, which rounding does not change.
            total = as_stored(rows_ptr, total, NATIVE)
            total += load_wide(rows_ptr + row * stride, offsets, mask, NATIVE)
    return total


@jit
def sum_tree(
    rows_ptr: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    stride: tl.tensor,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Return the sum of `COUNT` rows from row `FIRST` on, added as a balanced binary tree.

    With `NATIVE` rows are added in their dtype. Otherwise they are added in fp32, and sums below the root are rounded
    to the dtype of the rows.
    """
    if COUNT == 1:
        row = tl.full((), FIRST, tl.int64)
        total = load_wide(rows_ptr + row * stride, offsets, mask, NATIVE)
    else:
        total = sum_tree(rows_ptr, offsets, mask, stride, FIRST, COUNT // 2, NATIVE)
        other = sum_tree(rows_ptr, offsets, mask, stride, FIRST + COUNT // 2, COUNT // 2, NATIVE)
        if COUNT > 2:  # if `COUNT` is 2, `total` and `other` are rows, which rounding would not change
            total = as_stored(rows_ptr, total, NATIVE)
            other = as_stored(rows_ptr, other, NATIVE)
        total += other
    return total


UNSPECIALIZED = ("begin",)
"""Arguments of kernels whose values differ between ranks. If Triton compiled special versions for some values, ranks
would run different code."""


@partial(jit, unspecialized=UNSPECIALIZED)
def _add_rows_kernel(
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    divisor: float,
    n: tl.tensor,
    UNROLL: tl.constexpr,
    TREE: tl.constexpr,
    NATIVE: tl.constexpr,
    DIVIDE: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    if TREE:
        total = sum_tree(rows_ptr, offsets, mask, stride, 0, UNROLL, NATIVE)
    else:
        total = sum_rows(rows_ptr, offsets, mask, begin, count, stride, UNROLL, NATIVE)
    write_mean(out_ptr, stats_ptr, total, divisor, offsets, mask, NATIVE, DIVIDE, STATS)


def add_rows(out: Tensor, rows: Tensor, first: int | None = 0, divisor: int = 1, stats: Tensor | None = None) -> None:
    """Write `(rows[first] + rows[first + 1] + ... + rows[first - 1]) / divisor` into `out`.

    The result has the bits of adding the rows by one `hop` after the other. `hop` describes the allowed dtypes.

    Args:
        out: output [S].
        rows: [W, S], one or more rows with adjacent elements.
        first: index of the row with which the sum begins. `None`: rows are added as a balanced binary tree, and `W`
            must be a power of two.
        divisor: as for `hop`.
        stats: optional output [P, 2]: statistics of the stored `out`.

    Raises:
        ValueError: as for `hop`; there is no row `first`; or `first` is `None` and `W` is not a power of two.
    """
    _check("add_rows", out, rows, first, divisor, stats)
    if not use_triton(out):
        _add_rows_cpu(out, rows, first, divisor)
        if stats is not None:
            stats_cpu(out, stats)
        return
    rows, begin, unroll = arguments_of(rows, first)
    launch(
        _add_rows_kernel,
        *(out, rows, stats, begin, len(rows), rows.stride(0), float(divisor)),
        n=out.numel(),
        block=block_size(out, rows) if stats is None else stats_block(out),
        UNROLL=unroll,
        TREE=first is None,
        NATIVE=out.dtype in NATIVE_DTYPES,
        DIVIDE=divisor > 1,
        STATS=stats is not None,
    )


def add_rows_reference(
    out: Tensor, rows: Tensor, first: int | None = 0, divisor: int = 1, stats: Tensor | None = None
) -> None:
    """Specification of `add_rows`."""
    _check("add_rows", out, rows, first, divisor, stats)
    accumulate = dtype_of_sums(out)
    if first is None:
        sums = rows.to(accumulate)
        while len(sums) > 1:
            sums = sums.to(rows.dtype).to(accumulate)
            sums = sums[::2] + sums[1::2]
        total = sums[0]
    else:
        total, *others = rows.roll(-first, 0).to(accumulate)
        for other in others:
            total = total.to(rows.dtype).to(accumulate) + other
    out.copy_(divided_reference(total, divisor))
    if stats is not None:
        stats_reference(out, stats)


def check_rows(who: str, rows: Tensor, first: int | None) -> None:
    """Check that `rows` can be added from row `first` on, or as a tree.

    Raises:
        ValueError: `rows` is not 2-D with adjacent elements; there is no row `first`; or `first` is `None` and the
            number of rows is not a power of two.
    """
    if rows.dim() != 2 or (rows.shape[1] > 1 and rows.stride(1) != 1):
        raise ValueError(
            f"{who}: rows must be 2-D with adjacent elements, got shape {tuple(rows.shape)}, strides {rows.stride()}"
        )
    if first is None and len(rows).bit_count() != 1:
        raise ValueError(f"{who}: the number of rows of a tree must be a power of two, got {len(rows)}")
    if first is not None and not 0 <= first < len(rows):
        raise ValueError(f"{who}: first is row {first}, but there are {len(rows)} rows")


def arguments_of(rows: Tensor, first: int | None) -> tuple[Tensor, int, int]:
    """Return the rows that a kernel adds, the index of the first row, and `UNROLL`.

    If a tree has too many rows to unroll, pairs of rows are added by PyTorch first. The sums of pairs are rounded to
    the dtype of the rows.
    """
    if first is None:
        while len(rows) > _MOST_UNROLLED:
            rows = rows[::2] + rows[1::2]
    return rows, first or 0, len(rows) if len(rows) <= _MOST_UNROLLED else 0


def _check(who: str, out: Tensor, rows: Tensor, first: int | None, divisor: int, stats: Tensor | None) -> None:
    check_rows(who, rows, first)
    row = rows[0]  # as every other row
    check_hop(who, out, row, row, divisor, stats)


def _add_rows_cpu(out: Tensor, rows: Tensor, first: int | None, divisor: int) -> None:
    if len(rows) == 1:
        out.copy_(rows[0] if divisor == 1 else rows[0].to(dtype_of_sums(out)) / divisor)
        return
    memory = torch.empty_like(rows[0, :CPU_CHUNK])
    for start in range(0, out.numel(), CPU_CHUNK):
        part = rows[:, start : start + CPU_CHUNK]
        if first is None:
            half = len(part) // 2
            received, own = _tree_cpu(part[:half]), _tree_cpu(part[half:])
        else:
            received, own = _ring_cpu(part, first, memory[: part.shape[1]])
        hop_cpu(out[start : start + CPU_CHUNK], received, own, divisor)


def _ring_cpu(rows: Tensor, first: int, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of all rows except the last in ring order, and the last row. Sums are written to `memory`."""
    total, *others, last = [*rows[first:], *rows[:first]]
    for other in others:
        hop_cpu(memory, total, other)
        total = memory
    return total, last


def _tree_cpu(rows: Tensor) -> Tensor:
    """Return the sum of rows as a tree, in new memory. The sum of one row is the row itself, which is not copied."""
    if len(rows) == 1:
        return rows[0]
    half = len(rows) // 2
    first, second = _tree_cpu(rows[:half]), _tree_cpu(rows[half:])
    total = torch.empty_like(first) if half == 1 else first
    hop_cpu(total, first, second)
    return total
