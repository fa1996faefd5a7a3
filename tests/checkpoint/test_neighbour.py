"""Snapshots in memory: a run that loses ranks or a host continues with the same bits."""

import logging
import os
import random
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardlite import CheckpointError, CommError, load, save_in_memory
from shardlite.checkpoint import latest
from shardlite.checkpoint.in_memory import copies, snapshot
from shardlite.checkpoint.in_memory.copies import Hosts, held_by, key_of, newest
from shardlite.checkpoint.in_memory.holder import Agent, Holder, parent_and_start
from shardlite.checkpoint.in_memory.snapshot import Snapshot, SnapshotMemory
from tests.support.checkpoints import OPTIMIZERS, Run
from tests.support.logs import logged
from tests.support.patience import seconds, until
from tests.support.ranks.restarts import assert_same_weights, ranks_of, started, train_straight

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory is held by processes that are found in /proc"
)

SOURCE = "copies in memory"


# ---- ranks of the warm cluster --------------------------------------------------------------------------------------


@contextmanager
def started_by(group: Any, *agents: Agent) -> Iterator[None]:
    """Let `Agent` find the parent of this rank, or its entry of `agents`; end their snapshot holders afterwards."""
    rank = dist.get_rank()
    parent = os.getppid()
    found = agents[rank] if agents else Agent(parent, parent_and_start(parent)[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "of_this_process", lambda: found)
        try:
            yield
            dist.barrier(group)
        finally:
            if rank == 0:
                for agent in set(agents or [found]):
                    end_holders(agent)


def end_holders(agent: Agent) -> None:
    """Kill the processes that hold memory for an agent, and wait until they are gone."""
    for holder in agent.holders("").values():
        holder.end()


def ancestors() -> list[Agent]:
    """The parent and grandparent of this rank: two agents, of which each has started it."""
    parent, _ = parent_and_start(os.getpid())
    grandparent, _ = parent_and_start(parent)
    return [Agent(pid, parent_and_start(pid)[1]) for pid in (parent, grandparent)]


def copied(run: Run, path: Any, step: int) -> bool:
    return save_in_memory(path, run.model, run.optimizer, run.extra(), step=step)


def loaded(run: Run, path: Any) -> Any:
    return load(path, run.model, run.optimizer, run.extra(), missing_ok=True)


@pytest.mark.parametrize(
    ("state", "optimizer", "options"),
    [
        ("fp32", "ours", {}),
        ("int8", "ours", {"stage": 2}),
        ("fp32", "in_backward", {}),
        ("fp32", "momentum", {"stage": 1}),
        ("fp32", "fused", {"stage": 0}),
    ],
)
@pytest.mark.sample(2)
def test_a_run_that_is_taken_up_goes_on_with_the_same_bits(group, path, state, optimizer, options):
    with started_by(group), logged(logging.INFO) as lines:
        straight = Run(group, state, OPTIMIZERS[optimizer], **options)
        for step in range(6):
            straight.train(range(step, step + 1))
            assert copied(straight, path, step + 1)
        straight.train(range(6, 10))
        resumed = Run(group, state, OPTIMIZERS[optimizer], seed=1, **options)
        found = resumed.load(path)
        assert (found.step, found.source) == (6, SOURCE)
        assert found["rank"] == resumed.rank
        assert found["nested"]["t"].tolist() == [1, 1]
        resumed.train(range(6, 8))
        assert copied(resumed, path, 8)  # in the memory that it has taken up
        resumed.train(range(8, 10)).assert_like(straight)
        again = Run(group, state, OPTIMIZERS[optimizer], seed=2, **options)
        assert again.load(path).step == 8
        again.train(range(8, 10)).assert_like(straight)
        expected = [f"load: step {step}, from {SOURCE}" for step in (6, 8)] if dist.get_rank() == 0 else []
        assert [line for line in lines if line.startswith("load: ")] == expected


def killed_body(group: Any, path: str, where: str) -> None:
    """Rank 1 dies after step 4 was copied by all, or in the middle of copying it."""
    os.environ["TORCHELASTIC_RUN_ID"] = "a run"  # what has forked this rank has none
    run, victim = Run(group), dist.get_rank() == 1

    def fatal(self: Any, content: Any) -> None:
        next(snapshot._views(content, self.records)).copy_(self.tensors[0])
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(4):
        run.train(range(step, step + 1))
        if step == 3 and where == "copy" and victim:
            Snapshot.copy_into = fatal  # type: ignore[method-assign]
        assert copied(run, path, step + 1)
    dist.barrier(group)
    if victim:
        os.kill(os.getpid(), signal.SIGKILL)
    run.train(range(4, 5))


def taken_up_body(group: Any, path: str) -> int:
    os.environ["TORCHELASTIC_RUN_ID"] = "a run"
    try:
        run = Run(group, seed=1)
        found = run.load(path)
        assert found.source == SOURCE
        assert found.step is not None
        run.train(range(found.step, 6)).assert_like(Run(group).train(range(6)))
        return found.step
    finally:
        dist.barrier(group)
        if dist.get_rank() == 0:
            end_holders(Agent.of_this_process())


@pytest.mark.parametrize(("where", "step"), [("step", 4), ("copy", 3)])
def test_a_killed_rank_is_taken_up_at_the_last_step_that_all_have_copied(doomed, tmp_path, where, step):
    """By other processes. A copy that was not finished leaves the one before."""
    path = str(tmp_path / "run")
    for attempt in ("0", "1"):
        (tmp_path / attempt).mkdir()
    ended = doomed.run(killed_body, 3, path, where, directory=tmp_path / "0")
    assert ended.pop(1).status == -signal.SIGKILL
    assert all(each.kind for each in ended), ended
    again = doomed.run(taken_up_body, 3, path, directory=tmp_path / "1")
    assert [(each.result, each.text) for each in again] == [(step, "")] * 3, again


def test_load_takes_the_newest_of_memory_and_disk(group: Any, path: Path) -> None:
    """`load` takes what is newer, and memory if both are."""
    with started_by(group), logged(logging.INFO) as lines:
        run = Run(group).train(range(2))
        nothing = loaded(run, path)
        assert (nothing, nothing.step, nothing.source) == ({}, 0, "")
        assert copied(run, path, 2)
        place = run.save(path, step=2)
        assert run.load(path).source == SOURCE
        run.save(path, step=3)
        found = run.load(path)
        assert (found.step, found.source) == (3, str(path / "step-00000003"))
        assert run.load(place).source == str(place)
        assert copied(run, path, 1)  # a new beginning: what was copied before is gone
        held = held_by(Agent.of_this_process(), key_of(path))[str(dist.get_rank())]
        assert [each[:2] for each in held] == [(1, 2)]
        with pytest.raises(ValueError, match="step must be higher than that of the previous copy, 1, got 1"):
            copied(run, path, 1)
        assert run.load(path).step == 3
        assert run.load(str(path) + "/.").step == 3
        with pytest.raises(CheckpointError, match=r"'ranks\.0\.extra' holds something"):
            save_in_memory(path / "other", run.model, extra={"bad": object()} if dist.get_rank() == 0 else {}, step=1)
        assert not [line for line in lines if "not used" in line]


def test_copies_that_do_not_fit_are_left_with_a_reason(group: Any, path: Path) -> None:
    """Snapshots that are incomplete, or of another model, are skipped with a log line that gives the reason."""
    with started_by(group), logged(logging.INFO) as lines:
        run = Run(group).train(range(2))
        place = str(run.save(path, step=2))
        run.train(range(2, 3))
        assert copied(run, path, 3)
        assert Run(group, stage=0, seed=1).load(path).source == place
        assert Run(group, seed=1).load(path).source == SOURCE
        dist.barrier(group)
        if dist.get_rank() == 0:
            lost = f"{key_of(path)}/1"
            Agent.of_this_process().holders(lost)[lost].end()
        dist.barrier(group)
        assert Run(group).load(path).source == place
        if dist.get_rank() == 0:
            (path / "step-00000002").rename(path / "elsewhere")
        dist.barrier(group)
        with pytest.raises(CheckpointError, match=f"there is no checkpoint in {path}"):
            Run(group).load(path)
        told = [line.partition("not used: ")[2] for line in lines if "not used" in line]
        if dist.get_rank() == 0:
            assert "they are of a different model, stage, or format: " in told.pop(0)
            assert told == ["there is no copy of rank 1"] * 2


def test_a_run_goes_on_without_copies(group: Any, path: Path) -> None:
    """A missing agent, memory or holder is logged once. The training continues."""
    run = Run(group).train(range(1))
    with logged(logging.INFO) as lines:
        for step in (1, 2):
            assert not copied(run, path, step)
        if dist.get_rank() == 0:
            assert lines == [
                "there are no copies in memory: torchrun did not start this process, so nothing would restart it"
            ]
    with started_by(group), logged(logging.INFO) as lines:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(snapshot, "_available", lambda: 1000)
            assert not copied(run, path / "full", 1)
        if dist.get_rank() == 0:
            assert "rank 1: a copy of " in lines[0]
            assert "but this host has only 1000 left" in lines[0]
        dist.barrier(group)
        assert not held_by(Agent.of_this_process(), key_of(path / "full"))
        assert copied(run, path / "held", 1)
        dist.barrier(group)
        if dist.get_rank() == 0:
            end_holders(Agent.of_this_process())
        dist.barrier(group)
        for step in (2, 3):
            assert not copied(run, path / "held", step)
        gone = [f"rank {dist.get_rank()}: the process that holds copies in memory has ended"]
        assert [line for line in lines if "has ended" in line] == gone
        run.train(range(1, 2))


def test_copies_take_no_memory_in_the_steady_state(group: Any, path: Path) -> None:
    """From the second copy on, no memory is taken."""
    with started_by(group):
        run = Run(group)
        taken = []
        for step in range(6):
            run.train(range(step, step + 1))
            assert copied(run, path, step)
            own = copies._copies[run.model][1]
            assert own is not None
            taken.append(os.fstat(own.own.descriptor).st_blocks)
        assert taken[2:] == taken[1:2] * 4, taken


@pytest.mark.ranks(3)
def test_a_host_that_is_lost_gets_its_copies_from_the_next_one(group: Any, path: Path) -> None:
    """Ranks 0 and 1 are on one host, rank 2 on another: each of them is lost, with what it holds."""
    one, other = ancestors()
    with started_by(group, one, one, other):
        run = straight = Run(group)
        run.train(range(2))
        assert copied(run, path, 2)
        for lost, step in ((other, 4), (one, 6)):
            run.train(range(step - 2, step))
            assert copied(run, path, step)
            run.train(range(step, 7))
            dist.barrier(group)
            if dist.get_rank() == 0:
                end_holders(lost)
            dist.barrier(group)
            run = Run(group, seed=step)
            found = run.load(path)
            assert (found.step, found.source) == (step, SOURCE)
        run.train(range(6, 7)).assert_like(straight)
        with suppress(CommError):  # a rank that only sends may have sent already
            copied(straight, path, 10 + dist.get_rank())
            assert dist.get_rank() == 1, "another rank has received a version of another step"
        held = held_by(Agent.of_this_process(), key_of(path))
        assert sorted(held) == ["0", "1", "2"]
        dist.barrier(group)
        if dist.get_rank() == 0:
            end_holders(one)
            end_holders(other)
        dist.barrier(group)
        assert not loaded(Run(group), path).source


# ---- without ranks --------------------------------------------------------------------------------------------------


def test_the_newest_step_is_one_that_is_there_of_every_rank():
    assert newest([{}, {}]) == (-1, "")
    own = [{"0": [(3, 2, 3), (4, 2, 4)]}, {"1": [(4, 2, 4), (5, 2, 5)]}]
    assert newest(own) == (4, "")
    assert newest([{}, {**own[0], **own[1]}]) == (4, "")  # all of it on one host
    assert newest([own[0], {}]) == (-1, "there is no copy of rank 1")
    assert newest([own[0], {"1": [(5, 2, 5)]}]) == (
        -1,
        "no step is complete on all ranks: "
        "rank 0 has 3 (after 3 steps), 4 (after 4 steps); rank 1 has 5 (after 5 steps)",
    )
    assert newest([*own, {}]) == (-1, "they are of 2 ranks, but now there are 3")


def test_each_rank_is_guarded_on_the_next_node():
    alone = Hosts(["a", "a"])
    assert [alone.replica_of(rank) for rank in range(2)] == [0, 1]
    assert not any(alone.replicas_on(rank) for rank in range(2))
    even = Hosts(["a", "a", "b", "b"])
    assert [even.replica_of(rank) for rank in range(4)] == [2, 3, 0, 1]
    uneven = Hosts(["a", "b", "a", "a", "c"])
    assert [uneven.replica_of(rank) for rank in range(5)] == [1, 4, 1, 1, 0]
    assert [uneven.replicas_on(rank) for rank in range(5)] == [[4], [0, 2, 3], [], [], [1]]


# ---- under torchrun -------------------------------------------------------------------------------------------------

REDUNDANT = ("--redundancy", "neighbour", "--save-every", "1000")  # and the last step


def holders_of(agent: int) -> list[Holder]:
    """Return the processes that hold memory for an agent."""
    try:
        return list(Agent(agent, parent_and_start(agent)[1]).holders("").values())
    except OSError:
        return []


def newest_of_all(agent: int, ranks: int) -> int:
    """Return the newest step that an agent's host has of every rank."""
    steps = []
    for holder in holders_of(agent):
        with suppress(OSError):
            steps.append(set(SnapshotMemory(holder.open()).complete()))
    return max(set.intersection(*steps), default=0) if len(steps) == ranks else 0


@pytest.mark.slow
def test_a_run_of_torchrun_whose_ranks_are_killed_loses_no_step(cluster, tmp_path):
    """No checkpoint is on the disk before the end."""
    dice, resumed = random.Random(3), []
    train_straight(cluster, tmp_path / "straight", 3)
    with started(tmp_path / "killed", *REDUNDANT, restarts=3) as agent:
        for _ in range(3):
            goal = newest_of_all(agent.pid, 3) + dice.randint(1, 6)
            until(lambda goal=goal: newest_of_all(agent.pid, 3) >= goal or agent.poll() is not None)
            resumed.append(newest_of_all(agent.pid, 3))
            assert latest(tmp_path / "killed" / "run") is None
            os.kill(dice.choice(ranks_of(agent.pid)), signal.SIGKILL)
        assert agent.wait(seconds(240)) == 0, (tmp_path / "killed" / "log").read_text()[-4000:]
    log = (tmp_path / "killed" / "log").read_text()
    found = [int(step) for step in re.findall(r"resumes after step (\d+) of 40, from copies in memory", log)]
    assert len(found) == 3
    assert all(step >= least for step, least in zip(found, resumed, strict=True)), (found, resumed)
    assert_same_weights(tmp_path / "killed" / "run", tmp_path / "straight" / "run")


@pytest.mark.slow
def test_a_run_goes_on_when_one_of_two_agents_is_lost_with_all_that_it_has_started(cluster, tmp_path):
    """Two agents are two hosts."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "run"]
    options += ["--rdzv-endpoint", endpoint, "--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3,is_host="]
    first, second = ([*options[:-1], options[-1] + each] for each in ("true", "false"))  # the first keeps the store
    train_straight(cluster, tmp_path / "straight", 4)
    folder = tmp_path / "lost"
    with started(folder, *REDUNDANT, restarts=3, nodes=first) as one:
        with started(folder, *REDUNDANT, restarts=3, nodes=second) as other:
            until(lambda: newest_of_all(other.pid, 4) >= 5 or other.poll() is not None)
            holders, ranks = holders_of(other.pid), ranks_of(other.pid)
            assert len(holders) == 4
            for each in (other.pid, *ranks, *(holder.pid for holder in holders)):
                os.kill(each, signal.SIGKILL)
        with started(folder, *REDUNDANT, restarts=3, nodes=second) as again:
            statuses = [each.wait(seconds(240)) for each in (one, again)]
    log = (folder / "log").read_text()
    assert statuses == [0, 0], log[-4000:]
    (resumed,) = re.findall(r"resumes after step (\d+) of 40, from copies in memory", log)
    assert int(resumed) >= 4  # one rank of a host may have copied step 5 alone
    assert_same_weights(folder / "run", tmp_path / "straight" / "run")
