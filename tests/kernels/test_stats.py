"""`stats` and `stats_total` against their references: on the CPU, and as a kernel (`test_interpreter.py`)."""

import threading

import pytest
import torch
from shardlite_kernels import new_stats, stats, stats_block
from shardlite_kernels.stats import stats_reference, stats_rows, stats_total

from tests.kernels.bits import assert_same_bits
from tests.kernels.stats_cases import FLOATS, assert_rows, awkward, countable, finite, numels


def rows_of(values):
    rows = new_stats(values).fill_(-7)
    stats(values, rows)
    return rows


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("numel", numels())
def test_rows_are_those_of_the_reference(numel, dtype):
    for values in (finite(numel, dtype), awkward(max(numel, 900), 1).to(dtype)):
        rows = rows_of(values)
        assert rows.shape == (stats_rows(values.numel(), values), 2)
        assert rows.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_rows(rows, values)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_element_counts_in_its_own_row(dtype):
    """Of exact sums only the root is rounded, and its square: 3 roundings."""
    block = stats_block(torch.empty(0))
    values = countable(2 * block + 33, dtype)
    exact = torch.stack([each.double().square().sum() for each in values.split(block)])
    got = rows_of(values)[:, 0].double()
    torch.testing.assert_close(got, exact, rtol=3 * 2**-24, atol=0)
    assert (exact.sum() * 3 * 2**-24 < 1).all(), "an element more or less would not be noticed"


def test_a_flag_is_raised_by_what_is_not_finite_and_by_nothing_else():
    block = stats_block(torch.empty(0))
    values = torch.full((4 * block,), 1e30)
    values[block + 3], values[2 * block], values[4 * block - 1] = float("nan"), float("-inf"), 3.4e38
    rows = rows_of(values)
    assert rows[:, 1].tolist() == [0, 1, 1, 0]
    assert not rows[:, 0].isfinite().any()


def test_the_reference_has_one_row_per_block():
    block = stats_block(torch.empty(0))
    values = torch.zeros(block + 2)
    values[0], values[block - 1], values[block + 1] = 3.0, 4.0, float("inf")
    rows = new_stats(values)
    stats_reference(values, rows)
    assert rows.tolist() == [[25.0, 0.0], [float("inf"), 1.0]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_depend_on_no_number_of_threads(dtype):
    values = finite(numels()[-1], dtype)
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            seen.append(rows_of(values))
            other = threading.Thread(target=lambda: seen.append(rows_of(values)))
            other.start()
            other.join()
    finally:
        torch.set_num_threads(before)
    for rows in seen:
        assert_same_bits(rows, seen[0])


def test_a_total_is_the_sum_and_the_number_of_flags():
    rows = torch.tensor([[2.0**25, 0.0], [1.0, 0.0], [1.0, 1.0]])
    total = stats_total(rows)
    assert total.dtype == torch.float64
    assert total.tolist() == [2.0**25 + 2, 1.0], "added up in fp64"
    assert stats_total(rows[:2]).tolist() == [2.0**25 + 1, 0.0]
    assert stats_total(rows[:0]).tolist() == [0.0, 0.0]


X = torch.zeros(8)


@pytest.mark.parametrize(
    ("x", "rows", "message"),
    [
        (X.view(2, 4), new_stats(X), "x must be 1-D and contiguous"),
        (
            X,
            torch.zeros(2, 2),
            r"statistics of 8 elements of torch.float32 must be a contiguous \[1, 2\] of torch.float32",
        ),
        (X, torch.zeros(1, 2).double(), r"got \[1, 2\] of torch.float64"),
        (X, torch.zeros(1, 4)[:, ::2], "a contiguous"),
        (X.double(), torch.zeros(1, 2), "of torch.float64, got"),
        (X.int(), torch.zeros(1, 2), "statistics need fp32, bf16, fp16 or fp64, got torch.int32"),
        (X, torch.zeros(1, 2, device="meta"), "statistics are on meta, the elements on cpu"),
    ],
)
def test_errors_name_what_does_not_fit(x, rows, message):
    with pytest.raises(ValueError, match=message):
        stats(x, rows)
