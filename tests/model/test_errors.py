"""Mistakes end in an error that says who, what was got and what to do, on every rank, and nothing hangs."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardlite import LayoutError, ShardLite
from shardlite.params import ShardTensor
from tests.support.patience import seconds


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def net(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(count)))


def test_without_a_process_group():
    with pytest.raises(LayoutError, match=r"no process group: call torch\.distributed\.init_process_group"):
        ShardLite(net())


def nested_body(group):
    inner = ShardLite(net(), group=group)
    ShardLite(nn.Sequential(block(), inner), group=group)


def nothing_body(group):
    ShardLite(nn.Sequential(nn.ReLU()), group=group)


def not_a_module_body(group):
    ShardLite([net()], group=group)


def stage_body(group):
    ShardLite(net(), stage=7, group=group)


def prefetch_body(group):
    ShardLite(net(), prefetch=-1, group=group)


def prefetch_type_body(group):
    ShardLite(net(), prefetch="1", group=group)


def rule_body(group):
    ShardLite(net(), group=group, reshard_after_forward="no")


def ignore_body(group):
    ShardLite(net(), group=group, ignore=nn.Linear(2, 2))


def init_body(group):
    ShardLite(net(), group=group, init=3)


def group_body(group):
    ShardLite(net(), group=3)


def precision_body(group):
    ShardLite(net(), precision=torch.bfloat16, group=group)


def device_body(group):
    ShardLite(net(), device="gpu", group=group)


def units_body(group):
    ShardLite(net(), units="blocks", group=group)


def class_body(group):
    ShardLite(net(), units=nn.LSTM, group=group)


def complex_body(group):
    ShardLite(nn.Linear(8, 8, dtype=torch.complex64), group=group)


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
    assert model.load_state_dict(saved) == ([], [])  # whole tensors are cut
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


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (nested_body, "'1' is wrapped already: wrap the whole model once"),
        (nothing_body, "has no parameters that are not ignored: there is nothing to shard"),
        (not_a_module_body, "wraps an nn.Module, got list"),
        (stage_body, "stage must be one of (0, 1, 2, 3), got 7"),
        (prefetch_body, "must be at least 0, got -1"),
        (prefetch_type_body, "prefetch counts units and must be an int, got '1'"),
        (rule_body, "reshard_after_forward must be a bool or callable(name, module) -> bool, got 'no'"),
        (ignore_body, "ignore takes a list of modules and parameters, got Linear"),
        (init_body, "init takes a function of a module, as nn.Module.apply does, got 3"),
        (group_body, "group takes a ProcessGroup or a DeviceMesh, got 3"),
        (precision_body, "precision takes a shardlite.Precision, got torch.bfloat16"),
        (device_body, "device must name the CPU or a CUDA device, got 'gpu'"),
        (units_body, "units must be a module class"),
        (class_body, "the model has no module of this class"),
        (complex_body, "gradients of that dtype cannot be reduced"),
        (failing_policy_body, "division by zero"),
        (replaced_body, "parameter '0.0.weight' was replaced after wrapping"),
        (shape_body, "ranks wrapped different models: rank 0 has parameter weight [8, 8]"),
        (count_body, "ranks wrapped different models: rank 0 has 11 entries, rank 1 has 13"),
        (setting_body, "rank 0 has stage 0, rank 1 has stage 3"),
        (one_rank_body, "has a gradient, which would be lost"),
        (frozen_on_one_rank_body, "ranks wrapped different models: rank 0 has"),
        (gradient_body, "parameter '0.0.weight' has a gradient, which would be lost: call zero_grad() before wrapping"),
        (convert_body, "before wrapping"),
        (assigned_state_dict_body, "shards are views of one block of memory"),
        (state_dict_of_other_shards_body, "is elements 5 to 8 of 64, and this rank keeps"),
        (sum_of_a_shard_body, "take to_local() for this rank's elements"),
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
def test_every_rank_gets_a_clear_error(cluster, body, words):
    for kind, message in cluster.failures(body, 2):
        assert kind in ("LayoutError", "TypeError", "ZeroDivisionError")
        assert words in message


def nothing_changed_body(group):
    """A state dict that does not fit changes nothing."""
    model = ShardLite(net(), group=group)
    before = model.full_state_dict()
    broken = {name: torch.zeros_like(value) for name, value in before.items()}
    broken["1.0.bias"] = torch.zeros(3)
    with pytest.raises(LayoutError):
        model.load_full_state_dict(broken)
    after = model.full_state_dict()
    return all(torch.equal(before[name], after[name]) for name in before)


def test_a_refused_state_dict_changes_nothing(cluster):
    assert cluster.run(nothing_changed_body, 2) == [True, True]


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
