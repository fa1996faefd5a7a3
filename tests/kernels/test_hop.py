"""`hop` against its reference and against PyTorch: on the CPU, and as a kernel (`test_interpreter.py`)."""

from itertools import product

import pytest
import torch
from shardlite_kernels import hop, new_stats, stats, stats_block
from shardlite_kernels.hop import hop_reference
from shardlite_kernels.stats import stats_rows

from tests.kernels.bits import assert_same_bits, pairs
from tests.kernels.stats_cases import assert_rows, awkward, finite, numels

NARROW = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("divisor", [1, 2, 3])
@pytest.mark.parametrize(("out", "received", "own"), list(product(NARROW, repeat=3)))
def test_every_mixture_of_narrow_dtypes_has_the_bits_of_the_reference(out, received, own, divisor):
    first, second = pairs(70_001, seed=divisor)  # more than one chunk
    got, expected = torch.empty(first.numel(), dtype=out), torch.empty(first.numel(), dtype=out)
    hop(got, first.to(received), second.to(own), divisor)
    hop_reference(expected, first.to(received), second.to(own), divisor)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", [torch.float64, *INTEGERS])
def test_other_dtypes_have_the_bits_of_the_reference(dtype):
    first, second = (torch.randint(0, 256, (2, 1000)) - 100).to(dtype)
    got, expected = torch.empty_like(first), torch.empty_like(first)
    for divisor in (1, 3) if dtype.is_floating_point else (1,):
        hop(got, first, second, divisor)
        hop_reference(expected, first, second, divisor)
        assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_reference_rounds_once(dtype):
    """fp64 holds the exact sum of these inputs, so its rounding to fp32 and to `dtype` is the right answer."""
    first, second = (t.to(dtype) for t in pairs(5000, seed=0))
    got = torch.empty_like(first)
    hop_reference(got, first, second, 3)
    in_fp32 = (first.double() + second.double()).float()
    assert_same_bits(got, (in_fp32.double() / 3).float().to(dtype))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_around(dtype):
    largest = torch.iinfo(dtype).max
    out = torch.empty(2, dtype=dtype)
    hop(out, torch.tensor([largest, 5], dtype=dtype), torch.tensor([1, 6], dtype=dtype))
    assert out.tolist() == [torch.iinfo(dtype).min, 11]


def test_fp64_is_added_and_divided_in_fp64():
    first, second = (t.double() + 1e-12 for t in pairs(1000, seed=1))
    out = torch.empty_like(first)
    hop(out, first, second, 3)
    assert_same_bits(out, (first + second) / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divisor", [1, 3])
@pytest.mark.parametrize("alias", ["received", "own"])
def test_out_may_be_an_input(dtype, divisor, alias):
    tensors = dict(zip(("received", "own"), (t.to(dtype) for t in pairs(1001, seed=2)), strict=True))
    expected = torch.empty_like(tensors["own"])
    hop_reference(expected, **tensors, divisor=divisor)
    hop(tensors[alias], **tensors, divisor=divisor)
    assert_same_bits(tensors[alias], expected)


def test_nothing_is_written_beyond_the_end():
    buffer = torch.full((32,), 7.0)
    hop(buffer[:17], torch.zeros(17), torch.zeros(17))
    hop(buffer[:0], torch.empty(0), torch.empty(0), 2)
    assert buffer.tolist() == [0.0] * 17 + [7.0] * 15


@pytest.mark.parametrize(("out", "wire"), [*product(NARROW, NARROW), (torch.float64, torch.float64)])
@pytest.mark.parametrize("divisor", [1, 3])
def test_statistics_are_those_of_what_was_stored(out, wire, divisor):
    """The sum has the bits that it has without them, and they have those of a pass afterwards."""
    for numel in numels():
        for first, second in (
            (finite(numel, wire, 1), finite(numel, wire, 2)),
            (awkward(numel + 900, 3).to(wire), awkward(numel + 900, 4).to(wire)),
        ):
            expected, got = (torch.empty(first.numel(), dtype=out) for _ in range(2))
            rows, passed = new_stats(got), new_stats(got)
            hop(expected, first, second, divisor)
            hop(got, first, second, divisor, rows)
            stats(expected, passed)
            assert_same_bits(got, expected)
            assert_same_bits(rows, passed)
            assert_rows(rows, expected)


def test_statistics_in_place():
    received, own = finite(70_000, torch.float32, 5), finite(70_000, torch.float32, 6)
    expected, rows = received + own, torch.empty(stats_rows(own.numel(), own), 2)
    hop(own, received, own, 1, rows)
    assert_same_bits(own, expected)
    assert_rows(rows, expected)


def test_an_overflow_in_the_rounding_is_found():
    """It is what is stored that counts: the sum is finite in fp32."""
    largest = torch.full((3,), 60000.0, dtype=torch.float16)
    out, rows = torch.empty_like(largest), torch.empty(1, 2)
    hop(out, largest, largest, 1, rows)
    assert rows[0, 1] == 1


def test_rows_of_a_part_are_written_to_no_other():
    block = stats_block(torch.empty(0))
    rows, values = torch.full((4, 2), -7.0), torch.ones(2 * block)
    hop(values, values, values, 1, rows[1:3])
    assert rows.tolist() == [[-7, -7], [4 * block, 0], [4 * block, 0], [-7, -7]]


X = torch.zeros(8)


def test_statistics_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"hop: statistics of 8 elements .* \[1, 2\] of torch.float32, got \[2, 2\]"):
        hop(X, X, X, 1, torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"hop: statistics need fp32, bf16, fp16 or fp64, got torch.int32"):
        hop(X.int(), X.int(), X.int(), 1, torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("out", "received", "own", "divisor", "message"),
    [
        (X, X, torch.zeros(9), 1, "own must have 8 elements on cpu, got 9"),
        (X, torch.zeros(2, 4), X, 1, "received must be 1-D and contiguous"),
        (torch.zeros(16)[::2], X, X, 1, "out must be 1-D and contiguous"),
        (X, X.double(), X, 1, "cannot add torch.float64 and torch.float32 into torch.float32"),
        (X, X.int(), X.int(), 1, "cannot add torch.int32"),
        (X.bool(), X.bool(), X.bool(), 1, "cannot add torch.bool"),
        (X.int(), X.int(), X.int(), 2, "torch.int32 cannot be divided by 2"),
        (X, X, X, 0, "divisor must be from 1"),
        (X, X, X, 2**24 + 1, "divisor must be from 1"),
        (X.to("meta"), X, X, 1, "received must have 8 elements on meta, got 8 on cpu"),
    ],
)
def test_errors_name_what_does_not_fit(out, received, own, divisor, message):
    with pytest.raises(ValueError, match=message):
        hop(out, received, own, divisor)
