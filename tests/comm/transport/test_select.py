"""Which transport serves which tensors and process groups."""

from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardlite.comm.transport import select
from shardlite.comm.transport.group_collectives import NcclCollectives
from shardlite.comm.transport.nccl import NcclTransport
from shardlite.comm.transport.select import connect
from shardlite.config import Route
from shardlite.errors import LayoutError
from tests.support.patience import seconds

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
AMPLE = timedelta(seconds=seconds(30))  # for what ends at once


def describe_connections(group, backends, device):
    """The transport over `group`, if its backends had these names; `None` leaves its own."""
    names = dist.get_backend_config(group) if backends is None else backends
    with patch("torch.distributed.get_backend_config", lambda _: names):
        transport = connect(group, device, AMPLE)
    return type(transport).__name__, transport.rank, transport.world_size, transport.batched, transport.blocking


@pytest.mark.parametrize(
    ("backends", "device", "expected"),
    [
        (None, CPU, ("SharedMemoryTransport", False, True)),
        (None, CUDA, ("StagedTransport", False, True)),
        ("cpu:gloo,cuda:nccl", CPU, ("SharedMemoryTransport", False, True)),
        ("cpu:gloo,cuda:nccl", torch.device("cuda:1"), ("NcclCollectives", True, False)),
        ("cuda:nccl", CUDA, ("NcclCollectives", True, False)),
        ("cpu:gloo,cuda:gloo", CUDA, ("StagedTransport", False, True)),
    ],
)
def test_the_backend_for_the_device_decides(cluster, backends, device, expected):
    name, batched, blocking = expected
    for rank, found in enumerate(cluster.run(describe_connections, 2, backends, device)):
        assert found == (name, rank, 2, batched, blocking)


@pytest.mark.parametrize(
    ("backends", "device"), [("cuda:nccl", CPU), ("cpu:gloo", CUDA), ("cuda:ucc", CUDA), (None, torch.device("meta"))]
)
def test_tensors_that_no_backend_carries_are_refused(group, backends, device):
    with pytest.raises(LayoutError, match=r"init_process_group\('cpu:gloo,cuda:nccl'\)") as refused:
        describe_connections(group, backends, device)
    said = f"no transport for tensors on {device} over a process group with the backends {{"
    assert said in str(refused.value)


def test_a_group_of_others_is_refused(group):
    with pytest.raises(LayoutError, match=r"^this process is not a member of the process group that it was given$"):
        connect(dist.GroupMember.NON_GROUP_MEMBER, CPU, AMPLE)


def test_only_over_nccl_do_gathers_and_reductions_need_connections_of_their_own(group):
    made = []

    def communicator(group, device, timeout, route):
        assert (device, timeout, route) == (CUDA, AMPLE, Route())
        made.append(dist.get_process_group_ranks(group))
        return group

    with (
        patch("torch.distributed.get_backend_config", lambda _: "cpu:gloo,cuda:nccl"),
        patch.object(select, "communicator", communicator),
    ):
        for device in (CPU, CUDA):
            for apart in (False, True):
                connect(group, device, AMPLE, apart=apart)
    assert made == [[0, 1]]


def test_an_algorithm_is_walked_in_batches_over_nccl(group):
    routes = Route(algorithm="ring"), Route(transport="p2p"), Route(transport="collectives")
    with patch("torch.distributed.get_backend_config", lambda _: "cpu:gloo,cuda:nccl"):
        kinds = [type(connect(group, CUDA, AMPLE, route=route)) for route in routes]
    assert kinds == [NcclTransport, NcclTransport, NcclCollectives]
