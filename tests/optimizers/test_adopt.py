"""`model.adopt(optimizer)`: optimizers that were built before wrapping go on with shards."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR

from shardlite import LayoutError, ShardLite
from tests.support.optim_cases import ByHand
from tests.support.twins.sharded import same_bits

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda params: optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: optim.Adam(params, lr=0.01),
    "adamw": lambda params: optim.AdamW(params, lr=torch.tensor(0.01), fused=False),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01),
    "by hand": ByHand,
}


class Scaled(nn.Linear):
    """A layer with a scalar parameter."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def net() -> nn.Sequential:
    """A model with tied weights and a frozen parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), nn.Linear(16, 16), nn.Linear(16, 16))
    model[2].weight = model[1].weight
    model[2].bias.requires_grad_(False)
    return model


def take_steps(model: nn.Module, optimizer: optim.Optimizer, scheduler: LambdaLR, steps: range) -> None:
    """Train on batches that are the same on all ranks."""
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.sample(2)
def test_a_run_goes_on_with_states_and_scheduler(group: Any, kind: str) -> None:
    """With 2^n equal gradients the mean is exact, so weights equal those of a run that was never wrapped."""
    for stage in (0, 1, 2, 3):
        plain, module = net(), net()
        mine, theirs = OPTIMIZERS[kind](module.parameters()), OPTIMIZERS[kind](plain.parameters())
        schedules = [LambdaLR(each, lambda t: 0.5**t) for each in (mine, theirs)]
        take_steps(plain, theirs, schedules[1], range(6))
        take_steps(module, mine, schedules[0], range(3))
        model = ShardLite(module, stage=stage, group=group)
        model.adopt(mine)
        model.adopt(mine)
        take_steps(model, mine, schedules[0], range(3, 6))
        assert set(mine.state) <= set(model.parameters())
        for name, value in model.full_state_dict().items():
            same_bits(name, value, plain.state_dict()[name])


@pytest.mark.ranks(2)
def test_states_follow_the_dtype_of_the_shards(group: Any) -> None:
    """The parameters are bf16, their shards fp32, and an optimizer needs a state in the dtype of its shard."""
    module = net().bfloat16()
    optimizer = optim.AdamW(module.parameters(), lr=0.01)
    module(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model = ShardLite(module, group=group)
    model.adopt(optimizer)
    shards = [shard for shard in model.parameters() if shard in optimizer.state]
    assert shards
    assert all(optimizer.state[shard]["exp_avg"].dtype == shard.dtype for shard in shards)
    model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()


@pytest.mark.ranks(2)
def test_other_parameters_and_wrappers_are_accepted(group: Any) -> None:
    """What is not of the model stays. A wrapper's optimizer is adopted. A group may be empty, without a warning."""
    module, other = net(), nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([other, *module.parameters()], lr=0.1)
    optimizer.add_param_group({"params": []})
    model = ShardLite(module, group=group)
    model.adopt(SimpleNamespace(optimizer=optimizer))
    held = optimizer.param_groups[0]["params"]
    assert held[0] is other
    assert {id(param) for param in held[1:]} == {id(shard) for shard in model.parameters()}
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()


@pytest.mark.ranks(2)
def test_what_cannot_be_adopted_is_refused_on_every_rank(group: Any) -> None:
    """Foreign parameters, an optimizer that is not elementwise, states of other shapes, and states on one rank only."""
    module = net()
    model = ShardLite(copy.deepcopy(module), group=group)
    with pytest.raises(LayoutError, match="SGD holds no parameter of this ShardLite model"):
        model.adopt(optim.SGD(module.parameters(), lr=0.1))
    factored = optim.Adafactor(module.parameters())
    shaped, uneven = (optim.SGD(module.parameters(), lr=0.1) for _ in range(2))
    shaped.state[module[0].weight]["row"] = torch.zeros(16)
    if dist.get_rank(group) == 0:
        uneven.state[module[0].weight]["momentum_buffer"] = torch.zeros(16, 16)
    model = ShardLite(module, group=group)
    with pytest.raises(LayoutError, match="WholeParameters"):
        model.adopt(factored)
    with pytest.raises(LayoutError, match=r"SGD: state 'row' of shape \(16,\) cannot be cut"):
        model.adopt(shaped)
    with pytest.raises(LayoutError, match="optimizers"):
        model.adopt(uneven)
    assert shaped.param_groups[0]["params"][0] is module[0].weight
