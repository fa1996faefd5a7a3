"""An `AdamW` that was built on full parameters is handed their shards, and goes on with them."""

import copy
import gc

import pytest
import torch
from torch import nn

from shardlite import LayoutError, PhaseError, ShardLite
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


@pytest.mark.stages(1, 3)
def test_steps_in_the_backward_refuse_parameters_that_are_not_shards(group, stage):
    """The backward raises before anything has changed, and another optimizer trains."""
    model = ShardLite(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), group=group, stage=stage)
    before = model.full_state_dict()
    optimizer = AdamW(model.module.parameters(), in_backward=True)
    with pytest.raises(LayoutError, match=r"holds the unsharded parameter '0.weight': build it from parameters\(\)"):
        model(torch.ones(2, 4)).sum().backward()
    after = model.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model.adopt(optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before["0.weight"], model.full_state_dict()["0.weight"])


def test_entries_of_other_optimizers_do_not_matter(group):
    optimizer = AdamW(nn.Linear(2, 2).parameters())
    optimizer.state["calls"] = 1
    ShardLite(nn.Linear(4, 4), group=group)
    assert optimizer.state["calls"] == 1


def test_an_adopted_optimizer_may_have_an_empty_group(cluster):
    cluster.run(_adopted_alone, 1)


def _adopted_alone(group):
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD([{"params": list(module.parameters())}, {"params": []}], lr=0.1)
    model = ShardLite(module, group=group)
    model.adopt(optimizer)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_a_method_that_was_taken_before_unwrap_raises_after_it(group):
    model = ShardLite(Configured(), group=group)
    configure = model.configure
    model.unwrap()
    with pytest.raises(PhaseError, match="this ShardLite model was unwrapped"):
        configure()


class Configured(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def configure(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_limit_of_memory_reads_a_generator_of_ignored_parameters_once(group):
    module = nn.Sequential(nn.Linear(256, 256), nn.Embedding(30000, 64))
    texts = []
    for ignored in (module[1].parameters(), list(module[1].parameters())):
        with pytest.raises(LayoutError, match="memory_limit") as refused:
            ShardLite(module, group=group, stage=1, ignore=ignored, memory_limit=100_000)
        texts.append(str(refused.value))
    assert texts[0] == texts[1]
