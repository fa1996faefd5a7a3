"""Rows to be added, and their sum by one hop after the other: what `add_rows` is to equal, on a CPU and as a kernel."""

from itertools import product
from typing import Any

import torch
from shardlite_kernels import add_rows, hop
from shardlite_kernels.rows import add_rows_reference
from torch import Tensor

from tests.kernels.bits import assert_same_bits, pairs

NARROW = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = [*product(NARROW, NARROW), (torch.float64, torch.float64), (torch.int32, torch.int32)]
"""Dtypes of the result and of the rows."""


def drawn(numel: int, count: int, dtype: torch.dtype, stride: int = 0) -> Tensor:
    """Return rows [count, numel], as far apart as `stride`: numbers that are hard to round."""
    every = [each for seed in range(count // 2 + 1) for each in pairs(numel, seed)]
    if dtype == torch.int32:
        every = [(each.nan_to_num() % 1000).int() for each in every]
    memory = torch.zeros(count, max(stride, numel), dtype=dtype)
    memory[:, :numel] = torch.stack(every[:count]).to(dtype)
    return memory[:, :numel]


def exchanged_in_place(rows: Tensor, rank: int, count: int) -> dict[str, Any]:
    """Return the arguments of `add_rows` on a rank that has received `count` elements at a time.

    What arrives takes the place of what was sent before it, and the first `count` elements are staged.
    """
    ranks, length = rows.shape
    received = torch.cat([rows[rank - step] for step in range(1, ranks)])
    bucket = torch.full_like(rows, 77).contiguous()  # sent, and not written again
    bucket[rank] = rows[rank]
    places = ((rank + 1) * length + torch.arange(len(received) - count)) % rows.numel()
    bucket.view(-1)[places] = received[count:]
    return {"rows": bucket, "first": (rank + 1) % ranks, "staged": received[:count].clone()}


def hop_by_hop(out: torch.dtype, rows: Tensor, first: int, divisor: int) -> Tensor:
    """Return what a ring computes, which adds one row after the other and sends each sum on."""
    if len(rows) == 1:
        wide = out if out in (torch.float64, torch.int32) else torch.float32
        return (rows[0].to(wide) / divisor).to(out) if divisor > 1 else rows[0].to(out)
    total, *others, last = (rows[k % len(rows)].clone() for k in range(first, first + len(rows)))
    for other in others:
        hop(total, total, other)
    result = torch.empty_like(last, dtype=out)
    hop(result, total, last, divisor)
    return result


def pair_by_pair(out: torch.dtype, rows: Tensor, divisor: int) -> Tensor:
    """Return what recursive halving computes, in which neighbours add first and send each sum on."""
    sums = [row.clone() for row in rows]
    while len(sums) > 2:
        for first, second in zip(sums[::2], sums[1::2], strict=True):
            hop(first, first, second)
        sums = sums[::2]
    return hop_by_hop(out, torch.stack(sums), 0, divisor)


def assert_sums_have_the_bits_of_hops(out: torch.dtype, rows: Tensor, first: int | None) -> None:
    """Add up rows by `add_rows`, by its reference, and by hops: with and without a division."""
    for divisor in (1, 3) if out.is_floating_point else (1,):
        got, expected = torch.empty_like(rows[0], dtype=out), torch.empty_like(rows[0], dtype=out)
        add_rows(got, rows, first, divisor)
        add_rows_reference(expected, rows, first, divisor)
        assert_same_bits(got, expected)
        by_hops = pair_by_pair(out, rows, divisor) if first is None else hop_by_hop(out, rows, first, divisor)
        assert_same_bits(got, by_hops)
