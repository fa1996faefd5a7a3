"""The fused multiply-add of the references against exact rational arithmetic."""

from fractions import Fraction
from itertools import product

import pytest
import torch
from shardlite_kernels.rounding import fma_reference

from tests.kernels.bits import AWKWARD, assert_same_bits


def nearest_even(exact: Fraction) -> float:
    """The fp32 number nearest to `exact`, ties to even, by integer arithmetic."""
    if exact == 0:
        return 0.0
    exponent = max(_floor_log2(abs(exact)), -126) - 23  # of the last bit; subnormal numbers share the smallest one
    quotient = round(abs(exact) / Fraction(2) ** exponent)  # Python rounds fractions half to even
    magnitude = quotient * Fraction(2) ** exponent
    value = float(magnitude) if magnitude < Fraction(2) ** 128 else float("inf")
    return value if exact > 0 else -value


def _floor_log2(x: Fraction) -> int:
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def assert_rounded(a, b, c):
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    expected = torch.tensor([nearest_even(e) for e in exact])
    torch.testing.assert_close(fma_reference(a, b, c), expected, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e25])
def test_random_numbers(scale):
    a, b, c = torch.randn(3, 5000)
    b, c = b * scale, c * scale * 10.0 ** torch.randint(-8, 9, (5000,))
    assert_rounded(a, b, c)


def test_subnormal_results_are_rounded_once():
    a, b, c = torch.randn(3, 5000)
    assert_rounded(a * 2.0**-70, b * 2.0**-70, c * 2.0**-140)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_sum_that_fp64_rounds_to_a_tie(sign):
    """1 + 2^-24 is halfway between two fp32 numbers; 2^-60 more or less decides, and fp64 cannot hold it."""
    a = torch.tensor([2.0**-30, -(2.0**-30)] * 2) * sign
    b = torch.full((4,), 2.0**-30)
    product_of_two = torch.tensor([1 + 2.0**-12]).expand(4)
    assert_rounded(a, b, torch.tensor([1.0, 1.0, 1 + 2.0**-23, 1 + 2.0**-23]) * sign)
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: a tie from the product, decided by the addend
    assert_rounded(product_of_two, product_of_two, a * 2.0**-30)
    naive = (product_of_two.double() * product_of_two.double() + (a * 2.0**-30).double()).float()
    assert (naive != fma_reference(product_of_two, product_of_two, a * 2.0**-30)).any(), "the case is too easy"


def test_infinities_nans_and_signed_zeros_follow_ieee():
    a, b, c = torch.tensor(list(product(AWKWARD, repeat=3))).T.contiguous()
    in_fp64 = a.double() * b.double() + c.double()
    special = ~in_fp64.isfinite() | (in_fp64 == 0)
    assert_same_bits(fma_reference(a, b, c)[special], in_fp64[special].float())
    finite = ~special
    assert_rounded(a[finite], b[finite], c[finite])


def test_a_python_float_as_factor():
    a, c = torch.randn(2, 1000)
    torch.testing.assert_close(fma_reference(a, 0.75, c), fma_reference(a, torch.tensor(0.75), c), rtol=0, atol=0)
