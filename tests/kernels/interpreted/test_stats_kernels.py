"""The kernels that take statistics and scale by them, run by Triton's interpreter, against their references."""

from itertools import product

import pytest
import torch
from shardlite_kernels import hop, hop_reference, new_stats, scale, scale_reference, stats, stats_block

from tests.kernels.bits import assert_same_bits
from tests.kernels.stats_cases import FLOATS, assert_rows, awkward, countable, finite, numels

# The interpreter computes with numpy, which warns where a GPU just makes an infinity or a NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")

NARROW = (torch.float32, torch.bfloat16, torch.float16)
HOPS = [*product(NARROW, NARROW), (torch.float64, torch.float64)]


@pytest.mark.parametrize(("out", "wire"), HOPS)
@pytest.mark.parametrize("divisor", [1, 3])
def test_a_hop_takes_statistics_of_what_it_stores(out, wire, divisor):
    for numel in numels():
        for received, own in (
            (finite(numel, wire, 1), finite(numel, wire, 2)),
            (awkward(numel + 900, 3).to(wire), awkward(numel + 900, 4).to(wire)),
        ):
            got, expected = (torch.empty(own.numel(), dtype=out) for _ in range(2))
            rows, reference = new_stats(got), new_stats(expected)
            hop(got, received, own, divisor, rows)
            hop_reference(expected, received, own, divisor, reference)
            assert_same_bits(got, expected)
            assert_rows(rows, expected)


def test_an_overflow_in_the_rounding_is_found():
    """It is what is stored that counts: the sum is finite in fp32."""
    largest = torch.full((3,), 60000.0, dtype=torch.float16)
    out, rows = torch.empty_like(largest), torch.empty(1, 2)
    hop(out, largest, largest, 1, rows)
    assert rows[0, 1] == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_pass_takes_the_same_statistics(dtype):
    """All sums are exact here, in any order."""
    block = stats_block(torch.empty(0))
    values = countable(2 * block + 33, dtype)
    rows = new_stats(values)
    stats(values, rows)
    assert rows[:, 0].tolist() == [each.double().square().sum() for each in values.split(block)]
    summed = new_stats(values)
    hop(values.clone(), values, torch.zeros_like(values), 1, summed)
    assert_same_bits(summed, rows)
    for numel in numels():
        values = awkward(numel + 900, 5).to(dtype)
        rows = new_stats(values)
        stats(values, rows)
        assert_rows(rows, values)


def test_rows_of_a_part_are_written_to_no_other():
    block = stats_block(torch.empty(0))
    rows = torch.full((4, 2), -7.0)
    values = torch.ones(2 * block)
    hop(values, values, values, 1, rows[1:3])
    assert rows.tolist() == [[-7, -7], [4 * block, 0], [4 * block, 0], [-7, -7]]


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1 - 2**-12, 0.0, 1e-30, float("nan")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_scale(dtype, factor, wide):
    x = awkward(20_005, 6).to(dtype)
    factor = torch.tensor(factor, dtype=wide)
    got, expected, torchs = x.clone(), x.clone(), x.clone()
    scale(got, factor)
    scale_reference(expected, factor)
    torch._foreach_mul_([torchs], factor.to(dtype))
    assert_same_bits(got, expected)
    assert_same_bits(got, torchs)


def test_scale_writes_nothing_beyond_the_end():
    buffer = torch.full((32,), 8.0)
    scale(buffer[:17], torch.tensor(0.5))
    assert buffer.tolist() == [4.0] * 17 + [8.0] * 15
    scale(buffer[:0], torch.tensor(0.5))
