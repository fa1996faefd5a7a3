"""Casts and quantization, run by Triton's interpreter, against their references: equal to the bit."""

from itertools import product

import pytest
import torch
from shardlite_kernels import cast, cast_reference, dequantize, dequantize_reference, quantize, quantize_reference

from tests.kernels.bits import assert_same_bits, pairs
from tests.kernels.pack_cases import DTYPES, FLOATS, INPUTS, NARROW, inputs, near_ties, read, written

# The interpreter computes with numpy, which warns where a GPU just makes an infinity or a NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")


@pytest.mark.parametrize(("out", "source"), list(product(DTYPES, repeat=2)))
def test_cast(out, source):
    x = pairs(20_005, seed=0)[0].double()  # more than one program, not a multiple of 16
    if source == torch.float64:
        beyond = torch.tensor([1e300, -1e300, 1e39, 1e-300, -5e-324, 65519.999999999], dtype=source)
        x = torch.cat([x, beyond, *map(near_ties, NARROW)])
    x = x.to(source)
    got, expected = x.new_empty(len(x), dtype=out), x.new_empty(len(x), dtype=out)
    cast(got, x)
    cast_reference(expected, x)
    assert_same_bits(got, expected)


@pytest.mark.parametrize(("name", "source"), list(product(INPUTS, FLOATS)))
def test_quantize_and_dequantize(name, source):
    x = inputs()[name].to(source)
    coded = written(x, quantize)
    for got, expected in zip(coded, written(x, quantize_reference), strict=True):
        assert_same_bits(got, expected)
    for out in FLOATS:
        assert_same_bits(read(*coded, out, dequantize), read(*coded, out, dequantize_reference))


def test_rows_and_nothing_beyond_them():
    memory = torch.full((3, 112), 77, dtype=torch.uint8)
    codes, scales = memory[:, :96].view(torch.int8), memory[:, 96:99]
    x = torch.randn(3, 96)
    for row in range(3):
        quantize(codes[row], scales[row], x[row])
    assert (memory[:, 99:] == 77).all()
    out, expected = torch.full((300,), 7.0), torch.empty(288)
    dequantize(out[:288], codes, scales)
    dequantize_reference(expected, codes, scales)
    assert_same_bits(out[:288], expected)
    assert (out[288:] == 7).all()


def test_rows_that_take_several_programs_and_lie_gigabytes_apart():
    """The last row starts behind 2^31 codes, of which only those that are used are backed by memory."""
    rows, numel, apart = 4, 16_384 + 96, 2**30
    codes = torch.empty((rows - 1) * apart + numel, dtype=torch.int8).as_strided((rows, numel), (apart, 1))
    scales = torch.randint(0, 256, (rows, numel // 32), dtype=torch.uint8)
    codes.copy_(torch.randint(-127, 128, (rows, numel), dtype=torch.int8))
    out = torch.empty(rows * numel)
    dequantize(out, codes, scales)
    assert_same_bits(out, read(codes, scales, by=dequantize_reference))
