"""Collectives of a process group: training has the bits of the ring; slices, errors, and selection.

That each collective has those bits is shown in `test_ring.py`, at 1 to 8 ranks.

Legend: `W` ranks.
"""

import re
from collections import Counter
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlite import LayoutError, Precision, ShardLite
from shardlite.comm.chunking import cut_up
from shardlite.comm.collectives import all_gather, all_reduce, staging_numel
from shardlite.comm.operation import Operation
from shardlite.comm.traffic import Tally
from shardlite.comm.transport import group_collectives, staging
from shardlite.comm.transport.group_collectives import GlooCollectives, GroupCollectives
from shardlite.comm.transport.select import connect, connect_hosts
from shardlite.comm.transport.shared_memory.transport import SharedMemoryTransport
from shardlite.config import Route
from tests.support.models.losses import MODELS, on_tokens
from tests.support.models.small import LanguageModel
from tests.support.patience import seconds
from tests.support.transports.both_ways import train_over_both
from tests.support.transports.calls import reduce_scatter
from tests.support.transports.ring_cases import FLOATS, Case, assert_equal_bits, cases_for, reduce_everything, ring_sum
from tests.support.transports.worlds import run
from tests.support.twins.duos import Side
from tests.support.twins.sharded import STAGES, Pair, Turn, _seeded, slow, trained

CPU = torch.device("cpu")
AMPLE = timedelta(seconds=seconds(30))  # for what ends at once
SPLIT = Precision(compute=torch.bfloat16, master="split24")
COLLECTIVES = Route(transport="collectives")
NARROW_WIRE = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "group"), [("plain", 2), ("mixed", 3), slow("plain", 4), slow("frozen", 2)], indirect=["group"]
)
def test_every_stage_has_the_bits_of_plain_data_parallel(group, name):
    for stage in STAGES:
        trained(*MODELS[name], group, stage=stage, route=COLLECTIVES)


@pytest.mark.parametrize(("name", "group"), [("plain", 2), ("mixed", 3)], indirect=["group"])
def test_gathers_by_the_process_group_have_the_same_bits(group, name):
    """As over NCCL: with equal segments in place, and with others in rows that are padded."""
    with patch.object(GlooCollectives, "all_gather", GroupCollectives.all_gather):
        trained(*MODELS[name], group, stage=3, route=COLLECTIVES)


LONG = patch.object(group_collectives, "SLICE_NBYTES", 256)
"""Lets reductions be long, so that their rows are exchanged inside the bucket."""


@pytest.mark.ranks(4)
def test_training_with_long_reductions_has_the_same_bits(group):
    """At all stages, and with replicas, whose sums are exchanged inside a shard."""
    mesh = DeviceMesh("cpu", [[0], [1], [2], [3]], mesh_dim_names=("replicate", "shard"))
    with LONG, patch.object(GlooCollectives, "_exchange_in_bucket", autospec=True) as exchanged:
        exchanged.side_effect = GroupCollectives._exchange_in_bucket
        for stage in STAGES:
            trained(*MODELS["plain"], group, stage=stage, route=COLLECTIVES)
        before = exchanged.call_count
        pair = Pair(LanguageModel, mesh, replicas=4, route=COLLECTIVES)
        pair.step(on_tokens, clip=0.01)
    assert exchanged.call_count > before > 0


def train_long(group, *arguments):
    with LONG:
        train_over_both(group, *arguments)


@pytest.mark.parametrize(
    ("size", "in_backward", "stage", "optimizer", "options"),
    [
        (3, True, 3, {"state": "int8"}, {}),
        (3, True, 0, {}, {"precision": NARROW_WIRE}),
        (3, False, 3, {}, {"precision": SPLIT}),
        (2, True, 3, {}, {"precision": NARROW_WIRE}),
        (2, False, 2, {}, {}),
    ],
)
def test_every_format_has_the_bits_of_messages_if_reductions_are_long(
    cluster, size, stage, in_backward, optimizer, options
):
    cluster.check(train_long, size, stage, "auto", in_backward, optimizer, options)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.ranks(2, 3)
def test_an_operation_is_one_message_on_any_number_of_ranks(group, in_backward):
    """Train until the order of gathers is known; count the calls and messages of each purpose in a step."""
    model = ShardLite(LanguageModel(), group=group, route=Route(transport="collectives"))
    assert "GlooCollectives" in repr(model)
    side = Side(model, in_backward=in_backward)
    before = Counter()
    for step in range(4):
        before = of_units(model)
        side.backward(on_tokens, [Turn(step, dist.get_rank(), 0)], ["step"])
        side.finish()
    found = of_units(model) - before
    purposes = {"gather", "reduce", *(["used"] if in_backward else [])}
    assert found.keys() == {(purpose, what) for purpose in purposes for what in ("calls", "messages")}
    assert all(found[purpose, "calls"] == found[purpose, "messages"] > 0 for purpose in purposes)


def of_units(model):
    """Return calls and messages so far, by purpose."""
    found = Counter()
    for unit, purposes in model.traffic().items():
        for purpose, sent in purposes.items() if not unit.startswith("(no") else ():
            found[purpose, "calls"] += sent.calls
            found[purpose, "messages"] += sent.messages
    return found


# ---- collectives ----------------------------------------------------------------------------------------------------


def reduce_in_slices(transport, cases, divisor):
    with patch.object(transport, "slice_nbytes", 512):
        for case in cases:
            cut = cut_up(case.numel, case.dtype, transport, case.cuts, None)
            needed = staging_numel(case.numel, transport, case.dtype, cuts=case.cuts) * case.dtype.itemsize
            in_bucket = transport._staged_in_bucket(cut, case.dtype.itemsize) * case.dtype.itemsize
            shortest = 2 * transport.world_size * staging.SHORTEST * case.dtype.itemsize
            assert needed == in_bucket or (not in_bucket and needed <= max(512, shortest))
        return reduce_everything(transport, cases, divisor)


def reduce_in_slices_by_collectives(*arguments):
    """As over NCCL, where each step of an exchange inside the bucket is an all-to-all with one peer."""
    with patch.object(GlooCollectives, "_trade", GroupCollectives._trade):
        return reduce_in_slices(*arguments)


@pytest.mark.parametrize("reduce", [reduce_in_slices, reduce_in_slices_by_collectives])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_long_rows_go_in_slices(cluster, size, reduce):
    """Equal segments of any length, and of lengths that are no multiple of 8 bytes; and segments of different lengths.

    The rows of equal segments are exchanged inside the bucket, in one to three parts each. Others are packed.
    """
    cases = cases_for(size, FLOATS) + [Case(n * size, dtype, 1 << 20) for n in (333, 1000) for dtype in FLOATS]
    results = run("whole", cluster, reduce, size, cases, size)
    for i, case in enumerate(cases):
        total = ring_sum(size, case, size)
        for result, (start, stop) in zip(results, case.bounds(size), strict=True):
            assert_equal_bits(result[i], total[start:stop])


def staged_row_by_row(transport):
    return staging_numel(30, transport, torch.float32)


def test_two_ranks_stage_only_the_row_of_the_other(cluster):
    assert run("whole", cluster, staged_row_by_row, 2) == [15, 15]
    assert run("whole", cluster, staged_row_by_row, 3) == [30, 30, 30]


def count_one_of_each(transport):
    tally = Tally()
    given = {"operation": Operation("a trial", tally=tally)}
    all_gather(torch.zeros(30), transport, **given)
    reduce_scatter(torch.zeros(30), transport, **given)
    all_reduce(torch.ones(5, dtype=torch.int32), transport, **given)
    return tally


def test_a_collective_is_one_message_with_the_bytes_of_a_ring(cluster):
    assert run("whole", cluster, count_one_of_each, 3) == [Tally(3, 2 * 40 + 2 * 40 + 2 * 20)] * 3


def fast_sums(transport, cases):
    transport.fast = True
    return reduce_everything(transport, cases, 3)


def test_a_fast_sum_is_close_and_an_uneven_one_exact(cluster):
    cases = [
        Case(999, torch.float32, 1 << 20),
        Case(999, torch.bfloat16, 1 << 20),
        Case(1000, torch.float32, 1 << 20),
        Case(999, torch.float32, 1 << 20, [0, 5, 900, 999]),
    ]
    results = run("whole", cluster, fast_sums, 3, cases)
    for i, case in enumerate(cases):
        exact = ring_sum(3, case, 3)
        for result, (start, stop) in zip(results, case.bounds(3), strict=True):
            if i < 2:
                tolerance = 1e-6 if case.dtype == torch.float32 else 0.02
                torch.testing.assert_close(result[i], exact[start:stop], rtol=tolerance, atol=tolerance)
            else:
                assert_equal_bits(result[i], exact[start:stop])


def calls_of(group, reduce):
    """Which collectives a step calls, and its weights."""
    model = ShardLite(_seeded(LanguageModel), group=group, route=Route(transport="collectives", reduce=reduce))
    side = Side(model, in_backward=True)
    called, run_one = set(), GlooCollectives._run

    def noted(transport, what, *args):
        called.add(what)
        run_one(transport, what, *args)

    with patch.object(GlooCollectives, "_run", noted):
        side.backward(on_tokens, [Turn(0, dist.get_rank(), 0)], ["step"])
        side.finish()
    return called, model.full_state_dict()


def test_a_fast_reduction_is_made_on_request(cluster):
    both = [cluster.run(calls_of, 2, how) for how in ("exact", "fast")]
    for (exact, weights), (fast, others) in zip(*both, strict=True):
        assert exact == {"all-to-all", "all-reduce", "broadcast"}, "gathers are messages over gloo"
        assert fast == {"reduce-scatter", "all-reduce", "broadcast"}
        torch.testing.assert_close(weights, others, rtol=1e-4, atol=1e-4)


# ---- errors ---------------------------------------------------------------------------------------------------------


def be_alone(group):
    """Rank 1 reduces, rank 0 does nothing."""
    transport = GlooCollectives(group, timedelta(seconds=seconds(0.2)))
    if transport.rank == 1:
        reduce_scatter(torch.zeros(4), transport, operation=Operation("reduce-scatter of unit 'head'", 3))


def test_a_silent_peer_is_an_error_with_the_operation(throwaway):
    silent, (kind, message) = throwaway.failures(be_alone, 2)
    assert (silent, kind) == (None, "CommError")
    assert message.startswith(
        "reduce-scatter of unit 'head' (operation 3, 4 elements of torch.float32): rank 1 in all-to-all failed: "
        "8 bytes, timeout "
    )


# ---- who gets them --------------------------------------------------------------------------------------------------


def test_each_connection_has_a_group_of_its_own_and_hosts_have_messages(group):
    made = [connect(group, CPU, AMPLE, route=COLLECTIVES) for _ in range(2)]
    assert made[0]._group is not made[1]._group  # they have no tags
    assert [type(each) for each in made] == [GlooCollectives] * 2
    assert isinstance(connect_hosts(group, AMPLE, route=COLLECTIVES), SharedMemoryTransport)


@pytest.mark.parametrize(
    ("route", "device", "message"),
    [
        (
            COLLECTIVES,
            "cuda:0",
            "transport='collectives' requires NCCL for CUDA tensors, which this process group lacks",
        ),
        (
            Route(transport="p2p", reduce="fast"),
            "cpu",
            "reduce='fast' requires collectives of the process group, but these tensors go over GlooTransport, "
            "because it was requested: also pass transport='collectives'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(group, route, device, message):
    names = dist.get_backend_config(group) if device == "cpu" else "cpu:gloo,cuda:gloo"
    with (
        patch("torch.distributed.get_backend_config", lambda _: names),
        pytest.raises(LayoutError, match=f"^{re.escape(message)}"),
    ):
        connect(group, torch.device(device), AMPLE, route=route)


def test_a_schedule_is_of_messages():
    for transport in ("collectives", "symmetric_memory"):
        with pytest.raises(ValueError, match=f"algorithm='ring' is a schedule of messages, and {transport=} has none"):
            Route(transport=transport, algorithm="ring")
    with pytest.raises(ValueError, match="reduce must be one of 'exact', 'fast'; got 'quick'"):
        Route(reduce="quick")
