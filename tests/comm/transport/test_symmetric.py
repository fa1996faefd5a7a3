"""Simulated symmetric memory: windows, barriers, launches, training, and selection.

Its collectives are tried like those of any transport in `test_ring.py`, and the ring kernel in
`tests/kernels/interpreted/test_symmetric_ring.py`.

Legend: `W` ranks.
"""

import threading
import warnings
from contextlib import ExitStack
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch

from shardlite.comm.chunking import cut_up
from shardlite.comm.collectives import all_gather
from shardlite.comm.operation import UNNAMED, Operation
from shardlite.comm.transport import symmetric
from shardlite.comm.transport.gloo import StagedTransport
from shardlite.comm.transport.group_collectives import NcclCollectives
from shardlite.comm.transport.select import connect
from shardlite.comm.transport.symmetric import why_not
from shardlite.config import Route
from shardlite.errors import CommError, LayoutError
from tests.support.patience import seconds
from tests.support.simulated_cuda import Simulated
from tests.support.transports.played_symmetric import CPU, RING, launches, played, run_memories, run_played
from tests.support.transports.ring_cases import (
    Case,
    assert_equal_bits,
    assert_gathered_and_summed,
    broadcast_everything,
    cases_for,
    gather_everything,
    reduce_everything,
    tensor_of,
)
from tests.support.transports.symmetric_bodies import every_dtype, rings, trained
from tests.support.transports.symmetric_training import train, train_in_backward
from tests.support.twins.sharded import slow

CUDA = torch.device("cuda", 0)
AMPLE = timedelta(seconds=seconds(30))  # for what ends at once


# Training.


@pytest.mark.parametrize(
    ("name", "size", "stage"), [("plain", 2, 3), ("mixed", 3, 2), slow("plain", 4, 0), slow("frozen", 3, 3)]
)
def test_training_has_the_bits_of_plain_data_parallel(cluster, tmp_path, name, size, stage):
    cluster.check(train, size, tmp_path, name, stage)


@pytest.mark.parametrize(("size", "stage"), [(3, 3), slow(2, 0)])
def test_steps_in_the_backward_have_the_same_bits(cluster, tmp_path, size, stage):
    cluster.check(train_in_backward, size, tmp_path, "plain", stage)


# The bodies that GPUs run, here.


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("body", [every_dtype, rings])
def test_bodies_for_gpus_pass_on_the_cpu(body, size):
    assert run_played(body, size, CPU) == [None] * size


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_training_for_gpus_passes_on_the_cpu(group, in_backward):
    for name, weight in trained(group, CPU, "p2p", in_backward=in_backward).items():
        other = trained(group, CPU, "shared_memory", in_backward=in_backward)
        assert_equal_bits(weight, other[name])


# What a collective enqueues.


def one_of_each(transport):
    """What each collective enqueues, in order: copies, barriers and kernels."""
    full, numbers = torch.zeros(300), torch.ones(5, dtype=torch.int32)
    ragged, rows = cut_up(300, full.dtype, transport, (0, 50, 100, 300), None), torch.empty(600)
    even = cut_up(300, full.dtype, transport, None, None)
    return {
        "gather": launches(transport, lambda: transport.all_gather(full, even, UNNAMED)),
        "broadcast": launches(transport, lambda: transport.copy_from(1, full)),
        "count": launches(transport, lambda: transport.add_integers(numbers)),
        "rows": launches(transport, lambda: transport.exchange_rows(full, even, (0, 100), torch.empty(300))),
        "ragged rows": launches(transport, lambda: transport.exchange_rows(full, ragged, (0, 60), rows)),
    }


def test_a_gather_is_a_barrier_and_a_copy_for_each_rank():
    gather = ["copy_", "barrier", "copy_", "copy_"]
    for rank, found in enumerate(run_played(one_of_each, 3)):
        assert found == {
            "gather": gather,
            "broadcast": ["copy_", "barrier"] if rank == 1 else ["barrier", "copy_"],
            "count": ["repeat", *gather, "sum"],
            "rows": [*gather, "copy_"],
            "ragged rows": ["copy_", "copy_", "copy_", "barrier", "copy_", "copy_", "copy_"],
        }


# Windows.


def in_small_windows(transport, cases):
    transport.slice_nbytes = 256 * transport.world_size
    given = transport, cases
    return gather_everything(*given), reduce_everything(*given, transport.world_size), broadcast_everything(*given)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_long_buffers_go_in_rounds_however_late_ranks_pull(size):
    cases = cases_for(size, [torch.float32])[1::5]
    results = run_played(in_small_windows, size, cases, longest=0.0005)
    assert_gathered_and_summed([result[:2] for result in results], cases)
    for *_, sent in results:
        for i, (got, case) in enumerate(zip(sent, cases, strict=True)):
            assert_equal_bits(got, tensor_of(i % size, case.numel, case.dtype))


def pull_late(memory, shown):
    """Rank 1 pulls what was shown first only after rank 0 has shown the next."""
    transport, gathered = played(memory), []
    if memory.rank == 0:
        memory.before_barrier = lambda: gathered and shown.set()
    else:
        memory.after_barrier = lambda: shown.wait(seconds(20))
    for i in range(3):
        full = torch.full((2,), 10.0 * i + memory.rank)
        all_gather(full, transport)
        gathered.append(full.tolist())
    return gathered


def test_a_late_rank_pulls_what_was_shown_to_it():
    assert run_memories(pull_late, 2, threading.Event()) == [[[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]] * 2


def test_gathers_and_reductions_at_the_same_time_do_not_mix():
    """Each over a transport of its own, as a training step has them."""
    cases = [Case(3001 + i, torch.float32, 1 << 12) for i in range(3)]

    def body(*memories):
        gathers, sums = map(played, memories)
        results = []
        thread = threading.Thread(target=lambda: results.append(gather_everything(gathers, cases)))
        thread.start()
        summed = reduce_everything(sums, cases, 3)
        thread.join()
        return results[0], summed

    assert_gathered_and_summed(run_memories(body, 3, memories=2), cases)


# Errors.


def be_alone(memory):
    """Rank 1 gathers, rank 0 does nothing."""
    transport = played(memory)
    transport._timeout_ms = 200
    if memory.rank == 1:
        all_gather(torch.zeros(4), transport, operation=Operation("all-gather of unit 'head'", 3))


def test_a_silent_peer_is_an_error_with_the_operation():
    with pytest.raises(CommError) as failed:
        run_memories(be_alone, 2)
    expected = "(operation 3, 4 elements of torch.float32): rank 1 in all-gather failed: 16 bytes, timeout "
    assert str(failed.value).startswith(f"all-gather of unit 'head' {expected}")
    assert "trap: the signal (owner, source) (1, 0) is not 1" in str(failed.value)


def test_an_area_that_is_too_small_is_refused():
    needed = RING + 2 * 4 * 1024 * 8
    with pytest.raises(LayoutError, match=f"{needed - 1} bytes per rank is too small for 4 ranks: at least {needed} b"):
        run_memories(played, 4, nbytes=needed - 1)


# Streams of a GPU, as far as they can be simulated.


def test_a_collective_is_behind_the_last_one_on_whatever_stream(monkeypatch):
    cuda = Simulated()
    monkeypatch.setattr(torch.cuda, "current_stream", cuda.stream_of_thread)
    monkeypatch.setattr(torch.cuda, "Stream", cuda.new_stream)

    def body(memory):
        if memory.rank == 0:
            memory.device = CUDA
        transport, tensor = played(memory), torch.zeros(4)
        if memory.rank == 1:
            return [transport.copy_from(0, tensor) for _ in range(4)]
        side = torch.cuda.Stream(CUDA, priority=-1)
        transport.copy_from(0, tensor)
        with cuda.on(side):
            transport.copy_from(0, tensor)
            transport.copy_from(0, tensor)
        return transport.copy_from(0, tensor)

    run_memories(body, 2)
    assert cuda.log == [
        ("compute", "record 1"),
        ("side 1", "wait 1"),
        ("side 1", "record 2"),
        ("side 1", "record 3"),
        ("compute", "wait 3"),
        ("compute", "record 4"),
    ]


# Who gets it.


SYMMETRIC = Route(transport="symmetric_memory")


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


@pytest.mark.parametrize(
    ("device", "given", "reason"),
    [
        ("own", {}, ""),
        ("cuda:0", {"overlap": True}, ""),
        ("own", {"gpus": 0}, "rank 0: requires a CUDA device, but none is available"),
        ("cpu", {}, "rank 0: requires a CUDA device, but none is available"),
        (
            "own",
            {"backend": "NVSHMEM"},
            "rank 0: requires PyTorch's backend 'CUDA' for symmetric memory, got 'NVSHMEM'",
        ),
        ("own", {"hosts": 2}, "the ranks are on several hosts"),
        ("own", {"peers": False}, "cuda:0 cannot access the memory of cuda:1"),
        ("cuda:0", {}, "ranks [0, 1] all use cuda:0. "),
    ],
)
def test_why_not(group, device, given, reason):
    own = torch.device("cuda", group.rank()) if device == "own" else torch.device(device)
    with machine(**given):
        said = why_not(group, own)
        assert said.startswith(reason)
        assert bool(said) == bool(reason)
        assert reason != "ranks [0, 1] all use cuda:0. " or "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1" in said


def ask_for_it(group, device, transport="symmetric_memory"):
    connect(group, torch.device(device), AMPLE, route=Route(transport=transport))


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:0", "is not available: rank 0: requires a CUDA device, but none is available. Use 'p2p' or 'auto'$"),
        ("cpu", "is for CUDA tensors, but these are on the CPU"),
    ],
)
def test_where_it_is_not_available_the_error_says_why(group, device, expected):
    with pytest.raises(LayoutError, match=f"^transport='symmetric_memory' {expected}"):
        ask_for_it(group, device)


def test_a_rendezvous_that_fails_on_one_rank_is_an_error_on_all(group):
    def rendezvous(area, name):
        if group.rank() == 1:
            raise RuntimeError("no descriptor came")

    with machine():
        symmetric._SymmetricMemory.rendezvous = rendezvous
        with pytest.raises(LayoutError, match=r"is not available: rank 1: no descriptor came\. Use"):
            ask_for_it(group, f"cuda:{group.rank()}")


class Handle:
    """What PyTorch gives after a rendezvous."""

    def __init__(self, group, area):
        self.rank, self.world_size, self.device, self.area = group.rank(), group.size(), CUDA, area
        self.buffer_size = area[0][0]

    def get_buffer(self, rank, sizes, dtype):
        return torch.empty(sizes, dtype=dtype)

    def barrier(self, channel, timeout_ms):
        pass


@pytest.mark.parametrize("backends", ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
def test_it_is_connected_where_it_is_asked_for(group, backends):
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
        device = torch.device("cuda", group.rank())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("default")
            made = [connect(group, device, AMPLE, route=SYMMETRIC, apart=apart) for apart in (False, True)]
        left_alone = connect(group, device, AMPLE)
    assert isinstance(left_alone, NcclCollectives if "nccl" in backends else StagedTransport)
    assert [str(each.message) for each in said] == [
        "transport='symmetric_memory' is experimental: it has not been tested between GPUs"
    ]
    expected = "SymmetricMemoryTransport", group.rank(), 2
    assert [(type(each).__name__, each.rank, each.world_size) for each in made] == [expected] * 2
    assert asked == [((64 << 20,), (1,), torch.uint8, str(device))] * 2
