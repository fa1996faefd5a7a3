"""Parameters that some ranks, or all, leave out: as in `DistributedDataParallel(find_unused_parameters=True)`."""

import copy
import warnings

import pytest
import torch
from torch import optim
from torch.nn.parallel import DistributedDataParallel

from shardlite import AdamW, ShardLite
from tests.support.models.experts import EXPERTS, WIDTH, Model, loss, routed
from tests.support.twins.sharded import WIDE, Pair, Turn, same_states, some_stages, take_step

STEPS = 10


@pytest.mark.ranks(2, WIDE)
@pytest.mark.parametrize("recipe", ["adamw", "torch-adamw"])
def test_experts_without_tokens_follow_the_twin_for_ten_steps(group, recipe):
    """Those that no rank used in a step are left alone, and each counts its own steps."""
    used = [
        {choice for rank in range(group.size()) for micro in range(2) for choice in tokens(step, rank, micro)}
        for step in range(STEPS)
    ]
    steps = [sum(expert in each for each in used) for expert in range(EXPERTS)]
    assert steps == [10, 9, 3, 1, 0]
    for stage in some_stages(2, 3):
        pair = Pair(Model, group, recipe=recipe, stage=stage)
        for step in range(STEPS):
            pair.step(loss, modes=("local", "step") if step % 4 == 1 else ("step",), clip=0.5)
        names = {shard: name for name, shard in pair.model.named_parameters()}
        counts = {names[shard]: int(state["step"]) for shard, state in pair.optimizer.state.items()}
        assert [counts.get(f"blocks.0.experts.{expert}.weight", 0) for expert in range(EXPERTS)] == steps
        assert counts["blocks.0.shared.weight"] == STEPS


def tokens(step: int, rank: int, micro: int) -> list[int]:
    """Return what is chosen in a backward that really runs."""
    if micro == 1 and step % 4 != 1:
        return []
    return routed(Turn(step, rank, micro)).tolist()


def test_gradients_are_there_where_data_parallel_has_them(group):
    """At two ranks a sum commutes, so plain SGD has the same bits."""
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    torch.manual_seed(0)
    plain = Model()
    for stage in (0, 1, 2, 3):
        twin = DistributedDataParallel(copy.deepcopy(plain), process_group=group, find_unused_parameters=True)
        model = ShardLite(copy.deepcopy(plain), stage=stage, group=group)
        optimizers = [optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
        for step in range(STEPS):
            turn = Turn(step, group.rank(), 0)
            for each in (model, twin):
                loss(each, turn).backward()
            there = {name for name, shard in model.named_parameters() if shard.grad is not None}
            expected = {name for name, param in twin.module.named_parameters() if param.grad is not None}
            assert there == expected, f"stage {stage}, step {step}"
            for optimizer in optimizers:
                take_step(optimizer)
        same_states("state", model.full_state_dict(), twin.module.state_dict())


def test_zeros_that_were_left_are_stepped_by(group):
    """`zero_grad(set_to_none=False)` leaves zeros, which an unused parameter keeps, and which are then stepped by."""
    results = []
    for make in (lambda module: ShardLite(module, group=group), lambda module: module):
        torch.manual_seed(0)
        model = make(Model())
        optimizer = AdamW(model.parameters(), lr=0.1)
        for step in (2, 3):  # expert 2 is used in the first of them only
            turn = Turn(step, 0, 0)
            loss(model, turn).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        steps = int(optimizer.state[dict(model.named_parameters())["blocks.0.experts.2.weight"]]["step"])
        weights = model.full_state_dict() if isinstance(model, ShardLite) else model.state_dict()
        results.append((steps, weights["blocks.0.experts.2.weight"]))
    (ours, weight), (theirs, expected) = results
    assert ours == theirs == 2
    torch.testing.assert_close(weight, expected, rtol=0, atol=0)


def test_a_unit_that_no_rank_uses_has_no_gradients(group):
    """A unit that no rank uses has no gradients; the others do."""
    model = ShardLite(Model(), group=group)
    x = torch.randn(8, WIDTH)
    model.module.blocks[0](x, torch.zeros(8, dtype=torch.int64)).sum().backward()
    expected = [f"blocks.0.{part}.{kind}" for part in ("experts.0", "shared") for kind in ("bias", "weight")]
    assert sorted(name for name, shard in model.named_parameters() if shard.grad is not None) == expected
