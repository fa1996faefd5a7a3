"""`AdamW` where a buffer holds more than its parameters: moments take no memory for the rest, bits stay the same."""

import pytest
import torch
from torch import nn

from shardlite.optim.adamw import AdamW
from tests.support.optim_cases import (
    HYPER,
    NUMELS,
    PaddedTwins,
    assert_same,
    make_arena,
    padded_numel,
    plain_params,
    set_grads,
)

GAPS = [4096, 0, 64, 96, 32 * 1001]


def state_storages(optimizer, name):
    views = [state[name] for state in optimizer.state.values()]
    return {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in views if view.numel()}


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_moments_take_the_bytes_of_the_padded_parameters(name):
    arena = make_arena(gaps=GAPS)
    optimizer = AdamW(arena.params, **HYPER)
    optimizer.step()
    assert list(state_storages(optimizer, name).values()) == [4 * sum(padded_numel(numel) for numel in NUMELS)]


def test_moments_of_plain_parameters_take_the_bytes_of_the_padded_parameters():
    params = plain_params()
    set_grads(params, 0)
    optimizer = AdamW(params, **HYPER)
    optimizer.step()
    expected = sorted(4 * padded_numel(param.numel()) for param in params if param.numel())
    assert sorted(state_storages(optimizer, "exp_avg").values()) == expected


@pytest.mark.parametrize("gaps", [[], GAPS])
def test_moments_are_aligned_and_in_the_order_of_the_parameters(gaps):
    arena = make_arena(gaps=gaps)
    optimizer = AdamW(reversed(arena.params), **HYPER)
    optimizer.step()
    offsets = [optimizer.state[param]["exp_avg"].storage_offset() for param in arena.params]
    assert offsets == [sum(padded_numel(numel) for numel in NUMELS[:index]) for index in range(len(NUMELS))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_are_those_of_each_parameter_alone(dtype):
    arena = make_arena(gaps=GAPS, dtype=dtype)
    not_ours = arena.flat.isnan()
    optimizer, twins = AdamW(arena.params, **HYPER), PaddedTwins(arena.params)
    for seed in range(4):
        arena.new_grads(seed)
        arena.flat_grad[not_ours] = float("nan")
        if seed == 2:
            arena.params[0].grad = None
        twins.take_grads()
        optimizer.step()
        twins.optimizer.step()
    twins.assert_same()
    twins.assert_same_states(optimizer)
    assert torch.equal(arena.flat.isnan(), not_ours)


def test_parameters_without_padding_between_them():
    """Neither starts at a multiple of 32; only the last 16 elements of each may be rounded in PyTorch's other way."""
    flat, flat_grad = torch.randn(300), torch.randn(300)
    params = [nn.Parameter(flat[start:stop]) for start, stop in ((3, 90), (90, 140), (171, 300))]
    twin = nn.Parameter(flat.clone())
    optimizer, twin_optimizer = AdamW(params, **HYPER), torch.optim.AdamW([twin], **HYPER, fused=True)
    for param, (start, stop) in zip(params, ((3, 90), (90, 140), (171, 300)), strict=True):
        param.grad = flat_grad[start:stop]
    twin.grad = flat_grad.clone()
    before = flat[140:171].clone()
    for _ in range(3):
        optimizer.step()
        twin_optimizer.step()
    for param in params:
        here = slice(param.storage_offset(), param.storage_offset() + param.numel())
        torch.testing.assert_close(param.data, twin.data[here], rtol=1e-6, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            expected = twin_optimizer.state[twin][name][here]
            torch.testing.assert_close(optimizer.state[param][name], expected, rtol=1e-6, atol=1e-6)
    assert_same(flat[140:171], before)
    assert sum(state_storages(optimizer, "exp_avg").values()) <= 4 * (96 + 64 + 160)
    assert optimizer.state[params[2]]["exp_avg"].storage_offset() % 32 == 0, "reads of 16 bytes need it"


# What lies behind a gradient


@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("behind", [1e6, float("inf")])
def test_what_lies_behind_a_gradient_is_not_its_padding(state, behind):
    """Autograd hands out views: that of a concatenation has other gradients behind it."""
    buffer = torch.zeros(64)
    param = nn.Parameter(buffer[:5])
    with torch.no_grad():
        param.normal_(generator=torch.Generator().manual_seed(0))
    twin = nn.Parameter(param.detach().clone())
    other = torch.ones(59, requires_grad=True)
    (torch.cat([param, other]) * torch.tensor([1.0] * 5 + [behind] * 59)).sum().backward()
    assert param.grad.untyped_storage().nbytes() > 4 * param.numel()
    twin.grad = param.grad.clone()
    for each in (param, twin):
        AdamW([each], state=state).step()
    assert_same(param.data, twin.data)
    assert not buffer[5:32].any()


def test_a_scale_divides_no_gradient_of_another_optimizer():
    first, second = nn.Parameter(torch.zeros(64)[:5]), nn.Parameter(torch.zeros(59))
    (torch.cat([first, second]) * 48).sum().backward()
    optimizer = AdamW([first])
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(8.0)
    optimizer.step()
    assert_same(first.grad, torch.full((5,), 6.0))
    assert_same(second.grad, torch.full((59,), 48.0))
