"""Each Triton kernel, run by Triton's interpreter, against its reference: equal to the bit."""

from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from shardlite_kernels import adamw, adamw_reference, hop, hop_reference
from shardlite_kernels.launch import use_triton

from tests.kernels.bits import assert_same_bits, pairs

# The interpreter computes with numpy, which warns where a GPU just makes an infinity or a NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")

NARROW = (torch.float32, torch.bfloat16, torch.float16)
NATIVE = (torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}


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
    adamw(empty, empty, empty, empty, step=1, weight_decay=0.1, **HYPER)
    assert empty.numel() == 0


@triton.jit
def _fma_kernel(out_ptr, a_ptr, c_ptr):
    tl.store(out_ptr, tl.fma(tl.load(a_ptr), tl.load(a_ptr), tl.load(c_ptr)))


def interpreted_fma_rounds_once():
    """(1 + 2^-12)^2 - 1 - 2^-11 is 2^-24, which a product rounded to fp32 has lost."""
    out, a, c = torch.empty(1), torch.tensor([1 + 2.0**-12]), torch.tensor([-1 - 2.0**-11])
    _fma_kernel[(1,)](out, a, c)
    return out.item() == 2.0**-24


@pytest.fixture
def fused():
    if not interpreted_fma_rounds_once():
        pytest.skip(f"the interpreter of Triton {triton.__version__} rounds a fused multiply-add twice")


def assert_adamw_is_the_reference(param, grad, exp_avg, exp_avg_sq, **hyper):
    mine, theirs = ([t.clone() for t in (param, exp_avg, exp_avg_sq)] for _ in range(2))
    for update, (p, m, v) in ((adamw, mine), (adamw_reference, theirs)):
        update(p, grad, m, v, **HYPER | hyper)
    for got, expected in zip(mine, theirs, strict=True):
        assert_same_bits(got, expected)
    assert not torch.equal(mine[1], exp_avg)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("grad_dtype", NARROW)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_adamw(grad_dtype, weight_decay, step):
    torch.manual_seed(step)
    param, grad, exp_avg, exp_avg_sq = torch.randn(4, 20_005)
    grad = grad.to(grad_dtype)
    hyper = {"step": step, "weight_decay": weight_decay}
    assert_adamw_is_the_reference(param, grad, exp_avg * 0.1, exp_avg_sq**2 * 0.01, **hyper)


@pytest.mark.usefixtures("fused")
def test_adamw_with_awkward_numbers():
    param, grad = pairs(1000, seed=3)
    exp_avg, exp_avg_sq = (t.roll(7) for t in pairs(1000, seed=4))
    assert_adamw_is_the_reference(param, grad, exp_avg, exp_avg_sq.abs(), step=3, weight_decay=0.1)


def test_adamw_takes_only_fp32_parameters():
    x = torch.zeros(8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"must be fp32, got torch\.float64"):
        adamw(x, x, x, x, step=1, weight_decay=0.1, **HYPER)
