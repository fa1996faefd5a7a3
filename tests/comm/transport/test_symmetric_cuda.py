"""Symmetric memory between ranks on one GPU, which PyTorch allows on request, has the same bits as other transports.

The bodies take a device. `test_symmetric.py` runs them on the CPU, over a symmetric memory that is played.
"""

import os
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import optim

from shardlite import WholeParameters
from shardlite.comm.transport.select import connect
from shardlite.comm.transport.symmetric import SymmetricMemoryTransport, symmetric_memory
from shardlite.config import Route
from tests.support.ranks.cluster import Cluster
from tests.support.ranks.forkserver import ForkServer
from tests.support.transports.calls import all_gather, reduce_scatter
from tests.support.transports.ring_cases import Case, assert_equal_bits, ring_sum, tensor_of
from tests.support.transports.symmetric_bodies import every_dtype, rings, trained

TIMEOUT = timedelta(seconds=30)
SMALL = (8 << 20) + (1 << 18)  # bytes of an area in which long gathers take several rounds

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# Bodies: on any device.


def back_to_back(transport, device, times=50, numel=700):
    """Many gathers without a look at what came, each with a buffer of its own."""
    size, rank = transport.world_size, transport.rank
    fulls = [torch.zeros(size, numel, device=device) for _ in range(times)]
    for i, full in enumerate(fulls):
        full[rank] = 100.0 * i + rank
        all_gather(full.view(-1), transport)
    return [full[:, ::99].tolist() for full in fulls], [
        [[100.0 * i + peer] * len(range(0, numel, 99)) for peer in range(size)] for i in range(times)
    ]


# On a GPU.


class Overlapping:
    """Ranks that may share a GPU, in separate processes for each number of ranks.

    PyTorch counts the rendezvous of symmetric memory per process. Ranks with different counts do not find each other.
    """

    def __init__(self, server):
        self._server, self._clusters = server, {}

    def check(self, body, size, *args, **kwargs):
        if size not in self._clusters:
            self._clusters[size] = Cluster(self._server, sizes=[size])
        self._clusters[size].check(body, size, *args, **kwargs)

    def close(self):
        for cluster in self._clusters.values():
            cluster.close()


@pytest.fixture(scope="module")
def overlapping():
    server = ForkServer(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    ranks = Overlapping(server)
    yield ranks
    ranks.close()
    server.close()


def gpu():
    assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    warnings.filterwarnings("ignore", ".*is experimental")
    return torch.device("cuda", 0)


def run_body(group, body):
    device = gpu()
    transport = connect(group, device, TIMEOUT, route=Route(transport="symmetric_memory"))
    assert isinstance(transport, SymmetricMemoryTransport)
    body(transport, device)
    torch.cuda.synchronize()


def run_small(group):
    """In rounds, and without the host waiting anywhere."""
    device = gpu()
    transport = symmetric_memory(group, device, TIMEOUT, SMALL)
    rings(transport, device)
    torch.cuda.synchronize()
    got, expected = back_to_back(transport, device)
    assert got == expected


def collectives_without_waiting(group):
    device = gpu()
    transport = symmetric_memory(group, device, TIMEOUT)
    numbers = torch.ones(2000, device=device)
    shard = torch.zeros(2000 // transport.world_size, device=device)

    def both():
        all_gather(numbers, transport)
        reduce_scatter(numbers, transport, out=shard)

    both()  # compiles the kernel
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the mode does not detect all that waits
        torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert shard.unique().tolist() == [float(transport.world_size)]


def on_two_streams(group):
    """Two transports at the same time, which take their turns in another order on every other rank."""
    device = gpu()
    transports = [symmetric_memory(group, device, TIMEOUT, SMALL) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in transports]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    cases = [Case(10_007 + i, torch.float32, 1 << 10) for i in range(2)]
    summands = [tensor_of(rank, case.numel, case.dtype).to(device) for case in cases]
    for i in (0, 1):  # loads the kernels: to load one, the host waits until the GPU is idle
        reduce_scatter(summands[i], transports[i])
    torch.cuda.synchronize()
    shards = {}
    for i in (0, 1) if rank % 2 else (1, 0):
        with torch.cuda.stream(streams[i]):
            shards[i] = reduce_scatter(summands[i], transports[i])
    torch.cuda.synchronize()
    for i, case in enumerate(cases):
        start, stop = case.bounds(size)[rank]
        assert_equal_bits(shards[i].cpu(), ring_sum(size, case, 1)[start:stop])


def is_matrix(_, shape):
    return len(shape) == 2


def train_whole_both_ways(group, kind):
    train_both_ways(group, WholeParameters, optimizer_class=getattr(optim, kind), whole=is_matrix)


def train_both_ways(group, *args, **options):
    expected = trained(group, gpu(), "p2p", *args, **options)
    got = trained(group, gpu(), "symmetric_memory", *args, **options)
    for name, weight in expected.items():
        assert_equal_bits(got[name], weight)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("body", [every_dtype, rings])
def test_collectives_have_the_bits_of_the_model(overlapping, size, body):
    overlapping.check(run_body, size, body)


@pytest.mark.parametrize("size", [2, 4])
def test_a_small_area_works_in_rounds(overlapping, size):
    overlapping.check(run_small, size)


def test_the_host_does_not_wait(overlapping):
    overlapping.check(collectives_without_waiting, 2)


@pytest.mark.parametrize("size", [2, 3])
def test_two_transports_do_not_mix(overlapping, size):
    overlapping.check(on_two_streams, size)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_training_gives_the_bits_of_messages(overlapping, size, in_backward):
    overlapping.check(train_both_ways, size, in_backward=in_backward)


@pytest.mark.parametrize("kind", [optim.Muon, optim.Adafactor])
@pytest.mark.parametrize("size", [2, 3])
def test_whole_parameters_have_the_bits_of_messages(overlapping, size, kind):
    overlapping.check(train_whole_both_ways, size, kind.__name__)
