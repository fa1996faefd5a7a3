"""Every transport: order, dtypes, empty messages, and silent peers."""

import os
import time
import weakref
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.testing import assert_close

from shardlite.comm import streams
from shardlite.comm.operation import Operation
from shardlite.comm.streams import ThreadQueue
from shardlite.comm.transport.batches import BatchTransport
from shardlite.comm.transport.gloo import GlooTransport, StagedTransport, reconnect
from shardlite.comm.transport.messages import Message
from shardlite.comm.transport.nccl import NcclTransport
from shardlite.comm.transport.select import connect
from shardlite.errors import CommError, LayoutError
from tests.support.patience import seconds, until
from tests.support.ranks.cluster import run_local
from tests.support.transports.calls import all_gather, reduce_scatter
from tests.support.transports.delegating import Delegating
from tests.support.transports.worlds import run

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


def payload(rank, dtype, numel=13):
    return (torch.arange(numel) * (rank + 1) % 2).to(dtype)


def exchange_every_dtype(transport):
    """Each rank sends to its right neighbour; returns what came from the left."""
    right, left = (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size
    received = [torch.zeros(13).to(dtype) for dtype in DTYPES]
    pending = [transport.irecv(tensor, left, tag=5) for tensor in received]
    pending += [transport.isend(payload(transport.rank, dtype), right, tag=5) for dtype in DTYPES]
    for message in pending:
        message.wait()
    return [tensor.float() if tensor.dtype.itemsize == 1 else tensor for tensor in received]


def exchange_crossed_tags(transport):
    """Two tags, expected in the other order than they are sent, waited for in a third; an empty message between."""
    peer = 1 - transport.rank
    a, b, c, nothing = (torch.zeros(n) for n in (4, 4, 4, 0))
    from_peer = [transport.irecv(t, peer, tag) for t, tag in ((b, 2), (a, 1), (nothing, 1), (c, 1))]
    sent = [torch.full((4,), float(i)) for i in range(3)]
    to_peer = [transport.isend(t, peer, tag) for t, tag in ((sent[0], 1), (nothing, 1), (sent[1], 1), (sent[2], 2))]
    for message in [*reversed(from_peer), *to_peer]:
        message.wait()
    return a, b, c


def exchange_at_once(transport):
    """All messages of `exchange_every_dtype` and an empty one in one exchange, sends first."""
    right, left = (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size
    received = [torch.zeros(0), *(torch.zeros(13).to(dtype) for dtype in DTYPES)]
    sent = [torch.zeros(0), *(payload(transport.rank, dtype) for dtype in DTYPES)]
    messages = [Message(tensor, right, outgoing=True) for tensor in sent]
    messages += [Message(tensor, left, outgoing=False) for tensor in received]
    transport.exchange(messages, tag=5).wait()
    transport.exchange([], tag=5).wait()
    return [tensor.float() if tensor.dtype.itemsize == 1 else tensor for tensor in received[1:]]


def assert_came_from_the_left(results):
    for rank, received in enumerate(results):
        for got, dtype in zip(received, DTYPES, strict=True):
            sent = payload((rank - 1) % len(results), dtype)
            assert_close(got, sent.float() if dtype.itemsize == 1 else sent, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["threads", "gloo", "shared", "staged"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_travels(cluster, kind, size):
    assert_came_from_the_left(run(kind, cluster, exchange_every_dtype, size))


@pytest.mark.parametrize("kind", ["threads", "steps", "gloo", "shared", "staged", "batches"])
@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_one_exchange_do_not_wait_for_each_other(cluster, kind, size):
    assert_came_from_the_left(run(kind, cluster, exchange_at_once, size))


class Batching:
    """A backend that starts messages together, as NCCL does, and what it was told."""

    supports_coalescing = True

    def __init__(self, backend):
        self.said, self._backend, self._works = [], backend, []

    def _start_coalescing(self):
        self.said.append("start")

    def _end_coalescing(self):
        self.said.append("end")
        return self

    def send(self, *message):
        self.said.append("send")
        self._works.append(self._backend.send(*message))

    def recv(self, *message):
        self.said.append("receive")
        self._works.append(self._backend.recv(*message))

    def wait(self):
        return all(work.wait() for work in self._works)


def batches(transport):
    backend = Batching(transport._backend(CPU))
    with patch.object(transport, "_backend", lambda device: backend):
        result = exchange_at_once(transport)
    return backend.said, result


def test_an_exchange_is_one_batch_of_what_is_not_empty(cluster):
    said, results = zip(*run("batches", cluster, batches, 2), strict=True)
    assert_came_from_the_left(results)
    assert list(said) == [["start", *["send"] * len(DTYPES), *["receive"] * len(DTYPES), "end"]] * 2


def test_a_batch_that_may_hang_is_not_started():
    transport = NcclTransport.__new__(NcclTransport)
    transport.rank = 0
    messages = [Message(torch.zeros(1), 1, outgoing=True)] * 65
    with patch.object(transport, "_backend", lambda device: Batching(None)):
        with pytest.raises(AssertionError, match="a batch of 65 messages may hang"):
            transport.exchange(messages, tag=0)


class Exchanges(Delegating, BatchTransport):
    """A transport that notes how many messages its exchanges have."""

    def __init__(self, transport):
        super().__init__(transport)
        self.batches = []

    def exchange(self, messages, tag):
        self.batches.append(len(messages))
        return self._transport.exchange(messages, tag)


@pytest.mark.parametrize(("algorithm", "expected"), [("ring", [2] * 39), ("direct", [62, 16])])
def test_no_batch_has_more_than_sixty_four_messages(algorithm, expected):
    """However long the buffer is."""

    def body(transport):
        transport = Exchanges(transport)
        transport.algorithm = algorithm
        full = torch.zeros(40 << 10)
        all_gather(full, transport, chunk_bytes=512)
        gathering, transport.batches = transport.batches, []
        reduce_scatter(full, transport, chunk_bytes=512)
        return gathering, transport.batches

    assert run_local(body, 40) == [(expected, expected)] * 40


@pytest.mark.parametrize("kind", ["threads", "gloo", "shared", "staged"])
def test_messages_match_by_tag_and_then_by_order(cluster, kind):
    for a, b, c in run(kind, cluster, exchange_crossed_tags, 2):
        assert (a[0].item(), c[0].item(), b[0].item()) == (0.0, 1.0, 2.0)


def send_and_change(transport):
    """The tensor may be reused as soon as the wait is over, and a staged one as soon as it is sent."""
    peer = 1 - transport.rank
    sent, received = torch.full((1 << 18,), transport.rank + 1.0), torch.zeros(1 << 18)
    arriving = transport.irecv(received, peer, tag=0)
    departing = transport.isend(sent, peer, tag=0)
    sent.zero_()
    departing.wait()
    early = received.unique().tolist()
    arriving.wait()
    return early, received.unique().tolist()


def test_a_staged_message_is_copied_when_it_is_sent_and_when_it_is_waited_for(cluster):
    assert run("staged", cluster, send_and_change, 2) == [([0.0], [2.0]), ([0.0], [1.0])]


def send_unexpected_messages(group):
    """Rank 0 sends a message that rank 1 does not expect, and conversely."""
    transport = GlooTransport(group, timedelta(milliseconds=200))
    if transport.rank == 0:
        transport.isend(torch.zeros(1_000_000), 1, tag=7).wait()
    else:
        transport.irecv(torch.zeros(4), 0, tag=8).wait()


def be_alone(group):
    """Rank 1 gathers, rank 0 does nothing."""
    if dist.get_rank(group) == 1:
        transport = GlooTransport(group, timedelta(milliseconds=200))
        all_gather(torch.zeros(4), transport, operation=Operation("all-gather of unit 'head'", 3))


def exchange_with_nobody(group):
    """Rank 1 comes to a step that rank 0 leaves out. NCCL's messages take as long as their group allows."""
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=seconds(2)))
    if dist.get_rank() == 1:
        tensors = torch.zeros(4), torch.zeros(4), torch.zeros(100)
        messages = [Message(tensor, 0, outgoing=i == 2) for i, tensor in enumerate(tensors)]
        NcclTransport(impatient).exchange(messages, tag=8).wait()


def leave_a_wait(group):
    """A thread of rank 0 waits in gloo for what never comes when the program ends."""
    transport = GlooTransport(dist.new_group([0, 1]), timedelta(seconds=seconds(300)))
    if transport.rank == 1:
        return None
    queue = ThreadQueue("waits")
    pending = transport.irecv(torch.zeros(4), 1, tag=8)
    waiting = queue.submit(pending.wait)
    until(lambda: streams._hang_ups)
    streams.end_waits()
    with pytest.raises(CommError) as failed:
        waiting.wait()
    return str(failed.value)


def test_silent_gloo_peers_are_named(throwaway):
    (first, sending), (second, receiving) = throwaway.failures(send_unexpected_messages, 2)
    assert first == second == "CommError"
    assert "rank 0 sending to rank 1 failed: 4000000 bytes, tag 7, timeout 0.2 s" in sending
    assert "rank 1 receiving from rank 0 failed: 16 bytes, tag 8, timeout 0.2 s" in receiving


def test_no_thread_waits_in_gloo_when_a_program_ends(throwaway):
    message, _ = throwaway.run(leave_a_wait, 2)
    assert message.startswith("rank 0 receiving from rank 1 failed: 16 bytes, tag 8, timeout")


def stage_for_nobody(group):
    if dist.get_rank(group) == 1:
        StagedTransport(group, timedelta(milliseconds=200)).irecv(torch.zeros(4), 0, tag=8).wait()


def reconnect_alone(group):
    group = dist.new_group([0, 1])
    if dist.get_rank() == 1:
        reconnect(group, timedelta(seconds=seconds(0.2)))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (be_alone, "all-gather of unit 'head' (operation 3, 4 elements of torch.float32): rank 1 "),
        (
            exchange_with_nobody,
            "rank 1 receiving from rank 0 and sending to rank 0 failed: 432 bytes, tag 8. The peer ",
        ),
        (stage_for_nobody, "rank 1 receiving from rank 0 failed: 16 bytes, tag 8, timeout 0.2 s. The peer "),
        (reconnect_alone, "another connection over gloo: rank 1 timed out after "),
    ],
)
def test_an_absent_peer_is_named(throwaway, body, words):
    silent, (kind, message) = throwaway.failures(body, 2)
    assert (silent, kind) == (None, "CommError")
    assert message.startswith(words)


def test_only_cpu_tensors_go_through_gloo(group):
    with pytest.raises(LayoutError, match=r"^GlooTransport sends CPU tensors, got one on meta$"):
        GlooTransport(group, timedelta(seconds=1)).isend(torch.zeros(4, device="meta"), 0, tag=0)
    assert issubclass(LayoutError, ValueError)


def exchange_in_a_subgroup(group):
    """Ranks of a group are not those of the world: rank 0 here is rank 1 there."""
    sub = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    transports = [GlooTransport(sub, timedelta(seconds=30)), NcclTransport(sub)]
    assert [t.rank for t in transports] == [dist.get_rank() - 1] * 2
    return [exchange_at_once(transport) for transport in transports]


def test_peers_are_ranks_of_the_group(throwaway):
    outside, *inside = throwaway.run(exchange_in_a_subgroup, 3)
    assert outside is None
    for results in zip(*inside, strict=True):
        assert_came_from_the_left(list(results))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_tensors_are_staged(cluster):
    assert_came_from_the_left(cluster.run(exchange_on_device, 2))


def exchange_on_device(group):
    transport = connect(group, torch.device("cuda", 0), timedelta(seconds=30))
    assert isinstance(transport, StagedTransport)
    peer = 1 - transport.rank
    received = [torch.zeros(13, device="cuda").to(dtype) for dtype in DTYPES]
    messages = [Message(tensor, peer, outgoing=False) for tensor in received]
    messages += [Message(payload(transport.rank, dtype).cuda(), peer, outgoing=True) for dtype in DTYPES]
    transport.exchange(messages, tag=5).wait()
    arrived = [tensor.cpu() for tensor in received]
    return [tensor.float() if tensor.dtype.itemsize == 1 else tensor for tensor in arrived]


# Connections beside those of a process group.


def reconnect_unequally(group):
    """Only rank 0 is in a further group: PyTorch names new groups by their number, and would wait for good."""
    alone = [dist.new_group([0])]
    try:
        backend = reconnect(group, timedelta(seconds=seconds(30)))
    finally:
        if dist.get_rank() == 0:
            dist.destroy_process_group(alone.pop())
    transport = GlooTransport(backend, timedelta(seconds=seconds(30)))
    result = exchange_at_once(transport)
    held = weakref.ref(backend)
    opened = len(os.listdir("/proc/self/fd"))
    del backend, transport
    return result, held() is None, opened > len(os.listdir("/proc/self/fd"))


def test_ranks_in_different_numbers_of_groups_are_connected_and_the_connection_is_freed(cluster):
    results, freed, closed = zip(*cluster.run(reconnect_unequally, 2), strict=True)
    assert_came_from_the_left(results)
    assert all(freed)
    assert all(closed)


def reconnect_late(group, folder):
    """Delay the connection of rank 0. Return which ranks were connected when this one returned."""

    def connected(*arguments):
        made = ProcessGroupGloo(*arguments)
        time.sleep(0.1 * (dist.get_rank() == 0))
        (folder / str(dist.get_rank())).touch()
        return made

    with patch("torch.distributed.ProcessGroupGloo", connected):
        reconnect(group, timedelta(seconds=seconds(30)))
    return sorted(each.name for each in folder.iterdir())


def test_no_rank_returns_before_all_are_connected(cluster, tmp_path):
    """A rank that drops the connection closes it, and gloo fails on peers that were still waiting to be connected."""
    assert cluster.run(reconnect_late, 2, tmp_path) == [["0", "1"]] * 2
