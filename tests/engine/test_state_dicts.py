"""An optimizer state loads only into the shards that it was saved from; every rank refuses another."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from shardlite import AdamW, LayoutError, ShardLite
from shardlite.params import ShardTensor
from tests.support.models.residual import WIDTH, Block, net
from tests.support.twins.sharded import Turn, same_bits, slow, take_step

Make = Callable[..., optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "ours": lambda params: AdamW(params, lr=0.01),
    "fused": lambda params: optim.AdamW(params, lr=0.01, fused=True),
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
}


def trained(group: Any, make: Make, steps: int = 1, **options: Any) -> tuple[ShardLite, optim.Optimizer]:
    torch.manual_seed(0)
    model = ShardLite(net(), group=group, **{"units": Block, **options})
    optimizer = make(model.parameters())
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer


def loss(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(3, WIDTH, generator=Turn(step, dist.get_rank(), 0).generator())
    return model(x).square().mean()


def train(model: ShardLite, optimizer: optim.Optimizer, step: int) -> None:
    take_step(optimizer, loss(model, step))


@pytest.mark.stages(1, 3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_state_of_the_same_shards_is_taken_over(group: Any, kind: str, stage: int) -> None:
    """From a state of its own, which went through a file, the next step has the same bits."""
    make = OPTIMIZERS[kind]
    first, optimizer = trained(group, make, 2, stage=stage)
    second, resumed = trained(group, make, 0, stage=stage)
    second.load_full_state_dict(first.full_state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((first, optimizer), (second, resumed)):
        train(*each, 2)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        same_bits(name, b.detach(), a.detach())


# ---- what is refused -------------------------------------------------------------------------------------------------


def of_another_rank(group: Any, make: Make, stage: int) -> tuple[dict[str, Any], str]:
    told: list[Any] = [None, None]
    dist.all_gather_object(told, trained(group, make, stage=stage)[1].state_dict(), group=group)
    return told[0], rf"of rank 0 of 2 \(stage {stage}\), this is rank 1 of 2"


def of_another_world_size(group: Any, make: Make, stage: int) -> tuple[dict[str, Any], str]:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model, optimizer = trained(alone, make, stage=stage)
    saved = optimizer.state_dict()  # on one rank the state is that of a whole model once the wrapped one is gone
    del model
    return saved, "of rank 0 of 1 "


def of_another_stage(group: Any, make: Make, stage: int) -> tuple[dict[str, Any], str]:
    return trained(group, make, stage=0)[1].state_dict(), r"\(stage 0\), this is rank \d of 2 \(stage"


def every_other(name: str, module: nn.Module) -> bool:
    return isinstance(module, Block) and name == "1"


def of_another_layout(group: Any, make: Make, stage: int) -> tuple[dict[str, Any], str]:
    return trained(group, make, stage=stage, units=every_other)[1].state_dict(), "there '.*' has the state of elem"


def of_an_unsharded_model(group: Any, make: Make, stage: int) -> tuple[dict[str, Any], str]:
    module = net()
    optimizer = optim.AdamW(module.parameters(), lr=0.01)
    loss(module, 0).backward()
    optimizer.step()
    return optimizer.state_dict(), "of an unsharded model, this is rank"


def of_fewer_parameters(group: Any, make: Make, stage: int) -> tuple[dict[str, Any], str]:
    saved = trained(group, lambda params: make(list(params)[:-1]), stage=stage)[1].state_dict()
    return saved, r"of \d+ parameters, this optimizer has \d+"


def of_another_step(group: Any, make: Make, stage: int) -> tuple[dict[str, Any], str]:
    model, optimizer = trained(group, make, 1, stage=stage)
    saved = [copy.deepcopy(optimizer.state_dict())]
    train(model, optimizer, 1)
    saved.append(optimizer.state_dict())
    return saved[dist.get_rank()], r"of different steps, \[1, 2\] by rank"


FOREIGN = (
    *(of_another_rank, of_another_world_size, of_another_stage, of_another_layout, of_an_unsharded_model),
    *(of_fewer_parameters, of_another_step),
)


def elements(value: Any) -> Any:
    return value.to_local() if isinstance(value, ShardTensor) else value


@pytest.mark.parametrize(
    ("kind", "stage"), [("ours", 3), ("fused", 1), slow("ours", 1), slow("ours", 2), slow("fused", 2), slow("fused", 3)]
)
@pytest.mark.parametrize("take", FOREIGN)
@pytest.mark.sample(3)
def test_any_other_is_refused_on_every_rank(group: Any, take: Any, kind: str, stage: int) -> None:
    """Both ranks raise, nothing has changed, and training goes on."""
    make = OPTIMIZERS[kind]
    foreign, words = take(group, make, stage)
    model, optimizer = trained(group, make, stage=stage)
    before = copy.deepcopy(optimizer.state_dict())
    right = r"load_state_dict of \w+: the state given to rank 1 does not fit" if dist.get_rank() == 0 else words
    with pytest.raises(LayoutError, match=right if take is of_another_rank else words):
        optimizer.load_state_dict(foreign)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(elements(after["state"][index][key]), elements(value), rtol=0, atol=0)
    train(model, optimizer, 5)


def test_parameters_beside_the_model(group: Any) -> None:
    """An optimizer may hold parameters of no wrapped model, too; one that holds no others says nothing."""
    model, other = trained(group, OPTIMIZERS["ours"], 0)[0], nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([*model.parameters(), other], lr=0.1)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert saved["shardlite"]["parts"][-1] == (str(len(saved["shardlite"]["parts"]) - 1), 0, 3, 3)
    assert "shardlite" not in optim.SGD([other], lr=0.1).state_dict()


def test_an_optimizer_outlives_its_model(group: Any) -> None:
    """An optimizer whose wrapped model is dropped still knows what its state is of."""
    optimizer = trained(group, OPTIMIZERS["ours"], stage=3)[1]
    gc.collect()
    assert optimizer.state_dict()["shardlite"]["of"].startswith(f"rank {group.rank()} of 2")
