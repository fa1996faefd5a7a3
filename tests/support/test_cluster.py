"""The cluster of the tests: a rank that hangs says where, whether the body was meant to fail or not."""

from threading import Event
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.cluster import Cluster, RemoteError
from tests.support.patience import seconds


def waits_for_good(group: Any) -> None:
    if dist.get_rank(group) == 1:
        Event().wait()


@pytest.mark.parametrize("call", [Cluster.run, Cluster.failures])
def test_a_rank_that_hangs_says_where(fork_server, call):
    gloo = Cluster(fork_server, sizes=[2], timeout=0.5)
    try:
        with pytest.raises(RemoteError, match=r"(?s)rank 1:\nno answer in time.*line \d+ in waits_for_good"):
            call(gloo, waits_for_good, 2)
        gloo.timeout = seconds(60)
        assert gloo.run(dist.get_rank, 2) == [0, 1], "new processes answer"
    finally:
        gloo.close()
