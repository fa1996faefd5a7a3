"""The AdamW kernel, run by Triton's interpreter, against its reference: equal to the bit."""

import pytest
import torch
from shardlite_kernels import Hyper, adamw, adamw_reference, adamw_scalars_reference

from tests.kernels.bits import assert_same_bits, pairs

# The interpreter computes with numpy, which warns where a GPU just makes an infinity or a NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")

HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


def scalars(step, hyper=HYPER, **flags):
    return torch.tensor(adamw_scalars_reference(step, hyper, **flags))


def assert_adamw_is_the_reference(tensors, row, unscale=False):
    mine, theirs = ([tensor.clone() for tensor in tensors] for _ in range(2))
    adamw(*mine, row, unscale=unscale)
    adamw_reference(*theirs, row, unscale=unscale)
    for got, expected in zip(mine, theirs, strict=True):
        assert_same_bits(got, expected)
    return mine


def random_tensors(grad_dtype, seed):
    torch.manual_seed(seed)
    param, grad, exp_avg, exp_avg_sq = torch.randn(4, 20_005)  # more than one program, not a multiple of 16
    return param, grad.to(grad_dtype), exp_avg * 0.1, exp_avg_sq**2 * 0.01


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_adamw(grad_dtype, weight_decay, step):
    tensors = random_tensors(grad_dtype, seed=step)
    after = assert_adamw_is_the_reference(tensors, scalars(step, HYPER._replace(weight_decay=weight_decay)))
    assert_same_bits(after[1], tensors[1])
    assert not any(torch.equal(after[index], tensors[index]) for index in (0, 2, 3))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adamw_divides_the_gradient_in_place(grad_dtype):
    tensors = random_tensors(grad_dtype, seed=0)
    after = assert_adamw_is_the_reference(tensors, scalars(7, grad_scale=3.0), unscale=True)
    assert_same_bits(after[1], (tensors[1].float() / 3).to(grad_dtype))


@pytest.mark.parametrize("found_inf", [1.0, 2.0, float("nan")])
@pytest.mark.parametrize("unscale", [False, True])
def test_adamw_changes_nothing_if_an_infinity_was_found(found_inf, unscale):
    tensors = random_tensors(torch.bfloat16, seed=0)
    row = scalars(7, found_inf=found_inf, grad_scale=3.0)
    for got, before in zip(assert_adamw_is_the_reference(tensors, row, unscale), tensors, strict=True):
        assert_same_bits(got, before)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("unscale", [False, True])
def test_adamw_with_awkward_numbers(weight_decay, unscale):
    param, grad = pairs(1000, seed=3)
    exp_avg, exp_avg_sq = (tensor.roll(7) for tensor in pairs(1000, seed=4))
    row = scalars(3, HYPER._replace(weight_decay=weight_decay), grad_scale=0.1)
    assert_adamw_is_the_reference((param, grad, exp_avg, exp_avg_sq.abs()), row, unscale)


@pytest.mark.parametrize("hyper", [HYPER._replace(weight_decay=0.0), HYPER._replace(lr=0.0)])
def test_adamw_without_decay_leaves_odd_weights_alone(hyper):
    param, zeros = torch.tensor([-0.0, 0.0, float("inf"), float("-inf"), float("nan")]), torch.zeros(5)
    after = assert_adamw_is_the_reference((param, zeros, zeros, zeros), scalars(1, hyper))
    assert_same_bits(after[0], param)


def test_adamw_writes_nothing_beyond_the_end():
    buffers = [torch.full((32,), 7.0) for _ in range(4)]
    adamw(*(buffer[:17] for buffer in buffers), scalars(1, grad_scale=2.0), unscale=True)
    for buffer in buffers:
        assert (buffer[:17] != 7).all()
        assert (buffer[17:] == 7).all()


def test_nothing_to_step():
    empty = torch.empty(0)
    adamw(empty, empty, empty, empty, scalars(1))
    assert empty.numel() == 0


X = torch.zeros(8)


@pytest.mark.parametrize(
    ("tensors", "row", "message"),
    [
        ([X.double()] * 4, X, r"must be fp32, got torch\.float64"),
        ((X, X, torch.zeros(9), X), X, "exp_avg has 9 elements"),
        ([X] * 4, torch.zeros(7), r"scalars must be a row of 8 fp32 numbers on cpu, got \(7,\)"),
        ([X] * 4, X.double(), "scalars must be a row of 8 fp32 numbers on cpu, got .*float64"),
        ([X] * 4, torch.zeros(16)[::2], "scalars must be a row"),
    ],
)
def test_errors_name_what_does_not_fit(tensors, row, message):
    with pytest.raises(ValueError, match=message):
        adamw(*tensors, row)
