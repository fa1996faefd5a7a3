"""`quantize` and `dequantize`: the format's promises, and the bits of the references.

They run on the CPU, and as kernels (`test_interpreter.py`).
"""

from itertools import product

import pytest
import torch
from shardlite_kernels.quantize import dequantize, dequantize_reference, quantize, quantize_reference

from tests.kernels.bits import assert_all_same_bits, assert_same_bits
from tests.kernels.pack_cases import FLOATS, INPUTS, inputs, read, written

EXACT = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("name", "source", "out"), list(product(INPUTS, FLOATS, FLOATS)))
def test_both_ways_have_the_bits_of_the_references(name, source, out):
    x = inputs()[name].to(source)
    coded = written(x)
    assert_all_same_bits(coded, written(x, quantize_reference))
    assert_same_bits(read(*coded, out), read(*coded, out, dequantize_reference))


@pytest.mark.parametrize(("name", "dtype"), list(product(INPUTS, EXACT)))
def test_reading_is_exact_and_writing_what_was_read_changes_nothing(name, dtype):
    coded = written(inputs()[name])
    values = read(*coded, dtype)
    assert_same_bits(values.double(), read(*coded).double())
    assert_all_same_bits(written(values), coded)


def test_fp16_is_exact_within_its_range():
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(-18, 16).repeat_interleave(20).view(-1, 1)
    x = (torch.rand(len(exponents), 32, generator=generator) * 1.98 - 0.99).mul(2.0**exponents)
    x[:, 0] = 2.0 ** exponents[:, 0]  # the largest
    coded = written(x.view(-1))
    assert_same_bits(read(*coded, torch.float16).float(), read(*coded))
    assert_all_same_bits(written(read(*coded, torch.float16)), coded)


@pytest.mark.parametrize("name", INPUTS)
def test_errors_are_within_the_bounds(name):
    """Half a step, or less than a step where a number is above 127.5 of them: of what is largest 1/127.5."""
    x = inputs()[name].double().view(-1, 32)
    x = x[x.isfinite().all(1)]
    got = read(*written(x.float().view(-1))).double().view(-1, 32)
    largest, error = x.abs().amax(1, keepdim=True), (got - x).abs()
    step = 2.0 ** (torch.frexp(largest).exponent - 7).double().clamp(min=-133)  # 1/64 of the power of two below
    assert (error <= torch.where(x.abs() <= 127.5 * step, step / 2, step)).all()
    assert (error <= torch.where(largest >= 2.0**-126, largest / 127.5, 2.0**-134)).all()


def test_ties_go_to_even_and_the_largest_code_is_127():
    x = torch.zeros(32)
    x[:8] = torch.tensor([64.0, 0.5, 1.5, 2.5, -0.5, -2.5, -63.5, 127.75])
    codes, scales = written(x)
    assert scales.tolist() == [133]  # a step of 1
    assert codes[:8].tolist() == [64, 0, 2, 2, 0, -2, -64, 127]
    assert written(-x)[0][7] == -127


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_poisons_its_block_and_no_other(bad):
    x = torch.randn(96)
    clean = read(*written(x))
    x[40] = bad
    codes, scales = written(x)
    assert scales[1] == 255
    assert not codes[32:64].any()
    for dtype in FLOATS:
        got = read(codes, scales, dtype)
        assert got[32:64].isnan().all()
        expected = clean.to(dtype)
        assert_same_bits(got[:32], expected[:32])
        assert_same_bits(got[64:], expected[64:])


def test_a_scale_of_255_is_nan_whatever_the_codes_are():
    codes, scales = torch.arange(-16, 16).to(torch.int8), torch.tensor([255], dtype=torch.uint8)
    assert read(codes, scales).isnan().all()


def test_rows_need_not_follow_each_other():
    memory = torch.full((3, 112), 77, dtype=torch.uint8)
    codes, scales = memory[:, :96].view(torch.int8), memory[:, 96:99]
    x = torch.randn(3, 96)
    for row in range(3):
        quantize(codes[row], scales[row], x[row])
    assert (memory[:, 99:] == 77).all()
    for by in (dequantize, dequantize_reference):
        out = torch.full((300,), 7.0)
        by(out[:288], codes, scales)
        assert_same_bits(out[:288], torch.cat([read(*written(row)) for row in x]))
        assert (out[288:] == 7).all()


def test_rows_may_lie_gigabytes_apart():
    """The last row starts behind 2^31 codes, of which only those that are used are backed by memory."""
    rows, numel, apart = 4, 16_384 + 96, 2**30
    codes = torch.empty((rows - 1) * apart + numel, dtype=torch.int8).as_strided((rows, numel), (apart, 1))
    scales = torch.randint(0, 256, (rows, numel // 32), dtype=torch.uint8)
    codes.copy_(torch.randint(-127, 128, (rows, numel), dtype=torch.int8))
    assert_same_bits(read(codes, scales), read(codes, scales, by=dequantize_reference))


X, Q, S = torch.zeros(64), torch.zeros(64, dtype=torch.int8), torch.zeros(2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("floats", "codes", "scales", "message"),
    [
        (torch.zeros(33), Q[:33], S, "a multiple of 32, with one scale per 32 codes, got .33. codes and .2. scales"),
        (X, Q, S[:1], "got .64. codes and .1. scales"),
        (X[:32], Q, S, "has 32 elements, but there are 64 codes"),
        (X.view(2, 32), Q, S, "must be 1-D and contiguous"),
        (X.double(), Q, S, "must be fp32, bf16 or fp16, got torch.float64"),
        (X, Q.int(), S, "codes must be int8 and scales uint8, got torch.int32 and torch.uint8"),
        (X, Q, S.to("meta"), "on cpu, codes on cpu, scales on meta"),
        (X, torch.zeros(128, dtype=torch.int8)[::2], S, "rows must be contiguous"),
    ],
)
def test_errors_name_what_does_not_fit(floats, codes, scales, message):
    with pytest.raises(ValueError, match=f"^quantize: .*{message}"):
        quantize(codes, scales, floats)
    with pytest.raises(ValueError, match=f"^dequantize: .*{message}"):
        dequantize(floats, codes, scales)


def test_quantize_writes_one_row():
    with pytest.raises(ValueError, match="codes must be 1-D"):
        quantize(Q.view(2, 32), S.view(2, 1), X)
