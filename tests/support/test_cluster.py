"""The cluster of the tests: a rank that hangs says where, whether the body was meant to fail or not."""

import subprocess
import sys
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
    gloo = Cluster(fork_server, sizes=[2], timeout=seconds(0.5))
    try:
        with pytest.raises(RemoteError, match=r"(?s)rank 1:\nno answer in time.*line \d+ in waits_for_good"):
            call(gloo, waits_for_good, 2)
        gloo.timeout = seconds(60)
        assert gloo.run(dist.get_rank, 2) == [0, 1], "new processes answer"
    finally:
        gloo.close()


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


def test_the_main_thread_comes_first_and_each_stack_once():
    idle, main = '  File "a.py", line 1 in idle\n  File "b.py", line 2 in run', '  File "c.py", line 3 in waits'
    threads = "\n\n".join(f"Thread 0x{n:016x} (most recent call first):\n{idle}" for n in range(5))
    text = without_repetition(f"said before\n{threads}\n\nCurrent thread 0x00ff (most recent call first):\n{main}\n")
    assert text == f"said before\n1 thread:\n{main}\n5 threads:\n{idle}"
