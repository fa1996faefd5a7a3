"""Programs that change or select the module's own parameters after wrapping work, or raise an error at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from shardlite import AdamW, LayoutError, Precision, ShardLite, ShardWarning
from tests.support.models.residual import WIDTH, Block, net
from tests.support.twins.sharded import Pair, Turn

UNITS = Block


def rows(model: Any, turn: Turn) -> Tensor:
    return model(torch.randn(3, WIDTH, generator=turn.generator())).square().mean()


# ---- new values ------------------------------------------------------------------------------------------------------


def by_init(param: nn.Parameter) -> None:
    nn.init.constant_(param, 0.01)


def by_fill(param: nn.Parameter) -> None:
    param.data.fill_(0.01)


def by_copy(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.copy_(torch.full(param.shape, 0.01))


def by_assignment(param: nn.Parameter) -> None:
    param.data = torch.full(param.shape, 0.01)


WRITES = (by_init, by_fill, by_copy, by_assignment)


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.stages(0, 3)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.sample(2)
def test_new_values_are_kept_or_refused(group, write, stage, compute):
    """Right after wrapping, between steps, and between a backward and its step."""
    pair = Pair(net, group, stage=stage, units=UNITS, precision=Precision(compute=compute))
    whole = dict(pair.model.module.named_parameters())
    refusals: list[str] = []

    def everywhere() -> bool:
        """Write into one parameter of the model and of its twin; return whether that was allowed."""
        try:
            write(whole["1.inner.weight"])
        except LayoutError as error:
            refusals.append(str(error))
            return False
        with torch.no_grad():
            value = torch.tensor(0.01, dtype=compute or torch.float32).float()
            pair.twin.masters["1.inner.weight"].copy_(value)
        return True

    kept = [everywhere()]
    pair.backward(rows, ["step"])
    kept.append(everywhere())
    pair.finish()
    kept.append(everywhere())
    pair.step(rows)
    assert all("'1.inner.weight'" in each and "gathered()" in each for each in refusals)
    if stage == 3:
        assert not any(kept)
    elif write in (by_init, by_copy):  # after the backward, whole parameters are there
        assert kept[1]
    if stage == 0 and compute is None:
        assert all(kept)


# ---- steps by hand ---------------------------------------------------------------------------------------------------


def by_data(params: list[nn.Parameter]) -> None:
    for p in params:
        if p.grad is not None:
            p.data -= 0.1 * p.grad


def by_add(params: list[nn.Parameter]) -> None:
    for p in params:
        p.data.add_(p.grad.data, alpha=-0.1)


def without_data(params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for p in params:
            p -= 0.1 * p.grad


def at_once(params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        torch._foreach_add_(params, [p.grad for p in params], alpha=-0.1)


@pytest.mark.stages(0, 3)
@pytest.mark.parametrize("step", [by_data, by_add, without_data, at_once])
def test_steps_of_full_parameters_are_refused(group, step, stage):
    """At stage 0 they are what is stepped; elsewhere every rank is told, and has changed nothing."""
    model = ShardLite(net(), group=group, stage=stage, units=UNITS)
    rows(model, Turn(0, dist.get_rank(), 0)).backward()
    before = [shard.detach().clone() for shard in model.parameters()]
    if stage == 0:
        expected = [shard - 0.1 * shard.grad for shard in model.parameters()]
        step(list(model.module.parameters()))
        for shard, value in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(shard, value)
        return
    with pytest.raises(LayoutError, match=r"parameters\(\)` of the ShardLite model"):
        step(list(model.module.parameters()))
    assert all(map(torch.equal, before, model.parameters()))


# ---- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.stages(1, 3)
@pytest.mark.parametrize("make", [AdamW, optim.SGD])
def test_groups_chosen_by_identity(group: Any, make: Callable[..., optim.Optimizer], stage: int) -> None:
    """A group that is empty, since it was chosen among others than the optimizer gets."""
    model = ShardLite(net(), group=group, stage=stage, units=UNITS)
    decayed = {id(p) for p in model.module.parameters() if p.ndim > 1}
    groups = [
        {"params": [p for p in model.parameters() if id(p) in decayed], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if id(p) not in decayed], "weight_decay": 0.0},
    ]
    optimizer = make(groups)
    rows(model, Turn(0, 0, 0)).backward()
    with pytest.warns(ShardWarning, match="group 0 of .* has no parameters. Do not choose parameters by identity"):
        optimizer.step()
    optimizer.step()
