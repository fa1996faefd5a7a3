"""The state of `AdamW`: where it lies, and how it is saved, loaded and exchanged with PyTorch's."""

import copy

import pytest
import torch

from shardlite.optim.adamw import AdamW
from tests.support.optim_cases import HYPER, assert_same, make_arena, plain_params, run, set_grads


def check_both_continue_alike(arena, optimizer, twin_arena, twin_optimizer):
    for seed in (10, 11):
        for a, o in ((arena, optimizer), (twin_arena, twin_optimizer)):
            a.new_grads(seed)
            o.step()
    assert_same(arena.flat, twin_arena.flat)


def trained(steps=3):
    arena = make_arena([64, 32, 96])
    optimizer = AdamW(arena.params, **HYPER)
    run(arena, optimizer, steps)
    return arena, optimizer


def copy_of(arena):
    twin = make_arena([64, 32, 96])
    twin.flat.copy_(arena.flat)
    return twin


def test_loading_keeps_the_arenas_that_are_there():
    arena, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    before = {name: value.data_ptr() for name, value in optimizer.state[arena.params[1]].items()}
    weights = arena.flat.clone()
    run(arena, optimizer, 2)
    first = arena.flat.clone()
    arena.flat.copy_(weights)
    optimizer.load_state_dict(saved)
    assert {name: value.data_ptr() for name, value in optimizer.state[arena.params[1]].items()} == before
    run(arena, optimizer, 2)
    assert_same(arena.flat, first)


def test_torch_continues_our_state():
    arena, optimizer = trained()
    twin = copy_of(arena)
    twin_optimizer = torch.optim.AdamW(twin.params)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # PyTorch does not copy
    for group in twin_optimizer.param_groups:
        group["fused"] = True
    check_both_continue_alike(arena, optimizer, twin, twin_optimizer)


@pytest.mark.parametrize("fused", [True, False])
def test_we_continue_the_state_of_torch(fused):
    twin = make_arena([64, 32, 96])
    twin_optimizer = torch.optim.AdamW(twin.params, **HYPER, fused=fused)
    run(twin, twin_optimizer, 3)
    arena = copy_of(twin)
    optimizer = AdamW(arena.params)
    optimizer.load_state_dict(twin_optimizer.state_dict())
    assert set(optimizer.param_groups[0]) == {"params", "max_update", *HYPER}
    for group in twin_optimizer.param_groups:
        group["fused"] = True
    check_both_continue_alike(arena, optimizer, twin, twin_optimizer)


def test_parameters_that_moved_take_their_state_along():
    arena, optimizer = trained()
    twin, old = copy_of(arena), arena.flat
    arena.flat = old.clone()
    for param in arena.params:
        param.data = arena.flat.as_strided(param.shape, param.stride(), param.storage_offset())
    twin_optimizer = AdamW(twin.params)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    old.fill_(float("nan"))
    check_both_continue_alike(arena, optimizer, twin, twin_optimizer)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_a_state_that_we_would_continue_otherwise_is_refused(option):
    params = plain_params()
    set_grads(params, 0)
    other = torch.optim.AdamW(params, **{option: True})
    other.step()
    optimizer = AdamW(params, lr=0.5)
    with pytest.raises(ValueError, match=f"{option}=True"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_state_of_another_optimizer_or_shape_is_refused():
    params = plain_params()
    set_grads(params, 0)
    sgd = torch.optim.SGD(params, momentum=0.9)
    sgd.step()
    optimizer = AdamW(params)
    with pytest.raises(ValueError, match="must be step, exp_avg, exp_avg_sq, got momentum_buffer"):
        optimizer.load_state_dict(sgd.state_dict())
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"exp_avg has shape \(1,\), but its parameter has \(5, 7\)"):
        optimizer.load_state_dict(saved)
