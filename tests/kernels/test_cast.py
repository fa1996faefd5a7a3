"""`cast` against its reference and against exact arithmetic: on the CPU, and as a kernel (`test_interpreter.py`)."""

from fractions import Fraction
from itertools import product

import pytest
import torch
from shardlite_kernels import cast
from shardlite_kernels.cast import cast_reference
from torch import Tensor

from tests.kernels.bits import assert_same_bits, pairs
from tests.kernels.pack_cases import DTYPES, NARROW, near_ties


def sources(dtype: torch.dtype) -> Tensor:
    if dtype != torch.float64:
        return pairs(70_001, seed=0)[0].to(dtype)  # more than one chunk
    beyond = torch.tensor([1e300, -1e300, 1e39, 1e-300, -5e-324, 65519.999999999], dtype=dtype)
    return torch.cat([pairs(70_001, seed=0)[0].double(), beyond, *map(near_ties, NARROW)])


@pytest.mark.parametrize(("out", "source"), list(product(DTYPES, repeat=2)))
def test_every_pair_of_dtypes_has_the_bits_of_the_reference(out, source):
    x = sources(source)
    got, expected = x.new_empty(len(x), dtype=out), x.new_empty(len(x), dtype=out)
    cast(got, x)
    cast_reference(expected, x)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_reference_is_the_nearest_number(dtype):
    """No neighbour of it is nearer, in exact arithmetic; of two that are as near it is the even one."""
    x = near_ties(dtype)[::61].contiguous()
    rounded = torch.empty(len(x), dtype=dtype)
    cast_reference(rounded, x)
    checked = 0
    for exact, got in zip(x.tolist(), rounded, strict=True):
        bits = int(got.view(torch.int16)) & 0x7FFF
        if got.isfinite() and bits != 0:
            error = abs(Fraction(exact) - Fraction(got.item()))
            for step in (-1, 1):
                other = (got.view(torch.int16) + step).view(dtype)
                if other.isfinite():
                    theirs = abs(Fraction(exact) - Fraction(other.item()))
                    assert error < theirs or (error == theirs and bits % 2 == 0), exact
                    checked += 1
    assert checked > 1000


def test_nothing_to_cast():
    out = torch.empty(0)
    cast(out, torch.empty(0).bfloat16())
    assert out.numel() == 0


X = torch.zeros(8)


@pytest.mark.parametrize(
    ("out", "source", "message"),
    [
        (X, torch.zeros(9), "source must have 8 elements on cpu, got 9"),
        (X, torch.zeros(2, 4), "source must be 1-D and contiguous"),
        (torch.zeros(16)[::2], X, "out must be 1-D and contiguous"),
        (X.int(), X, "out must be fp32, bf16, fp16 or fp64, got torch.int32"),
        (X, X.bool(), "source must be fp32, bf16, fp16 or fp64, got torch.bool"),
        (X, X.to("meta"), "source must have 8 elements on cpu, got 8 on meta"),
    ],
)
def test_errors_name_what_does_not_fit(out, source, message):
    with pytest.raises(ValueError, match=message):
        cast(out, source)
