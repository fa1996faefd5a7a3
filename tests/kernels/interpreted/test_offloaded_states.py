"""Kernels step states in host memory, chunk by chunk, with the bits of states on the device."""

from functools import partial
from unittest import mock

import pytest
import torch
from shardlite_kernels import FORMATS

from shardlite.lab.fake.simulated_cuda import Cuda
from shardlite.optim import offload
from shardlite.params.host_states import HostStates
from shardlite.params.layout import ShardInfo
from tests.support import optim_cases
from tests.support.optim_cases import SCENARIOS, by_reference


@pytest.fixture
def offloaded():
    """Keep the states of all shards in host memory, and step chunks of 3 KiB. Return the copied chunks."""
    states, chunks = HostStates(torch.device("cpu")), []
    marked = partial(ShardInfo, states=states)
    placed = offload._placed

    def counting(part, memory, size):
        chunks.append(part.param.numel())
        return placed(part, memory, size)

    with (
        Cuda().in_place(),
        mock.patch.object(optim_cases, "ShardInfo", marked),
        mock.patch.object(offload, "CHUNK_NBYTES", 3 << 10),
        mock.patch.object(offload, "_placed", counting),
        mock.patch.object(torch.Tensor, "record_stream"),
    ):
        yield chunks


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.sample(2)
def test_steps_are_those_of_the_reference(offloaded, moments, name):
    SCENARIOS[name].run(moments, by_reference)
    assert offloaded
    assert max(offloaded) < 800 or moments == "int8", "a run has several chunks"
