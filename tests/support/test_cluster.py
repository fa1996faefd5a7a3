"""The cluster of the tests: seeds, warnings, and reports of ranks that fail, die or hang."""

import os
import subprocess
import sys
import warnings
from contextlib import closing
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.patience import seconds
from tests.support.ranks import forkserver
from tests.support.ranks.cluster import Cluster, RemoteError, without_repetition


def waits_for_good(group: Any) -> None:
    if dist.get_rank(group) == 1:
        Event().wait()


@pytest.mark.parametrize("call", [Cluster.run, Cluster.failures])
def test_a_rank_that_hangs_says_where(fork_server, call):
    with closing(Cluster(fork_server, sizes=[2], timeout=seconds(0.5))) as gloo:
        with pytest.raises(RemoteError, match=r"(?s)rank 1:\nno answer in time.*line \d+ in waits_for_good"):
            call(gloo, waits_for_good, 2)
        gloo.timeout = seconds(60)
        assert gloo.run(dist.get_rank, 2) == [0, 1], "new processes answer"


def test_a_fork_server_that_hangs_is_an_error(monkeypatch):
    sleeping = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    server = subprocess.Popen(sleeping, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    monkeypatch.setattr(forkserver, "_start", lambda environment: server)
    monkeypatch.setattr(forkserver, "_ANSWER", 0.1)
    asked = forkserver.ForkServer()
    with pytest.raises(AssertionError, match="the fork server does not answer to 'statuses'"):
        asked.kill([1])
    assert server.returncode is not None
    asked.close()


def timeouts(group: Any) -> list[float]:
    made = dist.new_group(list(range(group.size())))
    mesh = init_device_mesh("cpu", (1, group.size()))
    every = [group, made, mesh.get_group(0), mesh.get_group(1)]
    return [each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in every]


def test_no_group_waits_longer_than_the_cluster_does(cluster):
    for each in cluster.run(timeouts, 2):
        assert max(each) < cluster.timeout


def sum_over_new_groups(group: Any, pairs: list[list[int]]) -> float:
    made = [dist.new_group(ranks) for ranks in pairs]
    own = next(each for each, ranks in zip(made, pairs, strict=True) if dist.get_rank() in ranks)
    total = torch.ones(())
    dist.all_reduce(total, group=own)
    return total.item()


def test_groups_of_some_ranks_leave_later_groups_alone(cluster):
    for _ in range(2):
        assert cluster.run(sum_over_new_groups, 3, [[0, 1, 2]]) == [3.0] * 3  # rank 3 does not hear of this group
        assert cluster.run(sum_over_new_groups, 4, [[0, 1], [2, 3]]) == [2.0] * 4


def test_the_main_thread_comes_first_and_each_stack_once():
    idle, main = '  File "a.py", line 1 in idle\n  File "b.py", line 2 in run', '  File "c.py", line 3 in waits'
    threads = "\n\n".join(f"Thread 0x{n:016x} (most recent call first):\n{idle}" for n in range(5))
    text = without_repetition(f"said before\n{threads}\n\nCurrent thread 0x00ff (most recent call first):\n{main}\n")
    assert text == f"said before\n1 thread:\n{main}\n5 threads:\n{idle}"


def describe(group, *, factor):
    return os.environ["SHARDLITE_POISON"], torch.get_num_threads(), dist.get_rank(group) * factor, torch.rand(1)


def fail_on_rank_one(group):
    if dist.get_rank(group) == 1:
        raise ZeroDivisionError("on purpose")


def warn(group):
    warnings.warn("on purpose", stacklevel=1)


class WarnsAtItsEnd:
    def __del__(self):
        warn(None)


def warn_at_an_end(group):
    WarnsAtItsEnd()


def die(group):
    if dist.get_rank(group) == 1:
        os._exit(3)


def test_bodies_run_by_rank_with_the_same_seed(cluster):
    results = cluster.run(describe, 3, factor=10)
    assert [r[:3] for r in results] == [("1", 1, 0), ("1", 1, 10), ("1", 1, 20)]
    assert len({r[3].item() for r in results}) == 1


def test_warnings_are_errors_on_every_rank(cluster):
    assert cluster.failures(warn, 4) == [("UserWarning", "on purpose")] * 4
    for kind, message in cluster.failures(warn_at_an_end, 2):  # Python only prints those
        assert kind == "AssertionError"
        assert "UserWarning: on purpose" in message


def test_a_failing_or_dying_rank_is_named_and_the_cluster_recovers(fork_server):
    with closing(Cluster(fork_server, sizes=[2])) as gloo:
        with pytest.raises(RemoteError, match=r"(?s)rank 1:\nTraceback.*ZeroDivisionError: on purpose"):
            gloo.run(fail_on_rank_one, 2)
        assert gloo.failures(die, 2) == [None, ("WorkerDied", "the worker died with exit code 3")]
        assert len(gloo.run(describe, 2, factor=1)) == 2
