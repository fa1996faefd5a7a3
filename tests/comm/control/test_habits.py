"""What programs do on rank 0 alone ends at once, on each rank that waits, in an error that says what to write.

A timeout never ends these runs: it is an hour. What only looks like such a habit, because a rank is late, goes on.
"""

import io
import math
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlite import AdamW, LayoutError, NonFiniteWarning, Route, ShardLite, load, save
from shardlite.comm import streams
from shardlite.comm.control import collective_waits, store
from shardlite.comm.control.failure_reports import _may_end
from shardlite.comm.transport import gloo
from shardlite.comm.transport.shared_memory import transport as shm
from shardlite.errors import EVERY_RANK, SAME_PASSES, ShardLiteError
from tests.support.twins.sharded import slow, take_step


@contextmanager
def looking_often() -> Iterator[None]:
    """Let ranks report often where they wait."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (streams, shm, store, gloo):
            patch.setattr(module, "SLOW", 0.1)
        patch.setattr(collective_waits, "PERIOD", 0.1)
        yield


class Program:
    """A wrapped model with its optimizer, over its own groups of all ranks."""

    def __init__(self, world: Any, stage: int = 3, transport: str = "auto") -> None:
        torch.manual_seed(0)
        self.group = dist.new_group(list(range(world.size())))
        blocks = [nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6)) for _ in range(3)]
        self.model = ShardLite(
            nn.Sequential(*blocks, nn.Linear(6, 1)),
            stage=stage,
            group=self.group,
            route=Route(transport=transport),
            timeout=timedelta(hours=1),
        )
        self.optimizer, self.x = AdamW(self.model.parameters()), torch.ones(2, 6)

    def step(self) -> None:
        self.model(self.x).mean().backward()
        take_step(self.optimizer)


def validate(program: Program) -> None:
    with torch.no_grad():
        program.model(program.x)


def call_the_module(program: Program) -> None:
    with torch.no_grad():
        program.model.module[0](program.x)


def gather_whole_weights(program: Program) -> None:
    program.model.full_state_dict()


def print_a_gathered_weight(program: Program) -> None:
    with program.model.gathered():
        print(program.model.module[0][0].weight)


def print_a_whole_tensor(program: Program) -> None:
    print(program.model.state_dict()["0.0.weight"].full_tensor())


def save_a_checkpoint(program: Program) -> None:
    save(tempfile.mkdtemp(), program.model, program.optimizer)


def load_a_checkpoint(program: Program) -> None:
    load(tempfile.mkdtemp(), program.model, missing_ok=True)


def load_whole_weights(program: Program) -> None:
    program.model.load_full_state_dict({})


def load_shards(program: Program) -> None:
    program.model.load_state_dict(program.model.state_dict())


def unwrap(program: Program) -> None:
    program.model.unwrap()


def clip(program: Program) -> None:
    program.model.clip_grad_norm_(1.0)


def clip_as_in_torch(program: Program) -> None:
    torch.nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)


Habit = Callable[[Program], None]
HABITS = [
    *(validate, call_the_module, gather_whole_weights, print_a_gathered_weight, print_a_whole_tensor),
    *(save_a_checkpoint, load_a_checkpoint, load_whole_weights, load_shards, unwrap, clip, clip_as_in_torch),
]
QUICK = {(save_a_checkpoint, "train"), (validate, "barrier"), (validate, "broadcast"), (save_a_checkpoint, "gather")}


def train_on(program: Program) -> None:
    program.step()


def reach_a_barrier(program: Program) -> None:
    dist.barrier(program.group)


def add_up_a_metric(program: Program) -> None:
    dist.all_reduce(torch.ones(1), group=program.group)


def receive_an_object(program: Program) -> None:
    dist.broadcast_object_list([1], group_src=0, group=program.group)


def collect_losses(program: Program) -> None:
    """Gather on rank 1. Other ranks that have sent their loss go on, and wait in their next step."""
    losses = [torch.ones(1) for _ in range(program.group.size())]
    dist.gather(torch.ones(1), losses if program.group.rank() == 1 else None, group_dst=1, group=program.group)
    if program.group.rank() > 1:
        program.step()


def reach_another_call(program: Program) -> None:
    program.model.load_full_state_dict(None)


THEN = {
    "train": train_on,
    "barrier": reach_a_barrier,
    "metric": add_up_a_metric,
    "broadcast": receive_an_object,
    "gather": collect_losses,
    "call": reach_another_call,
}


def alone_body(world: Any, stage: int, transport: str, habit: Habit, then: str) -> str:
    """Rank 0 does something alone. Return each rank's error, or `""` where the rank waits in PyTorch."""
    program = Program(world, stage, transport)
    program.step()
    program.model(program.x).mean().backward()
    with looking_often():
        try:
            if world.rank() == 0:
                habit(program)
            THEN[then](program)
        except ShardLiteError as error:
            if world.rank() == 0 and then not in ("train", "call"):
                THEN[then](program)  # lets the other ranks go
            return str(error)
    return ""


CASES = [
    pytest.param(*case, marks=() if (case[3], case[4]) in QUICK and case[0] == 2 else pytest.mark.slow)
    for case in [
        *((2, 3, "auto", habit, "train") for habit in HABITS),
        *((2, 3, "p2p", habit, "barrier") for habit in HABITS),
        *((3, 3, "auto", habit, "barrier") for habit in (validate, save_a_checkpoint)),
        *((3, 2, "p2p", habit, then) for habit in (save_a_checkpoint, clip) for then in ("train", "barrier")),
        (2, 3, "auto", gather_whole_weights, "metric"),
        *((ranks, 3, "auto", validate, "broadcast") for ranks in (2, 3)),
        *((ranks, 3, "auto", save_a_checkpoint, "gather") for ranks in (2, 3)),
    ]
]


@pytest.mark.parametrize(("ranks", "stage", "transport", "habit", "then"), CASES)
def test_what_one_rank_does_alone_ends_at_once(cluster, ranks, stage, transport, habit, then):
    told = cluster.run(alone_body, ranks, stage, transport, habit, then)
    # On a busy machine a rank may hear of another one's failure before it hears why.
    found = [message for message in told if "ranks wait for each other in different operations" in message]
    assert found
    assert all(EVERY_RANK in message for message in found)
    assert all(f"{__file__}, line" in message for message in found)
    if then == "train":
        assert all(told)
    else:
        assert re.search(r"rank 1 in torch\.distributed\.(all_reduce|barrier|broadcast|gather)", told[0])


def test_a_rank_that_receives_slowly_is_waited_for():
    """The source of a broadcast continues before the other ranks have received all data."""
    waits = {0: ["a gather"], 1: ["torch.distributed.broadcast"], 2: ["a gather"]}
    assert _may_end(waits, {0: 4, 1: 4, 2: 3})
    assert not _may_end(waits, {0: 3, 1: 4, 2: 3})
    assert not _may_end({0: ["a gather"], 1: ["torch.distributed.barrier"]}, {0: 4, 1: 4})
    collects = {0: ["a gather"], 1: ["torch.distributed.gather"], 2: ["a gather"]}
    assert _may_end(collects, {0: 4, 1: 4, 2: 4})
    assert not _may_end(collects, {0: 3, 1: 4, 2: 4})


def test_ranks_in_different_calls_are_told_of_both(cluster):
    first, second = cluster.run(alone_body, 2, 3, "auto", save_a_checkpoint, "call")
    assert "rank 1 has called load_full_state_dict instead: every rank must make the same call" in first
    assert "rank 0 has called save instead: every rank must make the same call" in second


def test_an_evaluation_of_different_lengths_ends_at_once(cluster):
    for message in cluster.run(uneven_body, 2):
        assert SAME_PASSES in message


def uneven_body(world: Any) -> str:
    """Rank 0 has more batches than the others."""
    program = Program(world)
    program.step()
    with looking_often():
        try:
            for _ in range(3 if world.rank() == 0 else 2):
                validate(program)
            program.step()
        except ShardLiteError as error:
            return str(error)
    return ""


def test_steps_on_a_condition_of_shards_are_told_of(cluster):
    for message in cluster.run(condition_body, 2):
        assert "p.grad.isnan().any()" in message


def condition_body(world: Any) -> str:
    """Rank 0 has the element that is not a number. It does not step. At the next step, the ranks differ."""
    program = Program(world)

    def spoil(grad: Tensor) -> Tensor:
        return grad.index_fill(0, torch.tensor([0]), math.nan)

    spoiling = program.model.module[0][0].weight.register_hook(spoil)
    with looking_often(), warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)
        try:
            for _ in range(2):
                program.model(program.x).mean().backward()
                if any(p.grad.isnan().any() for p in program.model.parameters()):
                    program.optimizer.zero_grad()
                else:
                    take_step(program.optimizer)
                spoiling.remove()
        except ShardLiteError as error:
            return str(error)
    return ""


# ---- on rank 0 alone, without other ranks ---------------------------------------------------------------------------


def save_shards(model: ShardLite) -> None:
    torch.save(model.state_dict(), io.BytesIO())


def save_copies_of_shards(model: ShardLite) -> None:
    torch.save({name: value.cpu().clone() for name, value in model.state_dict().items()}, io.BytesIO())


def print_a_weight(model: ShardLite) -> None:
    print(model.module[0][0].weight.tolist())


def save_the_module(model: ShardLite) -> None:
    torch.save(model.module.state_dict(), io.BytesIO())


def save_the_model(model: ShardLite) -> None:
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize(
    ("act", "remedy"),
    [
        (save_shards, r"state = model.full_state_dict\(rank=0\)"),
        (save_copies_of_shards, r"state = model.full_state_dict\(rank=0\)"),
        (print_a_weight, r"use it inside `gathered\(\)`"),
        (save_the_module, "full_state_dict"),
        (save_the_model, "full_state_dict"),
    ],
)
def test_what_would_be_silently_a_part_is_refused(group, act, remedy):
    program = Program(group)
    program.step()
    if group.rank() == 0:
        with pytest.raises(LayoutError, match=remedy):
            act(program.model)
    program.step()


def test_the_shards_of_an_optimizer_are_saved(group):
    """Each rank may load its own ones again."""
    program = Program(group)
    program.step()
    torch.save(program.optimizer.state_dict(), io.BytesIO())


def test_at_stage_2_a_rank_validates_alone_once_it_has_the_weights(group):
    """After a step they are gathered by all ranks, in their first forward."""
    program = Program(group, stage=2)
    program.step()
    program.model(program.x).mean().backward()
    if group.rank() == 0:
        validate(program)
    dist.barrier(program.group)
    take_step(program.optimizer)


# ---- a late rank is waited for ---------------------------------------------------------------------------------------

LONG = 1.5
"""Seconds, in which others look fifteen times."""


def wait_in_a_barrier(program: Program, rank: int) -> None:
    """Rank 0 writes a file meanwhile."""
    if rank == 0:
        time.sleep(LONG)
    dist.barrier(program.group)


def wait_in_a_step(program: Program, rank: int) -> None:
    """Rank 0 writes, and the others train on, as far as they get."""
    if rank == 0:
        time.sleep(LONG)


def wait_in_both(program: Program, rank: int) -> None:
    """Rank 0 is in the model, rank 1 in a barrier, and rank 2 comes to both."""
    if rank == 2:
        time.sleep(LONG)
    if rank > 0:
        dist.barrier(program.few)


def wait_in_a_save(program: Program, rank: int) -> None:
    """All ranks save, one late."""
    if rank == 1:
        time.sleep(LONG)
    program.model.load_state_dict(program.model.state_dict())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transport", ["auto", *map(slow, ["p2p"])])
@pytest.mark.parametrize("late", [wait_in_a_barrier, wait_in_a_step, wait_in_both, wait_in_a_save])
def test_a_late_rank_is_no_fault(group, late, transport):
    program = Program(group, transport=transport)
    program.few = dist.new_group([1, 2])
    program.step()
    with looking_often():
        late(program, group.rank())
        program.step()
