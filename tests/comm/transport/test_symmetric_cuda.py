"""Symmetric memory between ranks on one GPU, which PyTorch allows if it is told to: the same bits as anywhere else.

The bodies take a device. `test_symmetric.py` runs them on the CPU, over a symmetric memory that is played.
"""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardlite import AdamW, ShardLite
from shardlite.comm.collectives import Operation, all_gather, reduce_scatter
from shardlite.comm.transport.base import Message
from shardlite.comm.transport.select import connect
from shardlite.comm.transport.symmetric import SymmetricMemoryTransport, symmetric_memory
from shardlite.config import Route
from tests.support.ranks.cluster import Cluster
from tests.support.ranks.forkserver import ForkServer
from tests.support.transports.ring_cases import Case, assert_equal_bits, ring_sum, tensor_of

TIMEOUT = timedelta(seconds=30)
SMALL = 3 * 3 * 1024  # bytes of an area in which most steps take several rounds
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cases_of(size):
    n = 10_007
    return [
        Case(numel, dtype, chunk, cuts)
        for numel, cuts in ((0, None), (5, None), (n, None), (n, [0, *[n // 3] * (size - 1), n]))
        for dtype in (torch.float32, torch.bfloat16)
        for chunk in (1 << 10, 1 << 20)
    ]


# Bodies: on any device.


def every_dtype(transport, device):
    """To the right neighbour, from the left one, in one exchange, sends first and an empty message among them."""
    right, left = (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size
    sent = [torch.zeros(0), *(tensor_of(transport.rank, 1001, dtype) for dtype in DTYPES)]
    received = [torch.zeros_like(each, device=device) for each in sent]
    messages = [Message(each.to(device), right, outgoing=True) for each in sent]
    messages += [Message(each, left, outgoing=False) for each in received]
    transport.exchange(messages, tag=5).wait()
    for got, dtype in zip(received[1:], DTYPES, strict=True):
        assert_equal_bits(got.cpu().view(torch.uint8), tensor_of(left, 1001, dtype).view(torch.uint8))


def rings(transport, device):
    """Gathers and reductions, against the written-out order of the ring."""
    size, rank = transport.world_size, transport.rank
    for i, case in enumerate(cases_of(size)):
        start, stop = case.bounds(size)[rank]
        given = {"cuts": case.cuts, "chunk_bytes": case.chunk}
        full = tensor_of(99, case.numel, case.dtype)
        gathered = torch.zeros_like(full, device=device)
        gathered[start:stop] = full[start:stop].to(device)
        all_gather(gathered, transport, operation=Operation("gather", i), **given)
        assert_equal_bits(gathered.cpu(), full)
        summand = tensor_of(rank, case.numel, case.dtype).to(device)
        shard = reduce_scatter(summand, transport, divisor=size, operation=Operation("reduce", i), **given)
        assert_equal_bits(shard.cpu(), ring_sum(size, case, size)[start:stop])


def back_to_back(transport, device, times=50, numel=700):
    """Many exchanges without a look at what came, each with tensors of its own."""
    peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
    received = [[torch.zeros(numel, device=device) for _ in peers] for _ in range(times)]
    sent = [torch.full((numel,), 100.0 * i + transport.rank, device=device) for i in range(times)]
    for mine, theirs in zip(sent, received, strict=True):
        messages = [Message(mine, peer, outgoing=True) for peer in peers]
        messages += [Message(each, peer, outgoing=False) for each, peer in zip(theirs, peers, strict=True)]
        transport.exchange(messages, tag=0)
    transport.exchange([], tag=0).wait()
    return [[each.unique().tolist() for each in theirs] for theirs in received], [
        [[100.0 * i + peer] for peer in peers] for i in range(times)
    ]


def trained(group, device, transport):
    """Return the weights after three steps at stage 3, on the CPU."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(30, 41), nn.Tanh(), nn.Linear(41, 30)) for _ in range(3)]
    model = ShardLite(nn.Sequential(*blocks).to(device), group=group, transport=transport)
    optimizer = AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + dist.get_rank(group))).to(device)
        model(x).square().mean().backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.cpu() for name, weight in model.full_state_dict().items()}


# On a GPU.


@pytest.fixture(scope="module")
def overlapping():
    """A cluster whose ranks may share a GPU."""
    server = ForkServer(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    gloo = Cluster(server, sizes=[4])
    yield gloo
    gloo.close()
    server.close()


def gpu():
    assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    return torch.device("cuda", 0)


def run_body(group, body, algorithm):
    device = gpu()
    transport = connect(group, device, TIMEOUT, route=Route(transport="symmetric_memory", algorithm=algorithm))
    assert isinstance(transport, SymmetricMemoryTransport)
    assert transport.algorithm == ("direct" if algorithm == "auto" else algorithm)
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


def exchange_without_waiting(group):
    device = gpu()
    transport = symmetric_memory(group, device, TIMEOUT)
    peer = 1 - transport.rank
    mine, theirs = torch.full((1000,), float(transport.rank), device=device), torch.zeros(1000, device=device)
    messages = [Message(mine, peer, outgoing=True), Message(theirs, peer, outgoing=False)]
    transport.exchange(messages, tag=0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        transport.exchange(messages, tag=0).wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert theirs.unique().tolist() == [float(peer)]


def on_two_streams(group):
    """Two transports at the same time, which take their turns in another order on every other rank."""
    device = gpu()
    transports = [symmetric_memory(group, device, TIMEOUT, SMALL) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in transports]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    cases = [Case(10_007 + i, torch.float32, 1 << 10) for i in range(2)]
    summands = [tensor_of(rank, case.numel, case.dtype).to(device) for case in cases]
    torch.cuda.synchronize()
    shards = {}
    for i in (0, 1) if rank % 2 else (1, 0):
        with torch.cuda.stream(streams[i]):
            shards[i] = reduce_scatter(summands[i], transports[i])
    torch.cuda.synchronize()
    for i, case in enumerate(cases):
        start, stop = case.bounds(size)[rank]
        assert_equal_bits(shards[i].cpu(), ring_sum(size, case, 1)[start:stop])


def train_both_ways(group):
    expected = trained(group, gpu(), "p2p")
    got = trained(group, gpu(), "symmetric_memory")
    for name, weight in expected.items():
        assert_equal_bits(got[name], weight)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_dtype_travels(overlapping, size):
    overlapping.check(run_body, size, every_dtype, "auto")


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_rings_have_the_bits_of_the_model(overlapping, size, algorithm):
    overlapping.check(run_body, size, rings, algorithm)


@pytest.mark.parametrize("size", [2, 4])
def test_a_small_area_works_in_rounds(overlapping, size):
    overlapping.check(run_small, size)


def test_the_host_does_not_wait(overlapping):
    overlapping.check(exchange_without_waiting, 2)


@pytest.mark.parametrize("size", [2, 3])
def test_two_transports_do_not_mix(overlapping, size):
    overlapping.check(on_two_streams, size)


@pytest.mark.parametrize("size", [2, 4])
def test_training_gives_the_bits_of_messages(overlapping, size):
    overlapping.check(train_both_ways, size)
