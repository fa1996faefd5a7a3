"""The kernels that add rows, run by Triton's interpreter, against their references: equal to the bit."""

import pytest
import torch
from shardlite_kernels import (
    add_rows,
    add_rows_adamw,
    add_rows_adamw_reference,
    new_stats,
    stats,
)

from tests.kernels.adamw_cases import FORMS, assert_same_state, mixed_table, random_grad, random_state
from tests.kernels.bits import assert_same_bits
from tests.kernels.rows_cases import (
    DTYPES,
    assert_sums_have_the_bits_of_hops,
    assert_trees_have_the_bits_of_hops,
    drawn,
    hop_by_hop,
)

# The interpreter computes with numpy, which warns where a GPU just makes an infinity or a NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")


@pytest.mark.parametrize(("out", "wire"), DTYPES)
@pytest.mark.parametrize(("count", "first"), [(2, 1), (4, 3)])
def test_add_rows(out, wire, count, first):
    rows = drawn(20_005, count, wire, stride=20_032)  # more than one program, not a multiple of 16
    assert_sums_have_the_bits_of_hops(out, rows, first)


@pytest.mark.parametrize(("out", "wire"), DTYPES)
@pytest.mark.parametrize("count", [2, 4])
def test_a_tree(out, wire, count):
    assert_trees_have_the_bits_of_hops(out, drawn(20_005, count, wire, stride=20_032))


@pytest.mark.parametrize("count", [1, 64, 128])
def test_trees_of_few_and_many_rows(count):
    """Of more than 64 rows pairs are added first."""
    assert_trees_have_the_bits_of_hops(torch.float32, drawn(1000, count, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 64, 65])
def test_few_and_many_rows(count, dtype):
    """Up to 64 the kernel's loop is unrolled."""
    rows = drawn(1000, count, dtype)
    got, first = torch.empty_like(rows[0]), count // 2
    add_rows(got, rows, first, 64)
    assert_same_bits(got, hop_by_hop(dtype, rows, first, 64))


@pytest.mark.parametrize("out", [torch.float32, torch.float64])
def test_statistics(out):
    rows = drawn(20_005, 3, out).nan_to_num(0.5, 2.0, -2.0)
    got = torch.empty_like(rows[0])
    mine, passed = new_stats(got), new_stats(got)
    add_rows(got, rows, 1, 4, mine)
    stats(got, passed)
    assert_same_bits(mine, passed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "count", "first"),
    [
        *((form, 3, 1) for form in FORMS),
        *((FORMS[0], *each) for each in ((1, 0), (2, 0), (8, 7), (70, 3), (8, None), (128, None))),
    ],
)
@pytest.mark.usefixtures("fused")
def test_a_step_by_the_sum(dtype, form, count, first):
    numel = 1003
    rows = torch.stack([random_grad(numel, seed, dtype) for seed in range(count)])
    mine, theirs = (random_state(form, numel, 0) for _ in range(2))
    my_bad, their_bad = (torch.zeros((), dtype=torch.int32) for _ in range(2))
    add_rows_adamw(mine, rows, mixed_table(numel), divisor=count, first=first, bad=my_bad)
    add_rows_adamw_reference(theirs, rows, mixed_table(numel), divisor=count, first=first, bad=their_bad)
    assert_same_state(mine, theirs)
    assert my_bad == their_bad == 0


def test_a_bad_sum_is_seen():
    rows, bad = torch.ones(3, 64), torch.zeros((), dtype=torch.int32)
    rows[1, 5] = float("inf")
    add_rows_adamw(random_state(FORMS[0], 64, 0), rows, mixed_table(64), divisor=3, bad=bad)
    assert bad == 1
