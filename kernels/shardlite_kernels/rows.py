"""Add the summands of a ring reduction when the summands of all ranks are already in this rank's memory.

Rank `k` has one row from each rank, which contains that rank's summand of segment `k`. A ring adds this segment in the
order `k+1, k+2, ..., k`, and `add_rows` adds the rows in the same order, from row `first = k+1` on. Partial sums are
rounded to the dtype of the rows, in which a ring would send partial sums. So the result has the bits of the ring.

If ranks exchange their summands inside their buckets (`shardlite/comm/transport/group_collectives.py`), the received
summands follow each other in memory, starting with the summand of the previous rank. The first `D` elements of this
stream are in `staged` [D], the rest in the bucket, from row `k+1` on, wrapping around at the end of the bucket. The
kernel adds them from the last to the first, and then row `k`, which is the order of the ring again:

    W=5, k=0, D=S              row 0   row 1   row 2   row 3   row 4   staged
    has the summand of rank    0       3       2       1       -       4
    W=3, k=0, D=S/2            0 0     2 1     1 -                     2          a summand in two places

With `first=None` the rows are added as a balanced binary tree instead, `((0 + 1) + (2 + 3)) + ...`, which is the order
of recursive halving. A row may itself be the sum of a balanced tree. The result then has the bits of the larger tree.

Bytes per element: each summand is read once and `out` is written once, which is `4 * W + 4` in fp32. Statistics of
`out` cost 8 bytes per block.
Legend: `W` ranks and rows, `S` elements, `D` staged elements, `P` rows of statistics (`stats.py`).
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .hop import NATIVE_DTYPES, check_hop, divided_reference, dtype_of_sums, hop_cpu, write_mean
from .launch import CPU_CHUNK, block_size, check_flat, constexpr, jit, launch, tl, use_triton
from .rounding import as_stored, load_wide
from .stats import stats_block, stats_cpu, stats_reference

_MOST_UNROLLED = 64
"""Maximum number of rows for which the kernel is unrolled: all loads then overlap. More rows are added in a loop."""


_TREE = -1

TREE = constexpr(_TREE)
"""Value of `STAGED` for rows that are added as a tree."""


@jit
def _pointers(
    rows_ptr: tl.tensor,
    staged_ptr: tl.tensor,
    offsets: tl.tensor,
    i: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    shift: tl.tensor,
    start: tl.tensor,
    STAGED: tl.constexpr,
) -> tl.tensor:
    """Return pointers to the elements at `offsets` of the summand that is added at place `i` of `count`."""
    row = begin.to(tl.int64) + i
    row = tl.where(row < count, row, row - count)
    offsets += start
    pointers = rows_ptr + row * stride + offsets
    if STAGED > 0:
        length = stride.to(tl.int64)
        received = (count - 2 - i) * length + offsets  # places in the stream of received elements
        place = begin * length + received - shift
        place = tl.where(place < count * length, place, place - count * length)
        # Which summands may be staged is known when the kernel is compiled, if the rows are added without a loop.
        staged = (i >= count - 1 - STAGED) & (received < shift)
        pointers = tl.where(i == count - 1, pointers, tl.where(staged, staged_ptr + received, rows_ptr + place))
    return pointers


@jit
def sum_rows(
    rows_ptr: tl.tensor,
    staged_ptr: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    shift: tl.tensor,
    start: tl.tensor,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Return the sum of the elements at `offsets` of `count` summands, from the summand of rank `begin` on.

    `STAGED` is the number of summands of which elements are staged, and `shift` the number of staged elements.
    `UNROLL` is `count`, or 0 to add the rows in a loop. With `NATIVE` rows are added in their dtype. Otherwise they are
    added in fp32, and partial sums are rounded to the dtype of the rows.
    """
    known = count if UNROLL == 0 else UNROLL
    pointers = _pointers(rows_ptr, staged_ptr, offsets, 0, begin, known, stride, shift, start, STAGED)
    total = load_wide(pointers, 0, mask, NATIVE)
    for i in tl.static_range(1, UNROLL):
        if i > 1:
            total = as_stored(rows_ptr, total, NATIVE)
        pointers = _pointers(rows_ptr, staged_ptr, offsets, i, begin, known, stride, shift, start, STAGED)
        total += load_wide(pointers, 0, mask, NATIVE)
    if UNROLL == 0:
        for i in tl.range(1, count):
            pointers = _pointers(rows_ptr, staged_ptr, offsets, i, begin, count, stride, shift, start, STAGED)
            # In the first iteration `total` is a row, which rounding does not change.
            total = as_stored(rows_ptr, total, NATIVE)
            total += load_wide(pointers, 0, mask, NATIVE)
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
    shift: tl.tensor,
    start: tl.tensor,
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
        places = begin, count, stride, shift, start
        total = sum_rows(rows_ptr, staged_ptr, offsets, mask, *places, UNROLL, STAGED, NATIVE)
    write_mean(out_ptr, stats_ptr, total, divisor, offsets, mask, NATIVE, DIVIDE, STATS)


def add_rows(
    out: Tensor,
    rows: Tensor,
    first: int | None = 0,
    divisor: int = 1,
    stats: Tensor | None = None,
    staged: Tensor | None = None,
    start: int = 0,
) -> None:
    """Write `(rows[first] + rows[first + 1] + ... + rows[first - 1]) / divisor` into `out`.

    With `staged`, add the summands of an exchange inside the bucket `rows` in this order, which ends with row
    `first - 1`.

    The result has the bits of adding the rows by one `hop` after the other. `hop` describes the allowed dtypes.

    Args:
        out: output [S]. It may be the row that is added last. With `staged`, it may be shorter.
        rows: [W, S], one or more rows with adjacent elements. With `staged`, rows must be adjacent, too.
        first: index of the row with which the sum begins. `None`: rows are added as a balanced binary tree, and `W`
            must be a power of two.
        divisor: as for `hop`.
        stats: optional output [P, 2]: statistics of the stored `out`.
        staged: optional [D], the first received elements, from 1 to `(W - 1) * S`.
        start: with `staged`, the element of the summands that belongs to `out[0]`.

    Raises:
        ValueError: as for `hop`; there is no row `first`; `first` is `None` and `W` is not a power of two; or `staged`
            does not fit `rows` or a tree.
    """
    _check("add_rows", out, rows, first, divisor, stats, staged, start)
    if not use_triton(out):
        _add_rows_cpu(out, rows, first, divisor, staged, start)
        if stats is not None:
            stats_cpu(out, stats)
        return
    rows, places, unroll, number = arguments_of(rows, first, staged, start)
    launch(
        _add_rows_kernel,
        *(out, rows, staged, stats, *places, float(divisor)),
        n=out.numel(),
        block=block_size(out, rows) if stats is None else stats_block(out),
        UNROLL=unroll,
        STAGED=number,
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
    start: int = 0,
) -> None:
    """Specification of `add_rows`."""
    _check("add_rows", out, rows, first, divisor, stats, staged, start)
    accumulate = dtype_of_sums(out)
    if first is None:
        sums = rows.to(accumulate)
        while len(sums) > 1:
            sums = sums.to(rows.dtype).to(accumulate)
            sums = sums[::2] + sums[1::2]
        total = sums[0]
    else:
        summands = rows.roll(-first, 0)
        if staged is not None:
            received = torch.cat([staged, summands.flatten()])[: summands[1:].numel()]  # of the previous rank first
            summands = torch.cat([received.view_as(summands[1:]).flip(0), summands[-1:]])
            summands = summands[:, start : start + out.numel()]
        total, *others = summands.to(accumulate)
        for other in others:
            total = total.to(rows.dtype).to(accumulate) + other
    out.copy_(divided_reference(total, divisor))
    if stats is not None:
        stats_reference(out, stats)


def _in_ring_order(rows: Tensor, first: int, staged: Tensor | None, start: int, stop: int) -> list[Tensor]:
    """Return elements `start` to `stop` of the summands, in the order in which they are added.

    With `staged` [D], these elements must be on one side of element `D % S`, so that they are in one place.
    """
    if staged is None:
        return [*rows[first:, start:stop], *rows[:first, start:stop]]
    count, length = rows.shape
    moved, found = rows.view(-1), []
    for at in range((count - 2) * length + start, -1, -length):
        place = (first * length + at - len(staged)) % rows.numel()
        found.append((staged[at:] if at < len(staged) else moved[place:])[: stop - start])
    return [*found, rows[first - 1, start:stop]]


def row_of(rows: Tensor, staged: Tensor | None, start: int, numel: int) -> Tensor:
    """Return the part of a row that is added, whose length and dtype those of the result must fit.

    With `staged`, these are the `numel` elements from `start` on, or fewer if a row ends before.
    """
    return rows[0] if staged is None else rows[0, start : start + numel]


def check_rows(who: str, rows: Tensor, first: int | None, staged: Tensor | None = None) -> None:
    """Check that `rows`, and `staged` rows, can be added from row `first` on, or as a tree.

    Raises:
        ValueError: `rows` is not 2-D with adjacent elements; there is no row `first`; `first` is `None` and the number
            of rows is not a power of two; or `staged` does not fit `rows` or a tree.
    """
    if rows.dim() != 2 or (rows.shape[1] > 1 and rows.stride(1) != 1):
        got = f"shape {tuple(rows.shape)}, strides {rows.stride()}"
        raise ValueError(f"{who}: rows must be 2-D with adjacent elements, got {got}")
    if staged is not None:
        _check_staged(who, rows, first, staged)
    if first is None and len(rows).bit_count() != 1:
        raise ValueError(f"{who}: the number of rows of a tree must be a power of two, got {len(rows)}")
    if first is not None and not 0 <= first < len(rows):
        raise ValueError(f"{who}: first is row {first}, but there are {len(rows)} rows")


def _check_staged(who: str, rows: Tensor, first: int | None, staged: Tensor) -> None:
    check_flat(who, "staged", staged, (rows.dtype,), numel=len(staged), device=rows.device)
    if first is None or not rows.is_contiguous() or not 1 <= len(staged) <= rows[1:].numel():
        got = f"shape {tuple(rows.shape)}, strides {rows.stride()}"
        raise ValueError(f"{who}: {len(staged)} staged elements do not fit rows of {got}, added from row {first}")


def arguments_of(
    rows: Tensor, first: int | None, staged: Tensor | None, start: int
) -> tuple[Tensor, tuple[int, ...], int, int]:
    """Return the rows that a kernel adds, its arguments from `begin` to `start`, `UNROLL` and `STAGED`.

    If a tree has too many rows to unroll, pairs of rows are added by PyTorch first. The sums of pairs are rounded to
    the dtype of the rows.
    """
    if first is None:
        while len(rows) > _MOST_UNROLLED:
            rows = rows[::2] + rows[1::2]
        number = _TREE
    else:
        number = 0 if staged is None else -(-len(staged) // max(rows.shape[1], 1))
    places = first or 0, len(rows), rows.stride(0), 0 if staged is None else len(staged), start
    return rows, places, len(rows) if len(rows) <= _MOST_UNROLLED else 0, number


def _check(
    who: str,
    out: Tensor,
    rows: Tensor,
    first: int | None,
    divisor: int,
    stats: Tensor | None,
    staged: Tensor | None,
    start: int,
) -> None:
    check_rows(who, rows, first, staged)
    row = row_of(rows, staged, start, out.numel())
    check_hop(who, out, row, row, divisor, stats)


def _add_rows_cpu(
    out: Tensor, rows: Tensor, first: int | None, divisor: int, staged: Tensor | None, start: int
) -> None:
    if len(rows) == 1:
        out.copy_(rows[0] if divisor == 1 else rows[0].to(dtype_of_sums(out)) / divisor)
        return
    memory = torch.empty_like(rows[0, :CPU_CHUNK])
    stop = start + out.numel()
    cut = stop if staged is None else min(max(start, len(staged) % rows.shape[1]), stop)
    for begin, end in ((start, cut), (cut, stop)):
        for low in range(begin, end, CPU_CHUNK):
            high = min(low + CPU_CHUNK, end)
            if first is None:
                half = len(rows) // 2
                received, own = _tree_cpu(rows[:half, low:high]), _tree_cpu(rows[half:, low:high])
            else:
                received, own = _ring_cpu(_in_ring_order(rows, first, staged, low, high), memory[: high - low])
            hop_cpu(out[low - start : high - start], received, own, divisor)


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
