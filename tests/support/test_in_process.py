"""In-process ranks: whole models get the bits that they get on processes, and ranks do not get in each other's way."""

import sys
import threading
import traceback
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlite import AdamW, CommError, ShardLite
from shardlite.optim.adamw import accumulating, adopt
from tests.support.models.losses import on_tokens
from tests.support.models.small import MLP, LanguageModel
from tests.support.optim_cases import place_shards
from tests.support.ranks import in_process
from tests.support.ranks.in_process import RankError, check_in_process, failures_in_process, run_in_process
from tests.support.twins.sharded import Pair

# ---- whole models ---------------------------------------------------------------------------------------------------


def follows(group: Any, stage: int) -> None:
    """Body of a rank."""
    pair = Pair(lambda: LanguageModel(blocks=2), group, stage=stage)
    pair.step(on_tokens, clip=0.01)
    pair.step(on_tokens, ("local", "sharded", "step"))


# `tests/model/test_parity.py` has all stages at all world sizes on processes.
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 1), (3, 2), (4, 0)])
def test_models_follow_their_twins(world_size, stage):
    check_in_process(follows, world_size, stage)


def trained_with_dropout(group: Any) -> dict[str, Tensor]:
    """Body of a rank: its masks are drawn from the default generator, after its weights."""
    model = ShardLite(nn.Sequential(MLP([6, 9, 5]), nn.Dropout(0.5), nn.Linear(5, 3)), units=nn.Linear, group=group)
    optimizer = AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 6) + dist.get_rank(group)).square().mean().backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model.full_state_dict()


def test_bits_are_those_of_processes(cluster):
    for got, expected in zip(
        run_in_process(trained_with_dropout, 2), cluster.run(trained_with_dropout, 2), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def wraps_two(group: Any) -> list[int]:
    models = [ShardLite(nn.Linear(4, 4), group=group) for _ in range(2)]
    return [model._context.instance for model in models]


def test_models_are_numbered_in_each_world():
    for _ in range(2):
        assert run_in_process(wraps_two, 3) == [[1, 2]] * 3


def over_replicas(group: Any) -> dict[str, Tensor]:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    model = ShardLite(MLP([6, 9, 5]), units=nn.Linear, group=mesh)
    model(torch.ones(2, 6) * dist.get_rank(group)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.full_state_dict()


def test_ranks_have_meshes():
    first, *others = run_in_process(over_replicas, 4)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def multiplies_twice(_: Any) -> None:
    torch.manual_seed(7)
    layer = nn.Linear(24, 40)
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(3))
    first = layer(x)
    nn.functional.layer_norm(x, (24,))  # finds out how many cores PyTorch may use
    torch.testing.assert_close(first, layer(x), rtol=0, atol=0)


def test_the_first_product_of_a_rank_has_the_bits_of_later_ones():
    check_in_process(multiplies_twice, 2)


# ---- process groups -------------------------------------------------------------------------------------------------


def collectives(group: Any) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, {"rank": rank}, group=group)
    assert told == [{"rank": r} for r in range(ranks)]
    for operation, expected in ((dist.ReduceOp.SUM, 6), (dist.ReduceOp.MAX, 3), (dist.ReduceOp.MIN, 1)):
        tensor = torch.tensor([rank + 1, 0])
        dist.all_reduce(tensor, operation, group=group)
        assert tensor.tolist() == [expected, 0]
    tensor = torch.tensor([rank])
    dist.broadcast(tensor, 1, group=group)
    assert tensor.item() == 1
    objects = [rank]
    dist.broadcast_object_list(objects, 2, group=group)
    assert objects == [2]
    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)] if rank == 2 else None
    dist.gather(torch.tensor([rank]), parts, 2, group=group)
    assert rank != 2 or [part.item() for part in parts] == [0, 1, 2]
    received = torch.zeros(1, dtype=torch.int64)
    expected = dist.irecv(received, (rank - 1) % ranks, group=group, tag=3)
    dist.isend(torch.tensor([rank]), (rank + 1) % ranks, group=group, tag=3).wait()
    expected.wait()
    assert received.item() == (rank - 1) % ranks
    dist.barrier(group)


def test_collectives_of_torch():
    check_in_process(collectives, 3)


def in_pairs(group: Any) -> list[int]:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    told: list[Any] = [None, None]
    dist.all_gather_object(told, dist.get_rank(group), group=pairs[dist.get_rank(group) // 2])
    return told


def test_groups_of_some_ranks():
    assert run_in_process(in_pairs, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_the_process_has_no_group_afterwards():
    hook = sys.excepthook
    check_in_process(collectives, 3)
    assert not dist.is_initialized()
    assert sys.excepthook is hook


# ---- what a process has one of --------------------------------------------------------------------------------------


def draws(group: Any) -> tuple[Tensor, Tensor]:
    first = torch.rand(3)
    if dist.get_rank(group) == 1:
        torch.manual_seed(7)
    dist.barrier(group)
    return first, torch.rand(3)


def test_each_rank_has_a_default_generator():
    torch.manual_seed(3)
    expected = torch.rand(6)
    torch.manual_seed(3)
    got = [torch.rand(3)]
    results = run_in_process(draws, 3)
    got.append(torch.rand(3))
    torch.testing.assert_close(torch.cat(got), expected, rtol=0, atol=0)
    zero, seven = torch.Generator().manual_seed(0), torch.Generator().manual_seed(7)
    first, second, reseeded = (
        torch.rand(3, generator=zero),
        torch.rand(3, generator=zero),
        torch.rand(3, generator=seven),
    )
    for rank, (before, after) in enumerate(results):
        torch.testing.assert_close(before, first, rtol=0, atol=0)
        torch.testing.assert_close(after, reseeded if rank == 1 else second, rtol=0, atol=0)


def warns(group: Any) -> str | None:
    rank = dist.get_rank(group)
    if rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.barrier(group)
            warnings.warn("ignored", stacklevel=1)
            dist.barrier(group)
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.barrier(group)
        warnings.warn(f"rank {rank}", stacklevel=1)
        dist.barrier(group)
    return str(caught[0].message)


def test_each_rank_has_filters_of_warnings():
    before = list(warnings.filters)
    assert run_in_process(warns, 3) == [None, "rank 1", "rank 2"]
    assert warnings.filters == before


# ---- failures -------------------------------------------------------------------------------------------------------


def fails_alone(group: Any, during: str) -> None:
    """Body of a rank: the others wait for the last one in a collective of PyTorch, or in a gather of the model."""
    model = ShardLite(MLP([6, 9, 5]), units=nn.Linear, group=group)
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        raise ValueError("no more of this")
    if during == "barrier":
        dist.barrier(group)
    else:
        model(torch.ones(1, 6))


@pytest.mark.parametrize("during", ["barrier", "gather"])
def test_the_first_failure_is_raised_and_nobody_waits(during):
    with pytest.raises(RankError, match="rank 2 of 3: ValueError: no more of this") as caught:
        run_in_process(fails_alone, 3, during)
    assert "fails_alone" in "".join(traceback.format_tb(caught.value.__cause__.__traceback__))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_failures_by_rank():
    first, second, third = failures_in_process(fails_alone, 3, "gather")
    assert first[0] == second[0] == CommError.__name__
    assert "rank 2 has failed" in first[1]
    assert third == ("ValueError", "no more of this")
    assert failures_in_process(collectives, 3) == [None] * 3


def leaves_alone(group: Any) -> None:
    if dist.get_rank(group) == 0:
        dist.barrier(group)


def test_ranks_that_wait_for_good_are_ended(monkeypatch):
    monkeypatch.setattr(in_process, "TIMEOUT", 0.5)
    with pytest.raises(RankError, match="ranks wait for each other:\nrank 0"):
        run_in_process(leaves_alone, 2)


# ---- tables of the process ------------------------------------------------------------------------------------------


def test_optimizers_come_and_go_while_other_threads_look_for_theirs():
    """The table of optimizers is one per process: threads must not stumble over each other's entries."""
    failures: list[BaseException] = []

    def live() -> None:
        kept = []  # a long table takes long to walk
        try:
            for _ in range(30):
                (param,) = place_shards([nn.Parameter(torch.ones(8))])
                optimizer = AdamW([param], in_backward=True)
                kept.append(optimizer)
                with accumulating([param]):
                    param.sum().backward()
                assert param.grad is not None, "left alone"
                param.grad = None
                param.sum().backward()
                assert param.grad is None, "stepped"
                optimizer.step()
                shard = nn.Parameter(param.detach().clone())
                adopt({param: shard}, lambda _, tensor: tensor)
                assert optimizer.param_groups[0]["params"] == [shard]
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=live) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures, failures[0]
