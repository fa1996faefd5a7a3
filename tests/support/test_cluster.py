"""The cluster of the tests: seeds, warnings, and reports of ranks that fail, die or hang."""

import os
import warnings
from contextlib import closing
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.patience import seconds
from tests.support.ranks.cluster import Cluster, RemoteError


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
