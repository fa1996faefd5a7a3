"""If a rank has skipped a step, ranks have weights of different steps, which are neither saved nor returned."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardlite
from shardlite import AdamW, CheckpointError, CommError, ShardLite, WholeParameters
from shardlite.checkpoint.in_memory.copies import newest
from shardlite.errors import DesyncError
from tests.support.checkpoints import assert_names
from tests.support.twins.sharded import same_bits

X = torch.ones(2, 8)


def trained(group: Any, stage: int) -> tuple[ShardLite, AdamW]:
    torch.manual_seed(0)
    model = ShardLite(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), group=group, stage=stage)
    optimizer = AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: ShardLite, optimizer: optim.Optimizer, *, skips: bool = False) -> None:
    model(X).square().sum().backward()
    if not skips:
        optimizer.step()
    optimizer.zero_grad()


CALLS: dict[str, Callable[[Path, ShardLite, AdamW], object]] = {
    "save": lambda path, model, optimizer: shardlite.save(path, model, optimizer),
    "async_save": lambda path, model, optimizer: shardlite.async_save(path, model, optimizer),
    "save_in_memory": lambda path, model, optimizer: shardlite.save_in_memory(path, model, optimizer, step=1),
    "full_state_dict": lambda path, model, optimizer: model.full_state_dict(),
    "EMA.full_state_dict": lambda path, model, optimizer: shardlite.EMA(model).full_state_dict(),
    "full_optimizer_state": lambda path, model, optimizer: shardlite.full_optimizer_state(model, optimizer),
    "full_parameters": lambda path, model, optimizer: next(model.full_parameters()),
    "load_full_state_dict(strict=False)": lambda path, model, optimizer: model.load_full_state_dict({}, strict=False),
    "unwrap": lambda path, model, optimizer: model.unwrap(),
}


@pytest.mark.stages(0, 3)
def test_every_rank_refuses_and_works_after_a_load(group: Any, stage: int, path: Path) -> None:
    model, optimizer = trained(group, stage)
    shardlite.save(path, model, optimizer, step=1)
    saved = model.full_state_dict()
    step(model, optimizer, skips=dist.get_rank(group) == 1)
    for call in CALLS.values():
        with pytest.raises(DesyncError, match=r"a rank has skipped a step.*Load weights on every rank"):
            call(path, model, optimizer)
    assert_names(group, path, "step-00000001")
    shardlite.load(path, model, optimizer)
    for name, value in model.full_state_dict().items():
        same_bits(name, value, saved[name])
    step(model, optimizer)
    shardlite.save(path, model, optimizer, step=2)


@pytest.mark.stages(0, 3)
@pytest.mark.parametrize("load", ["load_full_state_dict", "load_state_dict"])
def test_full_weights_can_be_loaded_instead(group: Any, stage: int, load: str) -> None:
    model, optimizer = trained(group, stage)
    saved = copy.deepcopy(model.full_state_dict())
    step(model, optimizer, skips=dist.get_rank(group) == 1)
    getattr(model, load)(saved)
    for name, value in model.full_state_dict().items():
        same_bits(name, value, saved[name])
    step(model, optimizer)


def test_copies_in_memory_of_different_steps_are_not_loaded():
    held = [{"0": [(4, 2, 4), (5, 2, 5)]}, {"1": [(4, 2, 4), (5, 2, 4)]}]
    assert newest(held) == (4, "")
    step, why_not = newest([{"0": [(5, 2, 5)]}, {"1": [(5, 2, 4)]}])
    assert step == -1
    assert why_not.endswith("rank 0 has 5 (after 5 steps); rank 1 has 5 (after 4 steps)")


class _Raises(optim.SGD):
    now = False

    def step(self, closure: Any = None) -> Any:
        if _Raises.now:
            raise ArithmeticError("a singular matrix")
        return super().step(closure)


def raising_body(world: Any, stage: int, path: Path) -> list[str]:
    """The class of `WholeParameters` raises on rank 1, which catches the error and continues."""
    group = dist.new_group(list(range(world.size())))  # afterwards, the connections of the group are closed
    model, _ = trained(group, stage)
    optimizer = WholeParameters(model.parameters(), _Raises, lr=0.1)
    told = []
    for _ in range(2):
        try:
            _Raises.now = False
            model(X).square().sum().backward()
            _Raises.now = dist.get_rank(group) == 1
            optimizer.step()
            optimizer.zero_grad()
        except (ArithmeticError, CommError) as error:
            told.append(f"{type(error).__name__}: {error}")
    try:
        shardlite.save(path, model, optimizer)
    except (CheckpointError, CommError) as error:
        told.append(f"{type(error).__name__}: {error}")
    return told


@pytest.mark.stages(0, 3)
def test_a_class_that_raises_on_one_rank_ends_the_step_of_every_rank(cluster: Any, stage: int, tmp_path: Path) -> None:
    own, raising = cluster.run(raising_body, 2, stage, tmp_path / "run")
    cause = "a step of whole parameters at step 1 ended in ArithmeticError: a singular matrix"
    assert own[0].startswith("CommError: ")
    assert f"rank 1 has failed: {cause}" in own[0]
    assert raising[0] == "ArithmeticError: a singular matrix"
    assert f"not started, because this rank has failed before: {cause}" in raising[1]
    assert "saved" not in own[-1]
    assert "restart the run" in raising[-1]
    assert not list((tmp_path / "run").glob("step-*"))
