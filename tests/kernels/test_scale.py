"""`scale` against its reference and PyTorch: on the CPU, and as a kernel (`test_interpreter.py`)."""

import pytest
import torch
from shardlite_kernels import scale, scale_reference

from tests.kernels.bits import assert_same_bits, pairs

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FACTORS = (0.3, 1.0, 1 - 2**-12, 0.0, 1e-30, float("nan"), float("inf"))


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_are_those_of_pytorch_and_of_the_reference(dtype, factor, wide):
    x = pairs(20_005, seed=0)[0].to(dtype)
    factor = torch.tensor(factor, dtype=wide)
    got, reference, torchs = x.clone(), x.clone(), x.clone()
    scale(got, factor)
    scale_reference(reference, factor)
    torch._foreach_mul_([torchs], factor.to(dtype))
    assert_same_bits(got, reference)
    assert_same_bits(got, torchs)


def test_a_factor_of_1_writes_nothing():
    """One that is 1 in the dtype of the tensor is 1."""
    for dtype, factor in ((torch.float32, 1.0), (torch.bfloat16, 1 - 2**-12), (torch.float16, 1 - 2**-13)):
        x = torch.ones(8, dtype=dtype)
        version = x._version
        scale(x, torch.tensor(factor))
        assert x._version == version


def test_nothing_is_written_beyond_the_end():
    buffer = torch.full((32,), 8.0)
    scale(buffer[:17], torch.tensor(0.5))
    scale(buffer[:0], torch.tensor(0.5))
    assert buffer.tolist() == [4.0] * 17 + [8.0] * 15


X = torch.zeros(8)


@pytest.mark.parametrize(
    ("x", "factor", "message"),
    [
        (X.view(2, 4), torch.tensor(0.5), "x must be 1-D and contiguous"),
        (torch.zeros(16)[::2], torch.tensor(0.5), "x must be 1-D and contiguous"),
        (X.int(), torch.tensor(0.5), "x must be fp32, bf16, fp16 or fp64, got torch.int32"),
        (X, torch.tensor([0.5]), r"factor must be a single fp32 or fp64 number on cpu, got shape \(1,\)"),
        (X, torch.tensor(0.5).half(), "got .*, torch.float16 on cpu"),
        (X, torch.tensor(0.5, device="meta"), "on meta"),
    ],
)
def test_errors_name_what_does_not_fit(x, factor, message):
    with pytest.raises(ValueError, match=message):
        scale(x, factor)
