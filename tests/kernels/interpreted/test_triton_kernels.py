"""Each Triton kernel, run by Triton's interpreter, against its reference: equal to the bit."""

from itertools import product

import pytest
import torch
from shardlite_kernels import hop, hop_reference
from shardlite_kernels.launch import use_triton

from tests.kernels.bits import assert_same_bits, pairs

# The interpreter computes with numpy, which warns where a GPU just makes an infinity or a NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")

NARROW = (torch.float32, torch.bfloat16, torch.float16)
NATIVE = (torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def test_cpu_tensors_are_interpreted_here():
    assert use_triton(torch.empty(1))


@pytest.mark.parametrize("divisor", [1, 2, 3])
@pytest.mark.parametrize(("out", "received", "own"), list(product(NARROW, repeat=3)))
def test_hop_narrow(out, received, own, divisor):
    first, second = pairs(20_005, seed=divisor)  # more than one program, not a multiple of 16
    got, expected = torch.empty(first.numel(), dtype=out), torch.empty(first.numel(), dtype=out)
    hop(got, first.to(received), second.to(own), divisor)
    hop_reference(expected, first.to(received), second.to(own), divisor)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", NATIVE)
def test_hop_native(dtype):
    first, second = (torch.randint(0, 256, (2, 1000)) - 100).to(dtype)
    got, expected = torch.empty_like(first), torch.empty_like(first)
    for divisor in (1, 3) if dtype.is_floating_point else (1,):
        hop(got, first, second, divisor)
        hop_reference(expected, first, second, divisor)
        assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alias", ["received", "own"])
def test_hop_out_may_be_an_input(dtype, alias):
    tensors = dict(zip(("received", "own"), (t.to(dtype) for t in pairs(20_000, seed=2)), strict=True))
    expected = torch.empty_like(tensors["own"])
    hop_reference(expected, **tensors, divisor=3)
    hop(tensors[alias], **tensors, divisor=3)
    assert_same_bits(tensors[alias], expected)


def test_hop_writes_nothing_beyond_the_end():
    buffer = torch.full((32,), 7.0)
    hop(buffer[:17], torch.zeros(17), torch.zeros(17))
    assert buffer.tolist() == [0.0] * 17 + [7.0] * 15


def test_nothing_to_do():
    empty = torch.empty(0)
    hop(empty, empty, empty)
    assert empty.numel() == 0
