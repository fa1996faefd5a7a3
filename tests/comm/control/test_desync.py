"""Ranks that diverge get an error that names rank, unit, operation and step, and never mixed data.

A process group is unusable after such an error, so every scenario has its own groups, over the same workers.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlite import AdamW, ShardLite
from shardlite.comm import streams
from shardlite.comm.transport.shared_memory import transport
from shardlite.errors import SAME_PASSES, ShardLiteError
from tests.support.internals import context
from tests.support.models.small import Residual, run_all
from tests.support.patience import seconds
from tests.support.twins.sharded import slow, take_step

WIDTH = 8
TIMEOUT = timedelta(seconds=seconds(4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(WIDTH, 12) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        x = run_all(self.blocks, x)
        if fails:
            raise ArithmeticError("the third batch is bad")
        return self.head(x).mean()


class Trained:
    """A wrapped model with its optimizer, on one of the ranks that go astray."""

    def __init__(self, group: dist.ProcessGroup, stage: int) -> None:
        torch.manual_seed(0)
        # Which ranks have failed so far.
        self.failed = dist.PrefixStore(f"failed in {group.group_name}", dist.distributed_c10d._get_default_store())
        self.model = ShardLite(Model(), group=group, stage=stage, timeout=TIMEOUT)
        self._wait_for_notes(seconds(60))  # of ranks that fail too, but may be far behind on a busy machine
        self.optimizer = AdamW(self.model.parameters())
        self.x = torch.ones(2, WIDTH)

    def _wait_for_notes(self, patience: float) -> None:
        reports = context(self.model).reports
        reports._patience, reports._waits = patience, None  # a standstill would be found before the timeout

    def expect_silence(self) -> None:
        """Make this rank give up soon on failure reports that will never come."""
        self._wait_for_notes(0.1)

    def backward(self) -> None:
        self.model(self.x).backward()

    def step(self) -> None:
        self.backward()
        take_step(self.optimizer)


def step_left_out(trained: Trained, rank: int) -> None:
    """Rank 1 computes its third gradients without a step by the second ones."""
    trained.step()
    trained.backward()
    if rank != 1:
        trained.optimizer.step()
    trained.step()


def uneven_backwards(trained: Trained, rank: int) -> None:
    """Rank 1 has one micro-batch more than others before a step."""
    trained.step()
    for _ in range(2 + (rank == 1)):
        trained.backward()
    trained.optimizer.step()
    trained.step()


def uneven_accumulation(trained: Trained, rank: int) -> None:
    """The same, and each rank reduces with its last backward."""
    trained.step()
    with trained.model.no_sync():
        for _ in range(1 + (rank == 1)):
            trained.backward()
    trained.step()


def uneven_but_joined(trained: Trained, rank: int) -> None:
    for _ in range(3):
        for x in trained.model.join([trained.x] * (2 + (rank == 1))):
            trained.model(x).backward()
        take_step(trained.optimizer)


def loop_left_early(trained: Trained, rank: int) -> None:
    """Rank 1 has fewer batches, and saves while the others train."""
    for _ in range(2 if rank == 1 else 3):
        trained.step()
    trained.model.full_state_dict()


def evaluation_on_one_rank(trained: Trained, rank: int) -> None:
    """The classic: `if rank == 0: validate(model)`."""
    trained.step()
    if rank == 0:
        with torch.no_grad():
            trained.model(trained.x)
    trained.step()


def other_module(trained: Trained, rank: int) -> None:
    """Rank 1 calls a block where the others call the model."""
    trained.step()
    if rank == 1:
        trained.model.module.blocks[0](trained.x)
    else:
        trained.model(trained.x)


def other_mode(trained: Trained, rank: int) -> None:
    """Rank 1 has forgotten `model.train()`."""
    trained.model.train(rank == 0)
    trained.step()


def late(trained: Trained, rank: int) -> None:
    """Rank 1 arrives after rank 0 has timed out."""
    trained.step()
    trained.expect_silence()
    if rank == 1:
        trained.failed.wait(["0"], timedelta(seconds=seconds(60)))
    trained.step()


def forward_fails(trained: Trained, rank: int) -> None:
    trained.step()
    trained.model(trained.x, fails=rank == 1).backward()


def backward_fails(trained: Trained, rank: int) -> None:
    trained.step()
    loss = trained.model(trained.x)
    if rank == 1:
        with pytest.raises(ArithmeticError):
            (loss + _Fails.apply(loss)).backward()
        trained.step()
    loss.backward()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise ArithmeticError("a bad gradient")


def astray_body(world, stage, scenario: Callable[[Trained, int], None]):
    """Run a scenario on a new group; return the error of this rank."""
    trained = Trained(dist.new_group(list(range(world.size()))), stage)
    try:
        scenario(trained, world.rank())
    except (ShardLiteError, ArithmeticError) as error:
        trained.failed.set(str(world.rank()), "")
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


def errors(cluster, scenario, *, size=2, stage=3) -> list[str]:
    """Return the errors of all ranks. The cluster bounds how long they wait."""
    errors: list[str] = cluster.run(astray_body, size, stage, scenario)
    return errors


@pytest.mark.parametrize("stage", [3, *map(slow, (0, 1, 2))])
def test_a_step_that_one_rank_left_out(cluster, stage):
    first, second = errors(cluster, step_left_out, stage=stage)
    assert "at step 2" in first
    assert "Meanwhile rank 1:" in first
    assert "at step 1" in first.split("Meanwhile rank 1:")[1]
    assert "at step 1" in second
    assert "at step 2" in second.split("Meanwhile rank 0:")[1]


@pytest.mark.parametrize("stage", [3, 2, *map(slow, (0, 1))])
def test_uneven_micro_batches(cluster, stage):
    for message in errors(cluster, uneven_backwards, stage=stage):
        assert SAME_PASSES in message


def test_uneven_micro_batches_that_are_accumulated(cluster):
    for message in errors(cluster, uneven_accumulation):
        assert message.startswith("DesyncError: ")
        assert message.count(SAME_PASSES) == 1


@pytest.mark.parametrize(
    ("stage", "scenario"),
    [(3, uneven_but_joined), (2, uneven_but_joined), (2, uneven_accumulation), (0, uneven_accumulation)],
)
def test_what_the_error_says_about_micro_batches_works(group, stage, scenario):
    trained = Trained(dist.new_group(list(range(group.size()))), stage)
    scenario(trained, group.rank())
    trained.step()


@pytest.mark.slow  # four ranks do the same in the next test
def test_a_loop_that_one_rank_left_early(cluster):
    first, second = errors(cluster, loop_left_early)
    assert "all-gather of unit '(root)', flat 0 of model" in first
    assert "Meanwhile rank 1: full_state_dict (" in first
    assert "full_state_dict: rank 1 timed out" in second
    assert "Meanwhile rank 0: all-gather of unit" in second


def test_four_ranks_tell_of_all_others(cluster):
    told = errors(cluster, loop_left_early, size=4)
    for rank, message in enumerate(told):
        assert all(f"Meanwhile rank {other}: " in message for other in range(4) if other != rank)
    assert sum("Meanwhile rank 1: full_state_dict (" in message for message in told) == 3


def test_an_evaluation_on_one_rank(cluster):
    first, second = errors(cluster, evaluation_on_one_rank)
    for message in (first, second):
        assert message.startswith("CommError: ")
        assert "at step 1" in message
    assert "during the forward of the model without gradients, for unit '(root)'" in first  # it is the first one
    assert "all-gather of unit '(root)'" in second
    assert "during the forward of the model (" in second


def test_ranks_that_communicate_notice_at_once(cluster):
    """In a first pass all ranks communicate, and detect that their passes differ."""
    first, second = errors(cluster, other_mode)
    assert first.startswith(
        "DesyncError: rank 0, in the forward of the model, for unit '(root)', at step 0, meets rank"
    )
    assert second.startswith("DesyncError: rank 1, in the forward of the model in eval mode, for unit '(root)', at ste")
    assert "meets rank 1 in another pass, for unit '(root)'" in first


@pytest.mark.slow  # like an evaluation on one rank
def test_another_module(cluster):
    for message in errors(cluster, other_module):
        assert "rank" in message
        assert "at step 1" in message


def test_a_late_rank(cluster):
    first, second = errors(cluster, late)
    assert "CommError: " in first
    assert "Meanwhile rank 1: has said nothing" in first
    assert "Meanwhile rank 0: " in second


@pytest.mark.slow  # its words are those of `test_faults.py`
def test_an_exception_in_the_forward_of_one_rank(cluster):
    first, second = errors(cluster, forward_fails)
    assert "Meanwhile rank 1: its forward at step 1 ended in ArithmeticError: the third batch is bad" in first
    assert second == "ArithmeticError: the third batch is bad"


def test_an_exception_in_the_backward_of_one_rank(cluster):
    for message in errors(cluster, backward_fails):
        assert "CommError" in message
        assert "at step 1" in message
        assert "Meanwhile rank" in message


# ---- found out at once -----------------------------------------------------------------------------------------------


def validates(model: ShardLite, optimizer: AdamW, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def saves(model: ShardLite, optimizer: AdamW, x: Tensor) -> None:
    model.full_state_dict()


def clips(model: ShardLite, optimizer: AdamW, x: Tensor) -> None:
    model.clip_grad_norm_(1.0)


def resumes(model: ShardLite, optimizer: AdamW, x: Tensor) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


@contextmanager
def looking_often() -> Iterator[None]:
    """Let ranks report ten times as often where they wait."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (streams, transport):
            patch.setattr(module, "SLOW", 0.1)
        yield


def alone_body(world, stage: int, act: Callable[[ShardLite, AdamW, Tensor], None]) -> str:
    """Rank 0 does something alone. No wait is ever long enough to end in a timeout."""
    group = dist.new_group(list(range(world.size())))
    model = ShardLite(Model(), group=group, stage=stage, timeout=timedelta(hours=1))
    optimizer, x = AdamW(model.parameters()), torch.ones(2, WIDTH)

    def train() -> None:
        for step in range(3):
            model(x).backward()
            if step == 1 and world.rank() == 0:
                act(model, optimizer, x)
            take_step(optimizer)

    with looking_often(), pytest.raises(ShardLiteError) as caught:
        train()
    return str(caught.value)


ALONE = [(validates, 3), (saves, 3), (saves, 2), (clips, 1), (resumes, 0)]


@pytest.mark.parametrize(("act", "stage"), ALONE)
def test_ranks_that_wait_for_each_other_are_told_where_without_a_timeout(cluster, act, stage):
    told = cluster.run(alone_body, 2, stage, act)
    line = act.__code__.co_firstlineno
    assert any("ranks wait for each other in different operations" in message for message in told)
    for message in told:
        assert message.count("ranks wait for each other") <= 1
        places = [int(each) for each in re.findall(rf"{Path(__file__).name}, line (\d+)", message)]
        assert any(line < each <= line + 3 for each in places) or "has given up" in message
    assert any(re.search(r"rank 0 in .*\n  rank 1 in ", message) for message in told)


def test_a_rank_that_is_late_is_waited_for(group):
    """A rank that is late, but comes, is waited for, and no deadlock is reported."""
    own = dist.new_group(list(range(group.size())))
    model = ShardLite(Model(), group=own, timeout=timedelta(hours=1))
    with looking_often():
        for turn in range(2):
            if turn == group.rank():
                time.sleep(1.0)  # the others look ten times meanwhile
            model(torch.ones(2, WIDTH)).backward()
