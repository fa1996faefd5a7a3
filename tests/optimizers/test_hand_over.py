"""An `AdamW` that was built on full parameters is handed their shards, and goes on with them."""

import copy
import gc

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


def trained():
    """Whole parameters that were stepped once, with their optimizer, and the shards that they are to become."""
    params = whole_params()
    optimizer = AdamW(params, **HYPER)
    step(optimizer, params, 0)
    return params, optimizer, *shards_of(params)


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
