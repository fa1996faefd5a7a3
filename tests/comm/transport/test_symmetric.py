"""Messages through symmetric memory, which is played here: slots and signals, rounds, slow readers, and who gets it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from random import Random
from unittest.mock import patch

import pytest
import torch

from shardlite.comm.transport import symmetric
from shardlite.comm.transport.base import Message
from shardlite.comm.transport.group_collectives import NcclCollectives
from shardlite.comm.transport.process_group import StagedTransport
from shardlite.comm.transport.select import connect
from shardlite.comm.transport.symmetric import Piece, SymmetricMemoryTransport, parcels, why_not
from shardlite.config import Route
from shardlite.errors import CommError, LayoutError
from tests.comm.test_lanes import Simulated
from tests.comm.transport import test_symmetric_cuda as on_cuda
from tests.support.patience import seconds
from tests.support.transports.played_symmetric import CPU, PATIENCE, Drained, run_memories, run_played
from tests.support.transports.ring_cases import (
    Case,
    assert_gathered_and_summed,
    cases_for,
    gather_everything,
    reduce_everything,
)

CUDA = torch.device("cuda", 0)
SOON = timedelta(milliseconds=200)
AMPLE = timedelta(seconds=seconds(30))  # for what ends at once


# How messages are packed.


def test_parcels_are_cut_where_a_slot_ends():
    assert parcels([100, 0, 300, 1], 256) == [
        [Piece(0, 0, 100, 0), Piece(2, 0, 128, 128)],
        [Piece(2, 128, 300, 0)],
        [Piece(3, 0, 1, 0)],
    ]
    assert parcels([], 128) == parcels([0, 0], 128) == []


@pytest.mark.parametrize("seed", range(30))
def test_every_byte_is_in_one_parcel(seed):
    random = Random(seed)
    slot = 128 * random.randint(1, 9)
    sizes = [random.choice([0, 1, 127, 128, 129, 500, 5000]) for _ in range(random.randint(0, 12))]
    packed = parcels(sizes, slot)
    pieces = [piece for parcel in packed for piece in parcel]
    assert [(each.message, each.start, each.stop) for each in pieces] == sorted(each[:3] for each in pieces)
    for message, size in enumerate(sizes):
        assert [i for each in pieces if each.message == message for i in range(each.start, each.stop)] == [*range(size)]
    for parcel in packed:
        ends = [0, *(each.offset + each.stop - each.start for each in parcel)]
        assert all(each.offset % 128 == 0 and each.offset >= end for each, end in zip(parcel, ends, strict=False))
        assert ends[-1] <= slot
    assert len(packed) == -(-sum(-(-size // 128) * 128 for size in sizes) // slot)


# The bodies that GPUs run, here.


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("body", [on_cuda.every_dtype, on_cuda.rings])
def test_bodies_for_gpus_pass_on_the_cpu(body, size):
    assert run_played(body, size, CPU, nbytes=1 << 16) == [None] * size


def train_twice(group):
    for name, weight in on_cuda.trained(group, CPU, "p2p").items():
        on_cuda.assert_equal_bits(weight, on_cuda.trained(group, CPU, "shared_memory")[name])


def test_the_training_for_gpus_passes_on_the_cpu(cluster):
    cluster.check(train_twice, 2)


# Late ranks, small areas.


@pytest.mark.parametrize("algorithm", ["ring", "direct", "bidirectional"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rings_with_late_streams_in_slots_of_one_line(algorithm, size):
    """The smallest area there can be: 128 bytes at a time."""
    cases = [*cases_for(size, [torch.float32])[::5], Case(777, torch.float32, 1 << 20)]

    def body(transport):
        transport.algorithm = algorithm
        return gather_everything(transport, cases), reduce_everything(transport, cases, size)

    nbytes = 3 * max(1, size - 1) * 128
    results = run_played(body, size, nbytes=nbytes, longest=0.0005)
    if algorithm != "bidirectional" or size < 4:  # which adds in another order from four ranks on
        assert_gathered_and_summed(results, cases)


@pytest.mark.parametrize("slow", [(0.01, 0.0, 0.0), (0.0, 0.0, 0.01), (0.002, 0.01, 0.0)])
def test_a_slow_reader_is_never_overtaken(slow):
    """The host puts all exchanges at once."""
    results = run_memories(all_at_once, 3, nbytes=6 * 1024, slow=slow)
    for got, expected in results:
        assert got == expected


def all_at_once(memory):
    return on_cuda.back_to_back(Drained(SymmetricMemoryTransport(memory, PATIENCE), memory.stream), CPU, 10)


def one_way(memory, timeout, times=20):
    """Rank 0 sends, and nothing comes back that could hold it up."""
    transport = SymmetricMemoryTransport(memory, timeout)
    tensors = [torch.full((64,), float(i) if memory.rank == 0 else -1.0) for i in range(times)]
    for tensor in tensors:
        (transport.irecv if memory.rank else transport.isend)(tensor, 1 - memory.rank, 0)
    memory.stream.drain()
    return [tensor.unique().tolist() for tensor in tensors]


def test_a_sender_whom_nobody_answers_does_not_overtake():
    results = run_memories(one_way, 2, PATIENCE, slow=(0.0, 0.005))
    assert results == [[[float(i)] for i in range(20)]] * 2


def test_two_slots_would_not_be_enough(monkeypatch):
    monkeypatch.setattr(symmetric, "SLOTS", 2)
    sent = threading.Event()

    def body(memory):
        if memory.rank == 1:
            memory.between_halves = partial(sent.wait, seconds(20))
        try:
            return one_way(memory, PATIENCE, times=3 if memory.rank == 0 else 1)
        finally:
            if memory.rank == 0:
                sent.set()

    # The stream fails while the host still sends, or after that.
    with pytest.raises((CommError, AssertionError), match="rank 0 overwrites what no rank has read"):
        run_memories(body, 2)


def test_the_host_runs_ahead():
    gate = threading.Event()

    def body(memory):
        memory.stream.put(lambda: gate.wait(seconds(20)))
        transport, peer = SymmetricMemoryTransport(memory, PATIENCE), 1 - memory.rank
        mine, theirs = torch.full((100,), memory.rank + 1.0), torch.zeros(100)
        for _ in range(10):
            messages = [Message(mine, peer, outgoing=True), Message(theirs, peer, outgoing=False)]
            transport.exchange(messages, tag=0).wait()
        before = theirs.tolist()
        if memory.rank == 0:
            gate.set()
        memory.stream.drain()
        return transport.batched, transport.blocking, before == [0.0] * 100, theirs.unique().tolist()

    # Rank 1 may look after the gate was opened, so rank 0 alone says that nothing had come.
    first, second = run_memories(body, 2)
    assert first == (True, False, True, [2.0])
    assert second[3] == [1.0]


@pytest.mark.parametrize("seed", range(3))
def test_two_transports_at_the_same_time_do_not_mix(seed):
    """Gathers over one, reductions over the other, each with a stream of its own, as a training step has them."""
    cases = [Case(3001 + i, torch.float32, 1 << 12) for i in range(3)]

    def body(*memories):
        gathers, sums = (Drained(SymmetricMemoryTransport(each, PATIENCE), each.stream) for each in memories)
        with ThreadPoolExecutor(2) as pool:
            gathered = pool.submit(gather_everything, gathers, cases)
            summed = pool.submit(reduce_everything, sums, cases, 3)
            return gathered.result(), summed.result()

    assert_gathered_and_summed(run_memories(body, 3, memories=2, longest=0.001, seed=10 * seed), cases)


def test_a_silent_peer_ends_in_an_error():
    """As after a trap on a GPU: calls fail from then on."""

    def body(memory):
        if memory.rank == 1:
            return
        transport = SymmetricMemoryTransport(memory, SOON)
        transport.irecv(torch.zeros(4), 1, 8)
        with pytest.raises(RuntimeError, match="trap"):
            memory.stream.drain()
        with pytest.raises(
            CommError, match=r"rank 0 sending to rank 1 failed: 16 bytes, tag 9, timeout 0\.2 s\. .*trap"
        ):
            transport.isend(torch.zeros(4), 1, 9)

    with pytest.raises(RuntimeError, match=r"trap: the signal \(owner, channel, source\) \(0, 0, 1\) is not 1"):
        run_memories(body, 2)


def test_an_area_that_is_too_small_is_refused():
    with pytest.raises(LayoutError, match="1151 bytes per rank is too small for 4 ranks: at least 1152 bytes"):
        run_memories(lambda memory: SymmetricMemoryTransport(memory, PATIENCE), 4, nbytes=3 * 3 * 128 - 1)


# Streams of a GPU, as far as they can be simulated.


def test_an_exchange_is_behind_the_last_one_on_whatever_stream(monkeypatch):
    cuda = Simulated()
    monkeypatch.setattr(torch.cuda, "current_stream", cuda.stream_of_thread)
    monkeypatch.setattr(torch.cuda, "Stream", cuda.new_stream)

    def body(memory):
        memory.device = CUDA
        side = torch.cuda.Stream(CUDA, priority=-1)
        transport, tensor = SymmetricMemoryTransport(memory, PATIENCE), torch.zeros(4)
        transport.isend(tensor, 1, 0)
        with cuda.on(side):
            transport.isend(tensor, 1, 0)
            transport.isend(tensor, 1, 0)
        transport.isend(tensor, 1, 0)

    def both(memory):
        if memory.rank == 0:
            body(memory)
        else:
            transport = SymmetricMemoryTransport(memory, PATIENCE)
            for _ in range(4):
                transport.irecv(torch.ones(4), 0, 0)

    run_memories(both, 2)
    assert cuda.log == [
        ("compute", "record 1"),
        ("side 1", "wait 1"),
        ("side 1", "record 2"),
        ("side 1", "record 3"),
        ("compute", "wait 3"),
        ("compute", "record 4"),
    ]


# Who gets it.


def machine(*, gpus=4, backend="CUDA", peers=True, hosts=1, overlap=False):
    """Patches that make this process see such a machine. `gpus=0` leaves it as it is."""
    stack = ExitStack()
    stack.enter_context(patch.dict("os.environ", {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": str(int(overlap))}))
    if gpus:
        stack.enter_context(patch("torch.cuda.is_available", lambda: True))
        stack.enter_context(patch("torch.cuda.can_device_access_peer", lambda own, other: peers))
        memory = patch.object(symmetric, "_SymmetricMemory")
        stack.enter_context(memory).get_backend = lambda device: backend
        if hosts > 1:
            stack.enter_context(patch.object(symmetric, "nodes_of", lambda group, _: group.size() // hosts))
    return stack


def ask(group, device, given):
    own = torch.device("cuda", group.rank()) if device == "own" else torch.device(device)
    with machine(**given):
        return why_not(group, own)


@pytest.mark.parametrize(
    ("device", "given", "reason"),
    [
        ("own", {}, ""),
        ("cuda:0", {"overlap": True}, ""),
        ("own", {"gpus": 0}, "rank 0: it takes a CUDA device, and there is none"),
        ("cpu", {}, "rank 0: it takes a CUDA device, and there is none"),
        (
            "own",
            {"backend": "NVSHMEM"},
            "rank 0: it takes PyTorch's backend 'CUDA' for symmetric memory, got 'NVSHMEM'",
        ),
        ("own", {"hosts": 2}, "the ranks are on several hosts"),
        ("own", {"peers": False}, "cuda:0 cannot access the memory of cuda:1"),
        ("cuda:0", {}, "ranks [0, 1] all use cuda:0. "),
    ],
)
def test_why_not(cluster, device, given, reason):
    for said in cluster.run(ask, 2, device, given):
        assert said.startswith(reason)
        assert bool(said) == bool(reason)
        assert reason != "ranks [0, 1] all use cuda:0. " or "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1" in said


def ask_for_it(group, device, transport="symmetric_memory"):
    connect(group, torch.device(device), AMPLE, route=Route(transport=transport))


def test_where_it_cannot_be_had_the_error_says_why(cluster):
    for kind, message in cluster.failures(ask_for_it, 2, "cuda:0"):
        assert kind == "LayoutError"
        assert message == (
            "transport='symmetric_memory' cannot be had: rank 0: it takes a CUDA device, and there is none. "
            "Use 'p2p', or 'auto'"
        )
    for kind, message in cluster.failures(ask_for_it, 2, "cpu"):
        assert kind == "LayoutError"
        assert message.startswith("transport='symmetric_memory' is for CUDA tensors, these are on the CPU")


def fail_to_rendezvous(group):
    def rendezvous(area, name):
        if group.rank() == 1:
            raise RuntimeError("no descriptor came")

    with machine():
        symmetric._SymmetricMemory.rendezvous = rendezvous
        ask_for_it(group, f"cuda:{group.rank()}")


def test_a_rendezvous_that_fails_on_one_rank_is_an_error_on_all(cluster):
    for kind, message in cluster.failures(fail_to_rendezvous, 2):
        assert kind == "LayoutError"
        assert "cannot be had: rank 1: no descriptor came. Use" in message


class Handle:
    """What PyTorch gives after a rendezvous."""

    def __init__(self, group, area):
        self.rank, self.world_size, self.device, self.area = group.rank(), group.size(), CUDA, area
        self.buffer_size = area[0][0]

    def get_buffer(self, rank, sizes, dtype):
        return None


def what_is_connected(group, backends, algorithm):
    """Connect as one does for gathers and for reductions; `asked` has what PyTorch was asked for."""
    asked = []

    def empty(sizes, strides, dtype, device):
        return sizes, strides, dtype, str(device)

    def rendezvous(area, name):
        assert name == group.group_name
        asked.append(area)
        return Handle(group, area)

    with machine(), patch("torch.distributed.get_backend_config", lambda _: backends):
        symmetric._SymmetricMemory.empty_strided_p2p, symmetric._SymmetricMemory.rendezvous = empty, rendezvous
        route = Route(transport="symmetric_memory", algorithm=algorithm)
        device = torch.device("cuda", group.rank())
        made = [connect(group, device, AMPLE, route=route, apart=apart) for apart in (False, True)]
        left_alone = connect(group, device, AMPLE)
    assert isinstance(left_alone, NcclCollectives if "nccl" in backends else StagedTransport)
    return [(type(each).__name__, each.algorithm, each.rank, each.world_size) for each in made], asked


@pytest.mark.parametrize("backends", ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
@pytest.mark.parametrize(("algorithm", "taken"), [("auto", "direct"), ("ring", "ring")])
def test_it_is_connected_where_it_is_asked_for(cluster, backends, algorithm, taken):
    for rank, (made, asked) in enumerate(cluster.run(what_is_connected, 2, backends, algorithm)):
        assert made == [("SymmetricMemoryTransport", taken, rank, 2)] * 2
        assert asked == [((64 << 20,), (1,), torch.uint8, f"cuda:{rank}")] * 2


def without_others(group):
    with machine():
        return type(connect(group, CUDA, AMPLE, route=Route(transport="symmetric_memory"))).__name__


def test_one_rank_needs_none(cluster):
    assert cluster.run(without_others, 1) == ["StagedTransport"]
