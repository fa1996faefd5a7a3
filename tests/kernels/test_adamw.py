"""AdamW on the CPU against `torch.optim.AdamW(fused=True)`. The Triton kernels are tested in `interpreted/`."""

import pytest
import torch
from shardlite_kernels import State
from shardlite_kernels.adamw import adamw, adamw_reference, reduce_adamw, reduce_adamw_reference
from shardlite_kernels.adamw_cpu import _CHUNK as CHUNK
from shardlite_kernels.adamw_cpu import CpuStep, adamw_cpu, reduce_adamw_cpu

from tests.kernels.adamw_cases import (
    FORMS,
    HYPER,
    assert_same_state,
    mixed_table,
    one_row,
    random_grad,
    random_state,
    torch_fused,
)
from tests.kernels.bits import assert_same_bits

by_form = pytest.mark.parametrize("form", FORMS, ids="-".join)


def fused_twin(param, grads, grad_scale=None):
    """The parameter and moments after PyTorch's fused optimizer took one step for each of `grads`."""
    param = torch.nn.Parameter(param.clone())
    optimizer = torch_fused(param)
    if grad_scale is not None:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(grad_scale), torch.zeros(())
    for grad in grads:
        param.grad = grad.to(param.dtype)
        optimizer.step()
    state = optimizer.state[param]
    return param.data, state["exp_avg"], state["exp_avg_sq"]


def by_reference(state, grad, step):
    adamw_reference(state, grad, one_row(len(grad), int(step.number), step.hyper))


def new_state(param):
    return State(param.clone(), torch.zeros_like(param), torch.zeros_like(param))


def steps(update, param, grads, **options):
    state = new_state(param)
    for number, grad in enumerate(grads, start=1):
        update(state, grad, CpuStep(number=number, hyper=HYPER, **options))
    return state[:3]


def assert_all_same(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


ALIKE = [(dtype, dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("dtype", "grad"), [*ALIKE, (torch.float32, torch.bfloat16), (torch.float32, torch.float16)])
@pytest.mark.parametrize("numel", [1024, 1027, CHUNK + 1])
def test_cpu_tensors_get_the_bits_of_torch_fused(dtype, grad, numel):
    """Narrow gradients are widened."""
    param, grads = torch.randn(numel).to(dtype), torch.randn(3, numel).to(grad)
    assert_all_same(steps(adamw_cpu, param, grads), fused_twin(param, grads))


def in_fp64(param, grads):
    """The textbook, with fp64 throughout."""
    lr, beta1, beta2, eps, decay, _ = HYPER
    p, m, v = param.double(), torch.zeros_like(param).double(), torch.zeros_like(param).double()
    for step, grad in enumerate(grads.double(), start=1):
        p = p * (1 - lr * decay)
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        p = p - lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
    return p, m, v


def test_reference_is_adamw():
    """Against fp64: the formula of CUDA weights with `1 - fp32(beta2)`, which is 1.3e-5 away from `1 - beta2`."""
    param, grads = torch.randn(2000), torch.randn(5, 2000)
    p, m, v = steps(by_reference, param, grads)
    exact_p, exact_m, exact_v = in_fp64(param, grads)
    weight = (1 - float(torch.tensor(0.999))) / (1 - 0.999)
    torch.testing.assert_close(m.double(), exact_m, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(v.double(), exact_v * weight, rtol=1e-6, atol=0)
    # Five steps of at most lr, each off by the 1.5e-5 that `1 - beta2^step` loses in fp32, and five roundings of p.
    torch.testing.assert_close(p.double(), exact_p, rtol=5 * 2**-24, atol=5 * 1e-3 * 2e-5)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_divided_by_their_scale_in_place(grad_dtype):
    param, grads = torch.randn(300_000), torch.randn(2, 300_000).to(grad_dtype)
    scaled, scale = [(grad * 4096).clone() for grad in grads], 4096.0
    expected = fused_twin(param, [grad.float().clone() for grad in scaled], scale)
    assert_all_same(steps(adamw_cpu, param, scaled, grad_scale=scale), expected)
    torch.testing.assert_close(torch.stack(scaled), grads, rtol=0, atol=0)


def test_without_decay_odd_weights_stay():
    """fma(-0, -decay, -0) would be +0, and an infinite weight would become NaN."""
    param, zeros = torch.tensor([-0.0, float("inf"), float("-inf"), float("nan")]), torch.zeros(4)
    for hyper in (HYPER._replace(lr=0.0, weight_decay=0.0), HYPER._replace(lr=0.0), HYPER._replace(weight_decay=0.0)):
        state = new_state(param)
        by_reference(state, zeros, CpuStep(number=1, hyper=hyper))
        torch.testing.assert_close(state.param, param, rtol=0, atol=0, equal_nan=True)
        assert state.param[0].signbit().item()


@by_form
def test_what_is_not_active_stops_the_reference(form):
    state, grad = random_state(form, 70, 0), random_grad(70, 0)
    before, given = state.clone(), grad.clone()
    adamw_reference(state, grad, one_row(70, 3, active=0.0, grad_scale=2.0), unscale=True)
    assert_same_state(state, before)
    assert_same_bits(grad, given)


@by_form
def test_rows_of_the_reference_are_steps_of_their_own(form):
    """What a launch with many rows does to the groups of one is what a launch over these alone does."""
    numel = 320
    state, grad, table = random_state(form, numel, 0), random_grad(numel, 0), mixed_table(numel)
    after = state.clone()
    adamw_reference(after, grad, table)
    for start in range(0, numel, 32):
        alone, row = state.part(start, start + 32).clone(), int(table.rows[start // 32])
        one = table.part(start, start + 32)
        one = one._replace(rows=one.rows * 0, keys=table.keys[row : row + 1], scalars=table.scalars[row : row + 1])
        adamw_reference(alone, grad[start : start + 32], one)
        assert_same_state(after.part(start, start + 32), alone)


@by_form
def test_the_reference_of_a_sum_adds_in_fp32(form):
    received, own, bad = random_grad(70, 0).bfloat16(), random_grad(70, 1).half(), torch.zeros((), dtype=torch.int32)
    mine, theirs = (random_state(form, 70, 0) for _ in range(2))
    reduce_adamw_reference(mine, received, own, mixed_table(70), divisor=3, bad=bad)
    adamw_reference(theirs, (received.float() + own.float()) / 3, mixed_table(70))
    assert_same_state(mine, theirs)
    assert bad == 0
    own[5] = float("inf")
    reduce_adamw_reference(mine, received, own, mixed_table(70), divisor=3, bad=bad)
    assert bad == 1


# Errors

X = torch.zeros(40)
HALF = X.bfloat16()


@pytest.mark.parametrize(
    ("state", "grad", "message"),
    [
        ((X, X, X), torch.zeros(41), "grad must have 40 elements on cpu, got 41"),
        ((X, X.view(2, 20), X), X, "exp_avg must be 1-D and contiguous"),
        ((X, X, HALF), X, "exp_avg_sq must be fp32, got torch.bfloat16"),
        ((X, X.double(), X.double()), X, "moments in torch.float64 cannot be combined with a param in torch.float32"),
        ((X.int(), X.int(), X.int()), X.int(), "must be floating-point and on the CPU, got torch.int32"),
        ((X, X, X), X.double(), "a gradient in torch.float64"),
        ((HALF, HALF, HALF), X, "a gradient in torch.float32"),
        ((X, HALF, HALF), X, "moments in torch.bfloat16 are rounded stochastically, so step.table is required"),
        ((X, X.to(torch.int8), X.to(torch.uint8)), X, "moments in int8 codes need exponents"),
        ((X, X, X, X.to(torch.int8)), X, "param must be bf16, got torch.float32"),
        ((HALF, X, X, X.to(torch.uint8)), X, "low must be int8, got torch.uint8"),
    ],
)
def test_errors_name_what_does_not_fit(state, grad, message):
    step = CpuStep(number=1, hyper=HYPER)
    with pytest.raises(ValueError, match=f"^adamw_cpu: .*{message}"):
        adamw_cpu(State(*state), grad, step)
    with pytest.raises(ValueError, match=f"^reduce_adamw_cpu: .*{message}"):
        reduce_adamw_cpu(State(*state), grad, grad, step)


def test_a_step_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="update numbers start at 1, got 0"):
        CpuStep(number=0, hyper=HYPER)
    with pytest.raises(ValueError, match="betas must be in"):
        CpuStep(number=1, hyper=HYPER._replace(beta2=1 - 1e-9))


def test_the_kernels_refuse_cpu_tensors():
    with pytest.raises(ValueError, match=r"^adamw: .*use adamw_cpu"):
        adamw(new_state(X), X, one_row(40))
    with pytest.raises(ValueError, match=r"^reduce_adamw: .*use adamw_cpu"):
        reduce_adamw(new_state(X), X, X, one_row(40))
