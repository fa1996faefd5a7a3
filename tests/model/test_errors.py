"""Mistakes raise an error with the cause and a remedy on every rank, and nothing hangs."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardlite import LayoutError, ShardLite
from shardlite.params import ShardTensor
from tests.support.patience import seconds
from tests.support.twins.sharded import same_states


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def net(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(count)))


def test_without_a_process_group():
    with pytest.raises(LayoutError, match=r"no process group: call torch\.distributed\.init_process_group"):
        ShardLite(net())


def nested(group):
    ShardLite(nn.Sequential(block(), ShardLite(net(), group=group)), group=group)


def failing_policy_body(group):
    """A predicate of the user's that fails on one rank only."""

    def policy(name: str, module: nn.Module) -> bool:
        return {0: False, 1: {}}[dist.get_rank(group)] is False or bool(1 / 0)

    ShardLite(net(), units=policy, group=group)


def replaced_body(group):
    plain = net()
    model = ShardLite(plain, group=group)
    plain[0][0].weight = nn.Parameter(torch.zeros(8, 8))
    model(torch.ones(1, 8))


def shape_body(group):
    width = 8 + dist.get_rank(group)
    ShardLite(nn.Linear(8, width), group=group)


def count_body(group):
    ShardLite(net(2 + dist.get_rank(group)), group=group)


def setting_body(group):
    ShardLite(net(), stage=3 * dist.get_rank(group), group=group)


def one_rank_body(group):
    """Only one rank makes a mistake; the others must hear of it."""
    plain = net()
    if dist.get_rank(group) == 1:
        plain(torch.ones(1, 8)).sum().backward()
    ShardLite(plain, group=group)


def frozen_on_one_rank_body(group):
    plain = net()
    if dist.get_rank(group) == 1:
        plain.requires_grad_(False)
    ShardLite(plain, group=group)


def gradient_body(group):
    plain = net()
    plain(torch.ones(1, 8)).sum().backward()
    ShardLite(plain, group=group)


def convert_body(group):
    ShardLite(net(), group=group).half()


def assigned_state_dict_body(group):
    model = ShardLite(net(), group=group)
    model.load_state_dict(model.state_dict(), assign=True)


def state_dict_of_other_shards_body(group):
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size(group))][dist.get_rank(group)]
    saved = ShardLite(net(), group=alone, units=nn.Sequential).state_dict()
    model = ShardLite(net(), group=group)
    ours = model.state_dict()
    shards = {name: ShardTensor(torch.zeros(3), value.shape, 5) for name, value in ours.items()}
    assert model.load_state_dict(saved) == ([], [])  # full tensors are cut
    model.load_state_dict(shards)


def sum_of_a_shard_body(group):
    ShardLite(net(), group=group).state_dict()["0.0.weight"].sum()


def inner_state_dict_body(group):
    ShardLite(net(), group=group).module.state_dict()


def submodule_state_dict_body(group):
    ShardLite(net(), group=group).module[0].state_dict()


def unknown_name_body(group):
    with ShardLite(net(), group=group).gathered("0.0.wieght"):
        pass


def misfit_body(group):
    model = ShardLite(net(), group=group)
    state = model.full_state_dict()
    state["0.0.weight"] = torch.zeros(3, 3)
    model.load_full_state_dict(state)


def missing_body(group):
    model = ShardLite(net(), group=group)
    state = model.full_state_dict()
    state["extra"] = state.pop("1.0.bias")
    model.load_full_state_dict(state)


def only_missing_body(group):
    model = ShardLite(net(), group=group)
    state = model.full_state_dict()
    del state["1.0.bias"], state["1.0.weight"]
    model.load_state_dict(state)


def only_unknown_body(group):
    model = ShardLite(net(), group=group)
    model.load_full_state_dict(model.full_state_dict() | {"extra": torch.zeros(1)})


class EightBits(nn.Module):
    """A module whose parameter has a dtype that no transport adds."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (nn.Sequential(nn.ReLU()), {}, "has no parameters to shard: all are ignored"),
        ([net()], {}, "wraps an nn.Module, got list"),
        (EightBits(), {}, "gradients of that dtype cannot be reduced"),
        (net(), {"stage": 7}, "stage must be one of (0, 1, 2, 3), got 7"),
        (net(), {"prefetch": -1}, "must be at least 0, got -1"),
        (net(), {"prefetch": "1"}, "prefetch is a number of units and must be an int, got '1'"),
        (net(), {"reshard_after_forward": "no"}, "must be a bool or callable(name, module) -> bool, got 'no'"),
        (net(), {"ignore": nn.Linear(2, 2)}, "ignore must be a list of modules and parameters, got Linear"),
        (net(), {"ignore": ["expert"]}, "ignore must contain modules and parameters only, got str"),
        (net(), {"init": 3}, "init must be callable(module), as for nn.Module.apply, got 3"),
        (net(), {"group": 3}, "group takes a ProcessGroup or a DeviceMesh, got 3"),
        (net(), {"precision": torch.bfloat16}, "precision takes a shardlite.Precision, got torch.bfloat16"),
        (net(), {"device": "gpu"}, "device must be the CPU or a CUDA device, got 'gpu'"),
        (net(), {"units": "blocks"}, "units must be a module class"),
        (net(), {"units": nn.LSTM}, "the model contains no module of this class"),
        (net(), {"timeout": 20}, "timeout must be a datetime.timedelta, got 20"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_options_are_checked_on_every_rank(group, module, options, words):
    with pytest.raises((LayoutError, TypeError), match=re.escape(words)):
        ShardLite(module, **{"group": group, **options})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (nested, "'1' is already wrapped: wrap the whole model once"),
        (failing_policy_body, "division by zero"),
        (replaced_body, "parameter '0.0.weight' was replaced after wrapping"),
        (shape_body, "ranks wrapped different models: rank 0 has parameter weight [8, 8]"),
        (count_body, "ranks wrapped different models: rank 0 has 12 entries, rank 1 has 14"),
        (setting_body, "rank 0 has stage 0, rank 1 has stage 3"),
        (one_rank_body, "has a gradient, which would be lost"),
        (frozen_on_one_rank_body, "ranks wrapped different models: rank 0 has"),
        (gradient_body, "parameter '0.0.weight' has a gradient, which would be lost: call zero_grad() before wrapping"),
        (convert_body, "before wrapping"),
        (assigned_state_dict_body, "shards are views of one block of memory: leave assign=False"),
        (state_dict_of_other_shards_body, "is elements 5 to 8 of 64, and this rank keeps"),
        (sum_of_a_shard_body, "Use to_local() for this rank's elements"),
        (inner_state_dict_body, "use full_state_dict()"),
        (submodule_state_dict_body, "use full_state_dict()"),
        (unknown_name_body, "there is no parameter '0.0.wieght'; there are 0.0.bias, 0.0.weight"),
        (misfit_body, "'0.0.weight' has shape [3, 3], the model's is [8, 8]"),
        (missing_body, "the state dict lacks 1.0.bias and has unknown extra: was it"),
        (only_missing_body, "the state dict lacks 1.0.bias, 1.0.weight: was it"),
        (only_unknown_body, "the state dict has unknown extra: was it"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_every_rank_gets_a_clear_error(group, body, words):
    with pytest.raises((LayoutError, TypeError, ZeroDivisionError), match=re.escape(words)):
        body(group)


def test_a_refused_state_dict_changes_nothing(group):
    model = ShardLite(net(), group=group)
    before = model.full_state_dict()
    broken = {name: torch.zeros_like(value) for name, value in before.items()}
    broken["1.0.bias"] = torch.zeros(3)
    with pytest.raises(LayoutError):
        model.load_full_state_dict(broken)
    same_states("weights", model.full_state_dict(), before)


def never_comes_body(group):
    model = ShardLite(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), group=group, timeout=timedelta(seconds=seconds(2))
    )
    if group.rank() == 0:
        model(torch.ones(1, 8))


def test_a_rank_that_never_comes_is_named(cluster):
    (kind, message), absent = cluster.failures(never_comes_body, 2)
    assert absent is None
    assert kind == "CommError"
    assert message.startswith("negotiation of the next gather")
    assert "the forward of the model, for unit '0', at step 0" in message
    assert "rank 0 receiving from rank 1" in message
