"""`AdamW` where a buffer holds more than its parameters: moments take no memory for the rest, bits stay the same."""

import pytest
import torch
from torch import nn

from shardlite.optim.adamw import AdamW
from shardlite.params import ShardInfo
from tests.support.optim_cases import (
    HYPER,
    NUMELS,
    PaddedTwins,
    assert_same,
    make_arena,
    padded_numel,
    place_shards,
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


# What lies behind a gradient


@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("behind", [1e6, float("inf")])
def test_what_lies_behind_a_gradient_is_not_its_padding(state, behind):
    """Autograd hands out views: that of a concatenation has other gradients behind it."""
    buffer = torch.zeros(64)
    param = nn.Parameter(buffer[:5])
    ShardInfo(0, None).mark(param)
    with torch.no_grad():
        param.normal_(generator=torch.Generator().manual_seed(0))
    (twin,) = place_shards([nn.Parameter(param.detach().clone())])
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
    ShardInfo(0, None).mark(first)
    (torch.cat([first, second]) * 48).sum().backward()
    optimizer = AdamW([first])
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(8.0)
    optimizer.step()
    assert_same(first.grad, torch.full((5,), 6.0))
    assert_same(second.grad, torch.full((59,), 48.0))
