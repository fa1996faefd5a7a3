"""`adamw` on the CPU against `torch.optim.AdamW(fused=True)`. The Triton kernel is tested in `interpreted/`."""

import pytest
import torch
from shardlite_kernels import (
    Hyper,
    adamw,
    adamw_cpu,
    adamw_reference,
    adamw_scalars,
    adamw_scalars_reference,
    hyper_table,
)

from tests.kernels.bits import assert_same_bits

HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


def torch_fused(param):
    betas = (HYPER.beta1, HYPER.beta2)
    return torch.optim.AdamW([param], HYPER.lr, betas, HYPER.eps, HYPER.weight_decay, fused=True)


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


def by_reference(*tensors, step, hyper):
    adamw_reference(*tensors, torch.tensor(adamw_scalars_reference(step, hyper)))


def steps(update, param, grads, **options):
    param, exp_avg, exp_avg_sq = param.clone(), torch.zeros_like(param), torch.zeros_like(param)
    for step, grad in enumerate(grads, start=1):
        update(param, grad, exp_avg, exp_avg_sq, step=step, hyper=HYPER, **options)
    return param, exp_avg, exp_avg_sq


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1024, 1027])
def test_cpu_tensors_get_the_bits_of_torch_fused(dtype, numel):
    torch.manual_seed(0)
    param, grads = torch.randn(numel).to(dtype), torch.randn(3, numel).to(dtype)
    for got, expected in zip(steps(adamw_cpu, param, grads), fused_twin(param, grads), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_widened(dtype):
    torch.manual_seed(0)
    numel = 300_000  # more than one chunk
    param, grads = torch.randn(numel), torch.randn(2, numel).to(dtype)
    for got, expected in zip(steps(adamw_cpu, param, grads), fused_twin(param, grads), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def in_fp64(param, grads):
    """The textbook, with fp64 throughout."""
    lr, beta1, beta2, eps, decay = HYPER
    p, m, v = param.double(), torch.zeros_like(param).double(), torch.zeros_like(param).double()
    for step, grad in enumerate(grads.double(), start=1):
        p = p * (1 - lr * decay)
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        p = p - lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
    return p, m, v


def test_reference_is_adamw():
    """Against fp64: the formula of CUDA weights with `1 - fp32(beta2)`, which is 1.3e-5 away from `1 - beta2`."""
    torch.manual_seed(0)
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
    torch.manual_seed(0)
    param, grads = torch.randn(300_000), torch.randn(2, 300_000).to(grad_dtype)
    scaled, scale = [(grad * 4096).clone() for grad in grads], 4096.0
    expected = fused_twin(param, [grad.float().clone() for grad in scaled], scale)
    for got, theirs in zip(steps(adamw_cpu, param, scaled, grad_scale=scale), expected, strict=True):
        torch.testing.assert_close(got, theirs, rtol=0, atol=0)
    torch.testing.assert_close(torch.stack(scaled), grads, rtol=0, atol=0)


def test_without_decay_odd_weights_stay():
    """fma(-0, -decay, -0) would be +0, and an infinite weight would become NaN."""
    param, zeros = torch.tensor([-0.0, float("inf"), float("-inf"), float("nan")]), torch.zeros(4)
    for hyper in (HYPER._replace(lr=0.0, weight_decay=0.0), HYPER._replace(lr=0.0), HYPER._replace(weight_decay=0.0)):
        got = param.clone()
        by_reference(got, zeros, zeros.clone(), zeros.clone(), step=1, hyper=hyper)
        torch.testing.assert_close(got, param, rtol=0, atol=0, equal_nan=True)
        assert got[0].signbit().item()


def test_an_infinity_that_was_found_stops_the_reference():
    tensors = list(torch.randn(4, 10).abs().unbind())
    before = [tensor.clone() for tensor in tensors]
    for flag in (1.0, 2.0, float("nan")):
        scalars = adamw_scalars_reference(3, HYPER, found_inf=flag, grad_scale=2.0)
        adamw_reference(*tensors, torch.tensor(scalars), unscale=True)
        torch.testing.assert_close(tensors, before, rtol=0, atol=0)


def test_nothing_to_step():
    tensors = [torch.empty(0) for _ in range(4)]
    adamw_cpu(*tensors, step=1, hyper=HYPER)
    assert tensors[0].numel() == 0


# Scalars

NUMBERS = [1, 2, 3, 4, 5, 7, 10, 31, 100, 999, 1000, 12345, 10**5, 10**6, 2**24]
BETAS = [0.0, 1e-30, 0.1, 0.5, 0.8, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9999, 0.99999, 1 - 2**-24]
RATES = [0.0, 1e-45, 1e-12, 3e-7, 1e-3, 0.1, 7.0, 1e30]


def random_hypers(rows):
    generator = torch.Generator().manual_seed(0)
    magnitudes = 10.0 ** (-8 * torch.rand(rows, 5, dtype=torch.float64, generator=generator))
    magnitudes[:, 1:3] = 1 - magnitudes[:, 1:3].clamp(min=1e-7)
    return [Hyper(*row) for row in magnitudes.tolist()]


def test_a_table_has_the_bits_of_scalars_computed_one_by_one():
    hypers = [
        Hyper(lr, b1, b2, 1e-8, decay) for lr in RATES for b1 in BETAS[::2] for b2 in BETAS for decay in (0.0, 0.1)
    ]
    hypers += random_hypers(2000)
    table = hyper_table(hypers, torch.device("cpu"))
    for step in NUMBERS:
        got = adamw_scalars(torch.full((len(hypers),), float(step)), table)
        assert_same_bits(got, torch.tensor([adamw_scalars_reference(step, hyper) for hyper in hypers]))


def test_every_early_step_has_the_same_bits():
    counts = torch.arange(1, 20_001, dtype=torch.float32)
    got = adamw_scalars(counts, hyper_table([HYPER], torch.device("cpu")).expand(len(counts), 5))
    assert_same_bits(got, torch.tensor([adamw_scalars_reference(step, HYPER) for step in range(1, 20_001)]))


def test_a_table_carries_the_flag_and_the_scale():
    table = hyper_table([HYPER, HYPER._replace(lr=2.0)], torch.device("cpu"))
    got = adamw_scalars(torch.tensor([1.0, 5.0]), table, found_inf=torch.tensor(1.0), grad_scale=torch.tensor(8.0))
    expected = [
        adamw_scalars_reference(step, hyper, found_inf=1.0, grad_scale=8.0)
        for step, hyper in ((1, HYPER), (5, HYPER._replace(lr=2.0)))
    ]
    assert_same_bits(got, torch.tensor(expected))


# Errors

X = torch.zeros(8)


@pytest.mark.parametrize(
    ("tensors", "changed", "message"),
    [
        ((X, torch.zeros(9), X, X), {}, "grad has 9 elements"),
        ((X, X, X.view(2, 4), X), {}, "exp_avg must be 1-D and contiguous"),
        ((X, X, X, X.bfloat16()), {}, "moments are torch.float32 and torch.bfloat16"),
        ((X.int(), X.int(), X.int(), X.int()), {}, "must be of a floating dtype and on the CPU, got torch.int32"),
        ((X, X.double(), X, X), {}, "a gradient in torch.float64"),
        ((X.bfloat16(), X, X.bfloat16(), X.bfloat16()), {}, "a gradient in torch.float32"),
        ((X, X, X, X), {"step": 0}, "got step 0"),
        ((X, X, X, X), {"hyper": HYPER._replace(beta2=1 - 1e-9)}, "betas must be in"),
    ],
)
def test_errors_name_what_does_not_fit(tensors, changed, message):
    with pytest.raises(ValueError, match=message):
        adamw_cpu(*tensors, **({"step": 1, "hyper": HYPER} | changed))


def test_a_table_of_a_beta_that_is_one_is_refused():
    with pytest.raises(ValueError, match=r"betas must be in \[0, 1\) in fp32, got 0\.9, 0\.999999999"):
        hyper_table([HYPER, HYPER._replace(beta2=1 - 1e-9)], torch.device("cpu"))


def test_the_kernel_refuses_cpu_tensors():
    with pytest.raises(ValueError, match="takes adamw_cpu"):
        adamw(X, X, X, X, torch.zeros(8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("first_step", [1, 10**6])
@pytest.mark.parametrize("numel", [1 << 20, 1_000_003])
def test_kernel_has_the_bits_of_torch_fused_on_cuda(first_step, numel):
    """At step 1 `beta^step` needs no `powf`, and after a million steps it has vanished: there every scalar is equal."""
    torch.manual_seed(0)
    param, grad = torch.randn(2, numel, device="cuda")
    moments = torch.randn(2, numel, device="cuda").mul_(1e-2).square_()
    twin = torch.nn.Parameter(param.clone())
    optimizer = torch_fused(twin)
    step = torch.tensor(float(first_step - 1), device="cuda")
    optimizer.state[twin] = {"step": step, "exp_avg": moments[0].clone(), "exp_avg_sq": moments[1].clone()}
    twin.grad = grad
    optimizer.step()
    param, exp_avg, exp_avg_sq = param.clone(), moments[0].clone(), moments[1].clone()
    table = hyper_table([HYPER], param.device)
    scalars = adamw_scalars(torch.full((1,), float(first_step), device="cuda"), table)
    adamw(param, grad.clone(), exp_avg, exp_avg_sq, scalars[0])
    expected = optimizer.state[twin]
    torch.testing.assert_close(exp_avg, expected["exp_avg"], rtol=0, atol=0)
    torch.testing.assert_close(exp_avg_sq, expected["exp_avg_sq"], rtol=0, atol=0)
    torch.testing.assert_close(param, twin.data, rtol=0, atol=0)
