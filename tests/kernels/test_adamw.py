"""`adamw` on the CPU against `torch.optim.AdamW(fused=True)`. The Triton kernel is tested in `interpreted/`."""

import pytest
import torch
from shardlite_kernels import adamw, adamw_reference

HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def fused_twin(param, grads):
    """The parameter and moments after PyTorch's fused optimizer took one step for each of `grads`."""
    param = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([param], **HYPER, fused=True)
    for grad in grads:
        param.grad = grad.to(param.dtype)
        optimizer.step()
    state = optimizer.state[param]
    return param.data, state["exp_avg"], state["exp_avg_sq"]


def steps(update, param, grads):
    param, exp_avg, exp_avg_sq = param.clone(), torch.zeros_like(param), torch.zeros_like(param)
    for step, grad in enumerate(grads, start=1):
        update(param, grad, exp_avg, exp_avg_sq, step=step, **HYPER)
    return param, exp_avg, exp_avg_sq


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1024, 1027])
def test_cpu_tensors_get_the_bits_of_torch_fused(dtype, numel):
    torch.manual_seed(0)
    param, grads = torch.randn(numel).to(dtype), torch.randn(3, numel).to(dtype)
    for got, expected in zip(steps(adamw, param, grads), fused_twin(param, grads), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_widened(dtype):
    torch.manual_seed(0)
    numel = 300_000  # more than one chunk
    param, grads = torch.randn(numel), torch.randn(2, numel).to(dtype)
    for got, expected in zip(steps(adamw, param, grads), fused_twin(param, grads), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def in_fp64(param, grads):
    """The textbook, with fp64 throughout."""
    lr, (beta1, beta2), eps, decay = HYPER.values()
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
    p, m, v = steps(adamw_reference, param, grads)
    exact_p, exact_m, exact_v = in_fp64(param, grads)
    weight = (1 - float(torch.tensor(0.999))) / (1 - 0.999)
    torch.testing.assert_close(m.double(), exact_m, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(v.double(), exact_v * weight, rtol=1e-6, atol=0)
    # Five steps of at most lr, each off by the 1.5e-5 that `1 - beta2^step` loses in fp32, and five roundings of p.
    torch.testing.assert_close(p.double(), exact_p, rtol=5 * 2**-24, atol=5 * 1e-3 * 2e-5)


def test_without_decay_a_negative_zero_stays():
    """fma(-0, -decay, -0) would be +0: PyTorch leaves the line out, and so must the formula."""
    hyper = HYPER | {"weight_decay": 0.0, "lr": 0.0}
    param, zeros = torch.tensor([-0.0]), torch.zeros(1)
    adamw_reference(param, zeros, zeros.clone(), zeros.clone(), step=1, **hyper)
    assert param.signbit().item()


def test_nothing_to_step():
    tensors = [torch.empty(0) for _ in range(4)]
    adamw(*tensors, step=1, **HYPER)
    assert tensors[0].numel() == 0


X = torch.zeros(8)


@pytest.mark.parametrize(
    ("tensors", "changed", "message"),
    [
        ((X, torch.zeros(9), X, X), {}, "grad has 9 elements"),
        ((X, X, X.view(2, 4), X), {}, "exp_avg must be 1-D and contiguous"),
        ((X, X, X, X.bfloat16()), {}, "moments are torch.float32 and torch.bfloat16"),
        ((X.int(), X, X, X), {}, "must be fp32, got torch.int32"),
        ((X, X.double(), X, X), {}, "a gradient in torch.float64"),
        ((X.bfloat16(), X, X.bfloat16(), X.bfloat16()), {}, "a gradient in torch.float32"),
        ((X, X, X, X), {"step": 0}, "got step 0"),
        ((X, X, X, X), {"betas": (0.9, 1 - 1e-9)}, "betas"),
    ],
)
def test_errors_name_what_does_not_fit(tensors, changed, message):
    with pytest.raises(ValueError, match=message):
        adamw(*tensors, **({"step": 1} | HYPER | changed))


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
    optimizer = torch.optim.AdamW([twin], **HYPER, fused=True)
    step = torch.tensor(float(first_step - 1), device="cuda")
    optimizer.state[twin] = {"step": step, "exp_avg": moments[0].clone(), "exp_avg_sq": moments[1].clone()}
    twin.grad = grad
    optimizer.step()
    param, exp_avg, exp_avg_sq = param.clone(), moments[0].clone(), moments[1].clone()
    adamw(param, grad.clone(), exp_avg, exp_avg_sq, step=first_step, **HYPER)
    expected = optimizer.state[twin]
    torch.testing.assert_close(exp_avg, expected["exp_avg"], rtol=0, atol=0)
    torch.testing.assert_close(exp_avg_sq, expected["exp_avg_sq"], rtol=0, atol=0)
    torch.testing.assert_close(param, twin.data, rtol=0, atol=0)
