"""`add_rows` against its reference and a ring's hops: on the CPU, and as a kernel (`test_interpreter.py`)."""

import pytest
import torch
from shardlite_kernels import add_rows, new_stats, stats
from shardlite_kernels.rows import add_rows_reference

from tests.kernels.bits import assert_same_bits
from tests.kernels.rows_cases import DTYPES, assert_sums_have_the_bits_of_hops, drawn, exchanged_in_place, hop_by_hop

X = torch.zeros(8)


@pytest.mark.parametrize(("out", "wire"), DTYPES)
@pytest.mark.parametrize(("count", "first"), [(1, 0), (2, 0), (2, 1), (3, 2), (7, 4)])
def test_the_sum_has_the_bits_of_a_rings_hops(out, wire, count, first):
    assert_sums_have_the_bits_of_hops(out, drawn(70_001, count, wire, stride=70_016), first)  # more than one chunk


@pytest.mark.parametrize(("out", "wire"), DTYPES)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_tree_has_the_bits_of_hops_between_pairs(out, wire, count):
    assert_sums_have_the_bits_of_hops(out, drawn(70_001, count, wire), None)


def test_a_tree_does_not_depend_on_where_it_is_cut():
    """Rows that are sums of a tree each, as of ranks that have several parts, give the sum of the tree over all."""
    rows = drawn(1000, 16, torch.float32)
    whole, halves = torch.empty_like(rows[0]), torch.empty_like(rows[:2])
    add_rows(whole, rows, None, 16)
    for half, part in zip(halves, rows.split(8), strict=True):
        add_rows(half, part, None)
    again = torch.empty_like(whole)
    add_rows(again, halves, None, 16)
    assert_same_bits(again, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "first"), [(64, 62), (65, 32), (64, None), (128, None)])
def test_many_rows(count, first, dtype):
    """The kernel adds up to 64 without a loop; of a larger tree it adds pairs first."""
    assert_sums_have_the_bits_of_hops(dtype, drawn(1000, count, dtype), first)


PARTS = [(2, 1, 0.25), (2, 0, 1), (3, 0, 1 / 3), (4, 2, 0.5), (5, 3, 1), (8, 7, 7), (16, 2, 2), (16, 15, 1.9)]
"""Numbers of ranks, a rank, and how many summands, or which part of one, it receives at a time."""


@pytest.mark.parametrize(("out", "wire"), DTYPES)
@pytest.mark.parametrize(("count", "rank", "part"), PARTS)
@pytest.mark.parametrize("numel", [1024, 1003])
@pytest.mark.sample(2)
def test_rows_that_were_exchanged_in_place_are_added_in_the_order_of_the_ring(out, wire, count, rank, part, numel):
    rows = drawn(numel, count, wire)
    given = exchanged_in_place(rows, rank, int(part * numel))
    for divisor in (1, 3) if out.is_floating_point else (1,):
        got, expected = torch.empty_like(rows[0], dtype=out), torch.empty_like(rows[0], dtype=out)
        add_rows(got, **given, divisor=divisor)
        add_rows_reference(expected, **given, divisor=divisor)
        assert_same_bits(got, expected)
        assert_same_bits(got, hop_by_hop(out, rows, (rank + 1) % count, divisor))


@pytest.mark.parametrize(("count", "rank", "part"), [(2, 0, 0.5), (3, 2, 0.4), (5, 0, 1)])
def test_a_part_of_rows_that_were_exchanged_in_place(count, rank, part):
    rows = drawn(1000, count, torch.float32)
    given, whole = exchanged_in_place(rows, rank, int(part * 1000)), torch.empty_like(rows[0])
    add_rows(whole, **given)
    for start, stop in ((0, 96), (96, 608), (608, 1000)):
        got, expected = torch.empty_like(rows[0, start:stop]), torch.empty_like(rows[0, start:stop])
        add_rows(got, **given, start=start)
        add_rows_reference(expected, **given, start=start)
        assert_same_bits(got, whole[start:stop])
        assert_same_bits(expected, got)


@pytest.mark.parametrize(
    ("count", "rank", "staged"), [(64, 9, 8), (65, 64, 8), (65, 3, 64), (90, 0, 12), (90, 89, 0.7)]
)
def test_many_rows_that_were_exchanged_in_place(count, rank, staged):
    rows = drawn(1000, count, torch.bfloat16)
    got = torch.empty_like(rows[0])
    add_rows(got, **exchanged_in_place(rows, rank, int(1000 * staged)), divisor=3)
    assert_same_bits(got, hop_by_hop(torch.bfloat16, rows, (rank + 1) % count, 3))


def test_the_sum_may_take_the_place_of_the_row_that_is_added_last():
    rows = drawn(70_001, 5, torch.float32).nan_to_num(0.5, 2.0, -2.0)
    for staged in (70_001, 30_000):
        given = exchanged_in_place(rows, 2, staged)
        got, expected = given["rows"][2], hop_by_hop(torch.float32, rows, 3, 5)
        mine, passed = new_stats(got), new_stats(got)
        add_rows(got, **given, divisor=5, stats=mine)
        stats(expected, passed)
        assert_same_bits(got, expected)
        assert_same_bits(mine, passed)


@pytest.mark.parametrize(
    ("staged", "first", "message"),
    [
        (torch.zeros(2, 8), 0, "add_rows: staged must be 1-D"),
        (torch.zeros(17), 0, r"add_rows: 17 staged elements do not fit rows of shape \(3, 8\)"),
        (torch.zeros(0), 0, "add_rows: 0 staged elements do not fit rows"),
        (X, None, "add_rows: 8 staged elements do not fit rows of .*, added from row None"),
        (X.half(), 0, "add_rows: staged must be fp32, got torch.float16"),
        (X.to("meta"), 0, "add_rows: staged must have 8 elements on cpu, got 8 on meta"),
    ],
)
def test_staged_elements_that_do_not_fit_are_refused(staged, first, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        add_rows(X, torch.zeros(3, 8), first, staged=staged)


def test_rows_that_were_exchanged_in_place_must_be_adjacent():
    with pytest.raises(ValueError, match=r"8 staged elements do not fit rows of shape \(3, 8\), strides \(16, 1\)"):
        add_rows(X, torch.zeros(3, 16)[:, :8], staged=X)


def test_rows_may_be_apart():
    rows = drawn(1000, 3, torch.float32, stride=1024)
    got = torch.empty_like(rows[0])
    add_rows(got, rows, 1, 4)
    assert_same_bits(got, hop_by_hop(torch.float32, rows, 1, 4))


@pytest.mark.parametrize(
    ("out", "wire"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64)]
)
def test_statistics_are_those_of_the_sum(out, wire):
    rows = drawn(70_001, 3, wire).nan_to_num(0.5, 2.0, -2.0)
    got = torch.empty_like(rows[0], dtype=out)
    mine, passed = new_stats(got), new_stats(got)
    add_rows(got, rows, 0, 4, mine)
    stats(got, passed)
    assert_same_bits(mine, passed)
    add_rows_reference(got, rows, 0, 4, passed)
    assert (mine[:, 1] == passed[:, 1]).all()


def test_nothing_to_add():
    empty = torch.empty(0)
    add_rows(empty, torch.empty(3, 0), 2)
    assert empty.numel() == 0


@pytest.mark.parametrize(
    ("rows", "first", "message"),
    [
        (X, 0, "add_rows: rows must be 2-D"),
        (torch.zeros(8, 2).t(), 0, "add_rows: rows must be 2-D with adjacent elements"),
        (torch.zeros(0, 8), 0, "first is row 0, but there are 0 rows"),
        (torch.zeros(3, 8), 3, "first is row 3, but there are 3 rows"),
        (torch.zeros(3, 8), None, "add_rows: the number of rows of a tree must be a power of two, got 3"),
        (torch.zeros(3, 9), 0, "add_rows: received must have 8 elements on cpu, got 9"),
        (torch.zeros(3, 8).int(), 0, "add_rows: cannot add torch.int32 and torch.int32 into torch.float32"),
    ],
)
def test_errors_name_what_does_not_fit(rows, first, message):
    with pytest.raises(ValueError, match=message):
        add_rows(X, rows, first)
