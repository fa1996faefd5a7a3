"""Settings and fixtures for all tests."""

import os

# Before anything reads it: released buffers are filled with NaN, here and in the workers, which inherit it.
os.environ["SHARDLITE_POISON"] = "1"

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.cluster import Cluster, run_local

torch.set_num_threads(1)  # the workers use one thread: a matmul has the same bits here and there


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four gloo processes, started at the first use. See `Cluster.run`."""
    gloo = Cluster()
    yield gloo
    gloo.close()


@pytest.fixture(params=["threads", "gloo"])
def run_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`run_ranks(body, world_size, *args, **kwargs)`: one body that sees only a transport, on threads and on gloo."""
    if request.param == "threads":
        return run_local
    return request.getfixturevalue("cluster").run_transport
