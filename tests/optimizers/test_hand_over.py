"""An `AdamW` that was built on full parameters is handed their shards, and goes on with them."""

import copy
import gc

import pytest
import torch
from torch import nn

from shardlite.optim import AdamW, adamw, living
from shardlite.optimizers.hand_over import _replace
from tests.support.optim_cases import HYPER, assert_same, set_grads

SHAPES = [(8, 8), (96,), (), (0, 3), (4, 32)]
PARTS = [(0, 32), (32, 96), (0, 1), (0, 0), (64, 128)]  # cut at multiples of 32, so that bits are those of the whole


def whole_params():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def part_of(params):
    ranges = dict(zip(params, PARTS, strict=True))

    def part(param, tensor):
        start, stop = ranges[param]
        return tensor.flatten()[start:stop].view(-1, 1)

    return part


def shards_of(params):
    part = part_of(params)
    return {param: nn.Parameter(part(param, param.detach()).clone()) for param in params}, part


def adopt(shards, part):
    for optimizer in living():
        _replace(optimizer, shards, part)


def step(optimizer, params, seed):
    set_grads(params, seed)
    optimizer.step()


def step_shards(optimizer, params, shards, part, seed):
    set_grads(params, seed)
    for param, shard in shards.items():
        shard.grad = part(param, param.grad).clone()
    optimizer.step()


def trained():
    """Whole parameters that were stepped once, with their optimizer, and the shards that they are to become."""
    params = whole_params()
    optimizer = AdamW(params, **HYPER)
    step(optimizer, params, 0)
    return params, optimizer, *shards_of(params)


def copied(params):
    return [nn.Parameter(param.detach().clone()) for param in params]


@pytest.mark.parametrize("steps_before", [0, 3])
def test_training_goes_on_where_it_was(steps_before):
    params = whole_params()
    whole = copied(params)
    optimizer, whole_optimizer = AdamW(params, **HYPER), AdamW(whole, **HYPER)
    for seed in range(steps_before):
        step(optimizer, params, seed)
        step(whole_optimizer, whole, seed)
    shards, part = shards_of(params)
    adopt(shards, part)
    assert optimizer.param_groups[0]["params"] == list(shards.values())
    assert len(optimizer.state) == (len(params) if steps_before else 0)
    for seed in (10, 11):
        step_shards(optimizer, params, shards, part, seed)
        step(whole_optimizer, whole, seed)
    assert set(optimizer.state) == set(shards.values())
    for twin, (param, shard) in zip(whole, shards.items(), strict=True):
        mine, theirs = optimizer.state[shard], whole_optimizer.state[twin]
        assert mine["step"].item() == theirs["step"].item() == steps_before + 2
        assert_same(shard.data, part(param, twin.data))
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same(mine[name], part(param, theirs[name]))


def test_groups_and_schedulers_stay():
    params = whole_params()
    named = [(f"layer.{index}", param) for index, param in enumerate(params)]
    optimizer = AdamW([{"params": named[:2], "weight_decay": 0.5}, {"params": named[2:], "lr": 0.5}], **HYPER)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    groups, lists = list(optimizer.param_groups), [group["params"] for group in optimizer.param_groups]
    shards, part = shards_of(params)
    adopt(shards, part)
    step_shards(optimizer, params, shards, part, 0)
    scheduler.step()
    assert all(mine is before for mine, before in zip(optimizer.param_groups, groups, strict=True))
    assert all(group["params"] is before for group, before in zip(groups, lists, strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == [HYPER["lr"] / 2, 0.25]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, HYPER["weight_decay"]]
    assert optimizer.param_groups[1]["param_names"] == ["layer.2", "layer.3", "layer.4"]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]


def test_doing_it_again_changes_nothing():
    _, optimizer, shards, part = trained()
    adopt(shards, part)
    assert optimizer._layout is None
    for shard, state in optimizer.state.items():
        assert state["exp_avg"].untyped_storage().nbytes() == 4 * shard.numel(), "the whole state is kept"
    before = {shard: dict(state) for shard, state in optimizer.state.items()}
    adopt(shards, part)
    assert optimizer.state == before
    assert optimizer.param_groups[0]["params"] == list(shards.values())


def test_what_is_not_of_the_model_stays():
    params, extra = whole_params(), nn.Parameter(torch.ones(5))
    optimizer, other = AdamW([extra, *params], **HYPER), AdamW([extra], **HYPER)
    step(optimizer, [extra, *params], 0)
    other.step()
    moment = optimizer.state[extra]["exp_avg"].clone()
    plan = other._layout
    shards, part = shards_of(params)
    adopt(shards, part)
    assert optimizer.param_groups[0]["params"] == [extra, *shards.values()]
    assert other.param_groups[0]["params"] == [extra]
    assert other._layout is plan
    assert_same(optimizer.state[extra]["exp_avg"], moment)


def test_a_frozen_parameter_takes_its_state_along():
    params, optimizer, shards, part = trained()
    params[1].requires_grad_(False)
    shards[params[1]].requires_grad_(False)
    adopt(shards, part)
    expected = part(params[1], params[1].grad) * (1 - HYPER["betas"][0])
    optimizer.step()
    torch.testing.assert_close(optimizer.state[shards[params[1]]]["exp_avg"], expected)


def test_moments_keep_their_dtype_although_split_shards_are_bf16():
    params, optimizer, shards, part = trained()
    before = {param: optimizer.state[param]["exp_avg"] for param in params}
    halves = {param: nn.Parameter(shard.detach().bfloat16()) for param, shard in shards.items()}
    adopt(halves, part)
    for param, half in halves.items():
        assert_same(optimizer.state[half]["exp_avg"], part(param, before[param]))


def test_copies_are_adopted_and_optimizers_can_die():
    params = whole_params()
    optimizer = AdamW(params, **HYPER)
    twin = copy.deepcopy(optimizer)
    twin_params = list(twin.param_groups[0]["params"])
    shards, part = shards_of(twin_params)
    adopt(shards, part)
    assert twin.param_groups[0]["params"] == list(shards.values())
    assert optimizer.param_groups[0]["params"] == params
    known = len(adamw._living)
    del optimizer, twin
    gc.collect()
    assert len(adamw._living) <= known - 2
