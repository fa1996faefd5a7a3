"""`hop` on the CPU against its reference and against PyTorch. The Triton kernel is tested in `interpreted/`."""

from itertools import product

import pytest
import torch
from shardlite_kernels import hop, hop_reference, new_stats, stats, stats_rows

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


def test_nothing_to_add():
    out = torch.empty(0)
    hop(out, torch.empty(0), torch.empty(0), 2)
    assert out.numel() == 0


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


X = torch.zeros(8)


def test_statistics_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"hop: statistics of 8 elements .* \[1, 2\] of torch.float32, got \[2, 2\]"):
        hop(X, X, X, 1, torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"hop: there are no statistics of torch.int32"):
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
