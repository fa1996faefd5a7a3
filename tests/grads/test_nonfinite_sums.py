"""What is not finite only in a sum, or was left over, is found too."""

import math

import pytest
import torch
from torch import nn, optim

from shardlite import ShardLite
from tests.support.twins.sharded import without_warnings


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def step(model: ShardLite) -> tuple[bool, int]:
    """Step, and return whether all weights are still finite, and how many steps were left out."""
    optim.SGD(model.parameters(), lr=0.1).step()
    return all(bool(shard.isfinite().all()) for shard in model.parameters()), model.skipped_steps


@without_warnings
def overflowing_body(group):
    found = []
    for stage in (0, 1, 2, 3):
        for sharded in (False, True):
            model = ShardLite(nn.Linear(4, 4), group=group, stage=stage)
            for _ in range(2):
                with model.no_sync(sharded=sharded):
                    (model(torch.ones(1, 4)).sum() * 1.5e38).backward()
            (model(torch.ones(1, 4)).sum() * 1.5e38).backward()
            found.append(step(model))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_finite_gradients_whose_sum_overflows(cluster, world_size):
    for found in cluster.run(overflowing_body, world_size):
        assert found == [(True, 1)] * 8


@without_warnings
def left_over_body(group, partly):
    """Freeze a unit, or a part of one, that has a NaN in its gradient; the next backward is a good one."""
    module = net()
    model = ShardLite(module, group=group, units=nn.Linear)
    (model(torch.ones(1, 4)).sum() * math.nan).backward()
    for name, param in module.named_parameters():
        param.requires_grad_(not name.startswith("0.weight" if partly else "0."))
    for name, shard in model.named_parameters():
        if not name.startswith("0."):
            shard.grad = None
    model(torch.ones(1, 4)).sum().backward()
    return step(model)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("partly", [False, True])
def test_a_gradient_that_the_backward_does_not_touch(cluster, world_size, partly):
    assert cluster.run(left_over_body, world_size, partly) == [(True, 1)] * world_size


@without_warnings
def used_elsewhere_body(group):
    """Only rank 1 uses the second layer, whose accumulated gradient overflows; its shard may be on rank 0."""
    module = net()
    model = ShardLite(module, group=group, units=lambda name, _: False)
    for _ in range(3):
        with model.gathered():
            y = module[0](torch.ones(1, 4))
            (module[1](y).sum() * 3e38 if group.rank() == 1 else y.sum()).backward()
    return step(model)


def test_a_sum_of_what_another_rank_has_used(cluster):
    assert cluster.run(used_elsewhere_body, 2) == [(True, 1)] * 2
