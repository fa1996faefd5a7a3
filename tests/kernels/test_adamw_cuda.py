"""The AdamW kernels on a GPU: against PyTorch's fused optimizer, and against their references."""

import pytest
import torch
from shardlite_kernels import State
from shardlite_kernels.adamw import adamw, adamw_reference, reduce_adamw, reduce_adamw_reference
from shardlite_kernels.scalars import adamw_scalars, hyper_table

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

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_device(table, device="cuda"):
    return table._replace(rows=table.rows.to(device), keys=table.keys.to(device), scalars=table.scalars.to(device))


def state_on_device(state, device="cuda"):
    return State(*(None if tensor is None else tensor.to(device) for tensor in state))


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
    summed, alone = (State(param.clone(), moments[0].clone(), moments[1].clone()) for _ in range(2))
    scalars = adamw_scalars(torch.full((1,), float(first_step), device="cuda"), hyper_table([HYPER], param.device))
    table = on_device(one_row(numel))._replace(scalars=scalars)
    adamw(alone, grad.clone(), table)
    reduce_adamw(summed, torch.zeros_like(grad), grad, table)
    for state in (alone, summed):
        expected = [twin.data, *(optimizer.state[twin][name] for name in ("exp_avg", "exp_avg_sq"))]
        torch.testing.assert_close(list(state[:3]), expected, rtol=0, atol=0)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("form", [form for form in FORMS if form[1] != "int8"], ids="-".join)
def test_kernel_has_the_bits_of_the_reference(form, unscale, grad_dtype):
    """Also of a sum. Codes are made with approximate roots there, so these are compared by their distance below."""
    numel = 20_005
    state = state_on_device(random_state(form, numel, 0))
    table, grad = on_device(mixed_table(numel)), random_grad(numel, 0, grad_dtype).cuda()
    (mine, theirs), (my_grad, their_grad) = (state.clone(), state.clone()), (grad.clone(), grad.clone())
    adamw(mine, my_grad, table, unscale=unscale)
    adamw_reference(theirs, their_grad, table, unscale=unscale)
    assert_same_state(mine, theirs)
    assert_same_bits(my_grad, their_grad)
    bad = torch.zeros((), dtype=torch.int32, device="cuda")
    reduce_adamw(mine, grad.flip(0), grad, table, divisor=3, bad=bad)
    reduce_adamw_reference(theirs, grad.flip(0), grad, table, divisor=3)
    assert_same_state(mine, theirs)
    assert bad.item() == 0


@pytest.mark.parametrize("weights", ["whole", "split"])
def test_codes_of_the_kernel_are_at_most_one_off(weights):
    """A code or an exponent is another one only where the exact root is within an approximation's error of a border.

    That is three units of 2^-24 relative in a root, against borders that are 1/127 or 1/255 apart: few elements.
    """
    numel = 200_032
    state = state_on_device(random_state((weights, "int8"), numel, 0))
    table, grad = on_device(mixed_table(numel)), random_grad(numel, 0).cuda()
    mine, theirs = state.clone(), state.clone()
    adamw(mine, grad, table)
    adamw_reference(theirs, grad, table)
    for got, expected in zip(mine.codes(), theirs.codes(), strict=True):
        distance = (got.int() - expected.int()).abs()
        assert distance.max() <= (1 if got.numel() == numel else 0)
        assert (distance > 0).float().mean() < 1e-3
    # Updates are below 100, learning rates 1e-2 at most, and split weights may round the other way: a unit.
    rtol = 2.0**-15 if weights == "split" else 2.0**-23
    torch.testing.assert_close(mine.weight(), theirs.weight(), rtol=rtol, atol=1e-6)
