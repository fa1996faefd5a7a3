"""Both transports: order, dtypes, empty messages, silent peers. And the cluster of the tests itself."""

import os
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from shardlite.errors import CommError, LayoutError
from shardlite.ring import Operation, all_gather
from shardlite.transport import GroupTransport, local_world
from tests.cluster import Cluster, RemoteError

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


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_travels(run_ranks, size):
    for rank, received in enumerate(run_ranks(exchange_every_dtype, size)):
        for got, dtype in zip(received, DTYPES, strict=True):
            sent = payload((rank - 1) % size, dtype)
            assert_close(got, sent.float() if dtype.itemsize == 1 else sent, rtol=0, atol=0)


def test_messages_match_by_tag_and_then_by_order(run_ranks):
    for a, b, c in run_ranks(exchange_crossed_tags, 2):
        assert (a[0].item(), c[0].item(), b[0].item()) == (0.0, 1.0, 2.0)


def test_a_local_message_is_copied_when_it_is_sent():
    left, right = local_world(2)
    tensor, got = torch.ones(3), torch.zeros(3)
    left.isend(tensor, 1, tag=0).wait()
    tensor.zero_()
    right.irecv(got, 0, tag=0).wait()
    assert_close(got, torch.ones(3))


def test_a_local_message_of_another_kind_is_an_error():
    left, right = local_world(2)
    left.isend(torch.ones(3), 1, tag=0)
    with pytest.raises(CommError, match=r"rank 1 receiving from rank 0.*the peer sent 3 elements of torch\.float32"):
        right.irecv(torch.zeros(4), 0, tag=0).wait()


def talk_past_each_other(group):
    """Rank 0 sends what rank 1 does not expect, rank 1 expects what rank 0 does not send."""
    transport = GroupTransport(group, timedelta(milliseconds=200))
    if transport.rank == 0:
        transport.isend(torch.zeros(1_000_000), 1, tag=7).wait()
    else:
        transport.irecv(torch.zeros(4), 0, tag=8).wait()


def be_alone(group):
    """Rank 1 gathers, rank 0 does nothing."""
    if dist.get_rank(group) == 1:
        transport = GroupTransport(group, timedelta(milliseconds=200))
        all_gather(torch.zeros(4), transport, operation=Operation("all-gather of unit 'head'", 3))


@pytest.fixture(scope="module")
def throwaway():
    """A cluster for bodies that break gloo connections or ranks: the session's stays as it is."""
    gloo = Cluster(size=2, timeout=60)
    yield gloo
    gloo.close()


def test_silent_gloo_peers_are_named(throwaway):
    (first, sending), (second, receiving) = throwaway.failures(talk_past_each_other, 2)
    assert first == second == "CommError"
    assert "rank 0 sending to rank 1 failed: 4000000 bytes, tag 7, timeout 0.2 s" in sending
    assert "rank 1 receiving from rank 0 failed: 16 bytes, tag 8, timeout 0.2 s" in receiving


def test_an_absent_gloo_peer_is_named_with_the_operation(throwaway):
    silent, (kind, message) = throwaway.failures(be_alone, 2)
    assert (silent, kind) == (None, "CommError")
    assert message.startswith("all-gather of unit 'head' (operation 3, 4 elements of torch.float32): rank 1 ")


def use_device_tensor(group):
    GroupTransport(group, timedelta(seconds=1)).isend(torch.zeros(4, device="meta"), 0, tag=0)


def test_only_cpu_tensors_go_through_gloo(cluster):
    assert (
        cluster.failures(use_device_tensor, 2)
        == [("LayoutError", "GroupTransport sends CPU tensors, got one on meta")] * 2
    )
    assert issubclass(LayoutError, ValueError)


# The cluster itself.


def describe(group, *, factor):
    return os.environ["SHARDLITE_POISON"], torch.get_num_threads(), dist.get_rank(group) * factor, torch.rand(1)


def fail_on_rank_one(group):
    if dist.get_rank(group) == 1:
        raise ZeroDivisionError("on purpose")


def warn(group):
    warnings.warn("on purpose", stacklevel=1)


def die(group):
    if dist.get_rank(group) == 1:
        os._exit(3)


def test_bodies_run_by_rank_with_the_same_seed(cluster):
    results = cluster.run(describe, 3, factor=10)
    assert [r[:3] for r in results] == [("1", 1, 0), ("1", 1, 10), ("1", 1, 20)]
    assert len({r[3].item() for r in results}) == 1


def test_warnings_are_errors_on_every_rank(cluster):
    assert cluster.failures(warn, 4) == [("UserWarning", "on purpose")] * 4


def test_a_failing_or_dying_rank_is_named_and_the_cluster_recovers(throwaway):
    with pytest.raises(RemoteError, match=r"(?s)rank 1:\nTraceback.*ZeroDivisionError: on purpose"):
        throwaway.run(fail_on_rank_one, 2)
    assert throwaway.failures(die, 2) == [None, ("WorkerDied", "the worker died with exit code 3")]
    assert len(throwaway.run(describe, 2, factor=1)) == 2
