"""Add the summands of a ring reduction when those of all ranks are already in this rank's memory.

Rank `k` has one row from each rank, which contains that rank's summand of segment `k`. A ring adds this segment in the
order `k+1, k+2, ..., k`, and `add_rows` adds the rows in the same order, from row `first = k+1` on. Partial sums are
rounded to the dtype of the rows, in which a ring would send partial sums. So the result has the bits of the ring.

If ranks exchange their summands inside their buckets (`shardlite/comm/transport/group_collectives.py`), the rows lie in
the reverse order, and `G` of them in `staged` [G, S]. The kernel then walks back from row `first`, and adds the staged
rows before the last row of this walk, which is the order of the ring again:

    W=5, G=1, k=0              row 0   row 1   row 2   row 3   row 4   staged
    has the summand of rank    0       3       2       1       -       4          first = 3: row 3, 2, 1, staged, 0

With `first=None` the rows are added as a balanced binary tree instead, `((0 + 1) + (2 + 3)) + ...`, which is the order
of recursive halving. A row may itself be the sum of a balanced tree. The result then has the bits of the larger tree.

Bytes per element: each summand is read once and `out` is written once, which is `4 * W + 4` in fp32. Statistics of
`out` cost 8 bytes per block.
Legend: `W` ranks and rows, `G` staged rows, `S` elements, `P` rows of statistics (`stats.py`).
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .hop import NATIVE_DTYPES, check_hop, divided_reference, dtype_of_sums, hop_cpu, write_mean
from .launch import CPU_CHUNK, block_size, constexpr, jit, launch, tl, use_triton
from .rounding import as_stored, load_wide
from .stats import stats_block, stats_cpu, stats_reference

_MOST_UNROLLED = 64
"""Maximum number of rows for which the kernel is unrolled: all loads then overlap. More rows are added in a loop."""


_TREE = -1

TREE = constexpr(_TREE)
"""Value of `STAGED` for rows that are added as a tree."""


@jit
def _following(row: tl.tensor, i: tl.tensor, count: tl.tensor, STAGED: tl.constexpr) -> tl.tensor:
    """Return the row at place `i` of the walk over `count` rows, given the row before. Staged rows keep its place."""
    if STAGED == 0:
        return tl.where(row + 1 < count, row + 1, 0)
    else:
        return tl.where(i < count - STAGED, tl.where(row > 0, row - 1, count - 1), row)


@jit
def _pointer(
    rows_ptr: tl.tensor,
    staged_ptr: tl.tensor,
    row: tl.tensor,
    i: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    staged_stride: tl.tensor,
    STAGED: tl.constexpr,
) -> tl.tensor:
    """Return the pointer to the row that is added at place `i` of `count` rows: row `row`, or a staged row."""
    if STAGED == 0:
        return rows_ptr + row * stride
    else:
        staged = tl.full((), 0, tl.int64) + (count - 2 - i)
        is_staged = (i >= count - 1 - STAGED) & (i < count - 1)
        return tl.where(is_staged, staged_ptr + staged * staged_stride, rows_ptr + row * stride)


@jit
def sum_rows(
    rows_ptr: tl.tensor,
    staged_ptr: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    staged_stride: tl.tensor,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Return the sum of `count` rows, added from row `begin` on, of which the last `STAGED` before the end are staged.

    `UNROLL` is `count`, or 0 to add the rows in a loop. With `NATIVE` rows are added in their dtype. Otherwise they are
    added in fp32, and partial sums are rounded to the dtype of the rows.
    """
    known = count if UNROLL == 0 else UNROLL
    row = begin.to(tl.int64)
    pointer = _pointer(rows_ptr, staged_ptr, row, 0, known, stride, staged_stride, STAGED)
    total = load_wide(pointer, offsets, mask, NATIVE)
    for i in tl.static_range(1, UNROLL):
        if i > 1:
            total = as_stored(rows_ptr, total, NATIVE)
        row = _following(row, i, known, STAGED)
        pointer = _pointer(rows_ptr, staged_ptr, row, i, known, stride, staged_stride, STAGED)
        total += load_wide(pointer, offsets, mask, NATIVE)
    if UNROLL == 0:
        for i in tl.range(1, count):
            row = _following(row, i, count, STAGED)
            pointer = _pointer(rows_ptr, staged_ptr, row, i, count, stride, staged_stride, STAGED)
            # In the first iteration `total` is a row, which rounding does not change.
            total = as_stored(rows_ptr, total, NATIVE)
            total += load_wide(pointer, offsets, mask, NATIVE)
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
    staged_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    staged_stride: tl.tensor,
    divisor: float,
    n: tl.tensor,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    NATIVE: tl.constexpr,
    DIVIDE: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    if STAGED == TREE:
        total = sum_tree(rows_ptr, offsets, mask, stride, 0, UNROLL, NATIVE)
    else:
        strides = stride, staged_stride
        total = sum_rows(rows_ptr, staged_ptr, offsets, mask, begin, count, *strides, UNROLL, STAGED, NATIVE)
    write_mean(out_ptr, stats_ptr, total, divisor, offsets, mask, NATIVE, DIVIDE, STATS)


def add_rows(
    out: Tensor,
    rows: Tensor,
    first: int | None = 0,
    divisor: int = 1,
    stats: Tensor | None = None,
    staged: Tensor | None = None,
) -> None:
    """Write `(rows[first] + rows[first + 1] + ... + rows[first - 1]) / divisor` into `out`.

    With `staged`, add `rows[first], rows[first - 1], ...` instead, `W - G` rows, and before the last of these
    `staged[G - 1], ..., staged[0]`.

    The result has the bits of adding the rows by one `hop` after the other. `hop` describes the allowed dtypes.

    Args:
        out: output [S]. It may be the row that is added last.
        rows: [W, S], one or more rows with adjacent elements.
        first: index of the row with which the sum begins. `None`: rows are added as a balanced binary tree, and `W`
            must be a power of two.
        divisor: as for `hop`.
        stats: optional output [P, 2]: statistics of the stored `out`.
        staged: optional rows [G, S] that are outside of `rows`, from 1 to `W - 1`.

    Raises:
        ValueError: as for `hop`; there is no row `first`; `first` is `None` and `W` is not a power of two; or `staged`
            does not fit `rows` or a tree.
    """
    _check("add_rows", out, rows, first, divisor, stats, staged)
    if not use_triton(out):
        _add_rows_cpu(out, rows, first, divisor, staged)
        if stats is not None:
            stats_cpu(out, stats)
        return
    rows, unroll = arguments_of(rows, first)
    launch(
        _add_rows_kernel,
        *(out, rows, staged, stats, first or 0, len(rows), rows.stride(0), stride_of(staged), float(divisor)),
        n=out.numel(),
        block=block_size(out, rows) if stats is None else stats_block(out),
        UNROLL=unroll,
        STAGED=count_staged(staged, first),
        NATIVE=out.dtype in NATIVE_DTYPES,
        DIVIDE=divisor > 1,
        STATS=stats is not None,
    )


def add_rows_reference(
    out: Tensor,
    rows: Tensor,
    first: int | None = 0,
    divisor: int = 1,
    stats: Tensor | None = None,
    staged: Tensor | None = None,
) -> None:
    """Specification of `add_rows`."""
    _check("add_rows", out, rows, first, divisor, stats, staged)
    accumulate = dtype_of_sums(out)
    if first is None:
        sums = rows.to(accumulate)
        while len(sums) > 1:
            sums = sums.to(rows.dtype).to(accumulate)
            sums = sums[::2] + sums[1::2]
        total = sums[0]
    else:
        total, *others = torch.stack(in_ring_order(rows, first, staged)).to(accumulate)
        for other in others:
            total = total.to(rows.dtype).to(accumulate) + other
    out.copy_(divided_reference(total, divisor))
    if stats is not None:
        stats_reference(out, stats)


def in_ring_order(rows: Tensor, first: int, staged: Tensor | None) -> list[Tensor]:
    """Return the rows [S] in the order in which they are added."""
    if staged is None:
        return [*rows[first:], *rows[:first]]
    *others, own = (rows[first - i] for i in range(len(rows) - len(staged)))
    return [*others, *reversed(staged.unbind()), own]


def count_staged(staged: Tensor | None, first: int | None) -> int:
    """Return the number of staged rows, or `TREE` if rows are added as a tree."""
    if first is None:
        return _TREE
    return 0 if staged is None else len(staged)


def stride_of(staged: Tensor | None) -> int:
    """Return the distance of staged rows, or 0 if there are none."""
    return 0 if staged is None else staged.stride(0)


def check_rows(who: str, rows: Tensor, first: int | None, staged: Tensor | None = None) -> None:
    """Check that `rows`, and `staged` rows, can be added from row `first` on, or as a tree.

    Raises:
        ValueError: `rows` is not 2-D with adjacent elements; there is no row `first`; `first` is `None` and the number
            of rows is not a power of two; or `staged` does not fit `rows` or a tree.
    """
    for name, each in (("rows", rows), ("staged", staged)):
        if each is not None and (each.dim() != 2 or (each.shape[1] > 1 and each.stride(1) != 1)):
            got = f"shape {tuple(each.shape)}, strides {each.stride()}"
            raise ValueError(f"{who}: {name} must be 2-D with adjacent elements, got {got}")
    if staged is not None:
        _check_staged(who, rows, first, staged)
    if first is None and len(rows).bit_count() != 1:
        raise ValueError(f"{who}: the number of rows of a tree must be a power of two, got {len(rows)}")
    if first is not None and not 0 <= first < len(rows):
        raise ValueError(f"{who}: first is row {first}, but there are {len(rows)} rows")


def _check_staged(who: str, rows: Tensor, first: int | None, staged: Tensor) -> None:
    if first is None or not 1 <= len(staged) < len(rows):
        raise ValueError(f"{who}: {len(staged)} staged rows do not fit {len(rows)} rows from row {first}")
    if (staged.shape[1], staged.dtype, staged.device) != (rows.shape[1], rows.dtype, rows.device):
        raise ValueError(
            f"{who}: staged must have {rows.shape[1]} elements of {rows.dtype} on {rows.device}, "
            f"got {staged.shape[1]} of {staged.dtype} on {staged.device}"
        )


def arguments_of(rows: Tensor, first: int | None) -> tuple[Tensor, int]:
    """Return the rows that a kernel adds, and `UNROLL`.

    If a tree has too many rows to unroll, pairs of rows are added by PyTorch first. The sums of pairs are rounded to
    the dtype of the rows.
    """
    if first is None:
        while len(rows) > _MOST_UNROLLED:
            rows = rows[::2] + rows[1::2]
    return rows, len(rows) if len(rows) <= _MOST_UNROLLED else 0


def _check(
    who: str,
    out: Tensor,
    rows: Tensor,
    first: int | None,
    divisor: int,
    stats: Tensor | None,
    staged: Tensor | None,
) -> None:
    check_rows(who, rows, first, staged)
    row = rows[0]  # as every other row
    check_hop(who, out, row, row, divisor, stats)


def _add_rows_cpu(out: Tensor, rows: Tensor, first: int | None, divisor: int, staged: Tensor | None) -> None:
    if len(rows) == 1:
        out.copy_(rows[0] if divisor == 1 else rows[0].to(dtype_of_sums(out)) / divisor)
        return
    memory = torch.empty_like(rows[0, :CPU_CHUNK])
    for start in range(0, out.numel(), CPU_CHUNK):
        here = slice(start, start + CPU_CHUNK)
        part = rows[:, here]
        if first is None:
            half = len(part) // 2
            received, own = _tree_cpu(part[:half]), _tree_cpu(part[half:])
        else:
            summands = in_ring_order(part, first, None if staged is None else staged[:, here])
            received, own = _ring_cpu(summands, memory[: part.shape[1]])
        hop_cpu(out[start : start + CPU_CHUNK], received, own, divisor)


def _ring_cpu(rows: Sequence[Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of all rows except the last, and the last row. Sums are written to `memory`."""
    total, *others, last = rows
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
