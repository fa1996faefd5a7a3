"""Ring collectives against a written-out model of their order, to the bit."""

from datetime import timedelta

import pytest
import torch

from shardlite.comm.chunking import segment_bounds
from shardlite.comm.collectives import broadcast, staging_numel
from shardlite.comm.operation import Operation
from shardlite.errors import CommError, LayoutError
from tests.support.ranks.cluster import LARGE, Cluster, run_local
from tests.support.ranks.local_world import local_world
from tests.support.transports.calls import all_gather, all_reduce, reduce_scatter
from tests.support.transports.ring_cases import (
    EVERY_DTYPE,
    FLOATS,
    INTEGERS,
    NARROW,
    all_reduce_everything,
    assert_equal_bits,
    broadcast_everything,
    cases_for,
    gather_everything,
    reduce_everything,
    reduce_to_fp32,
    ring_sum,
    tensor_of,
)
from tests.support.transports.worlds import IN_PROCESS, PLAYED, Batched, run

SIZES = {
    "threads": range(1, 9),
    "steps": range(1, 6),
    "gloo": range(1, 5),
    "shared": range(1, 5),
    "staged": [3],
    "batches": [2, 3],
    "whole": range(1, 9),
    "symmetric": range(1, 5),
}
SLOW = {
    "threads": (2, 4, 6, 7, 8),
    "steps": (2, 4),
    "gloo": (1, 2, 4),
    "shared": (1, 3, 4),
    "batches": (2,),
    "whole": (1, 2, 4, 5, 6, 7, 8),
    "symmetric": (1, 2, 4),
}
WORLDS = [
    pytest.param((kind, size), marks=pytest.mark.slow if size in SLOW.get(kind, ()) else (), id=f"{kind}{size}")
    for kind, sizes in SIZES.items()
    for size in sizes
]


@pytest.fixture(scope="module")
def wide(fork_server):
    """A cluster of more processes than others need."""
    gloo = Cluster(fork_server, sizes=[8])
    yield gloo
    gloo.close()


@pytest.fixture(params=WORLDS)
def world(request):
    """`(run, world_size)`: every kind of transport, from 1 rank up."""
    kind, size = request.param
    cluster = None
    if kind not in (*IN_PROCESS, *PLAYED):
        cluster = request.getfixturevalue("cluster" if size <= LARGE else "wide")
    return lambda body, size, *args: run(kind, cluster, body, size, *args), size


def test_all_gather_fills_every_segment(world):
    run, size = world
    cases = cases_for(size, EVERY_DTYPE)
    for result in run(gather_everything, size, cases):
        for got, case in zip(result, cases, strict=True):
            assert_equal_bits(got, tensor_of(99, case.numel, case.dtype))


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.sample(2)
def test_reduce_scatter_adds_in_ring_order(world, divide):
    run, size = world
    divisor = size if divide else 1
    cases = cases_for(size, FLOATS if divide else FLOATS + INTEGERS)
    results = run(reduce_everything, size, cases, divisor)
    for i, case in enumerate(cases):
        total = ring_sum(size, case, divisor)
        for result, (start, stop) in zip(results, case.bounds(size), strict=True):
            assert_equal_bits(result[i], total[start:stop])


@pytest.mark.parametrize("divisor", [1, 3])
@pytest.mark.sample(2)
def test_a_narrow_sum_is_finished_in_fp32(world, divisor):
    run, size = world
    cases = cases_for(size, NARROW)
    results = run(reduce_to_fp32, size, cases, divisor)
    for i, case in enumerate(cases):
        total = ring_sum(size, case, divisor, torch.float32)
        for result, (start, stop) in zip(results, case.bounds(size), strict=True):
            assert_equal_bits(result[i], total[start:stop])


def test_all_reduce_gives_every_rank_the_same_bits(world):
    run, size = world
    cases = cases_for(size, FLOATS)
    results = run(all_reduce_everything, size, cases, 3)
    for i, case in enumerate(cases):
        total = ring_sum(size, case, 3)
        for result in results:
            assert_equal_bits(result[i], total)


def test_broadcast_from_every_source(world):
    run, size = world
    cases = [case for case in cases_for(size, EVERY_DTYPE) if case.cuts is None]
    for result in run(broadcast_everything, size, cases):
        for i, (got, case) in enumerate(zip(result, cases, strict=True)):
            assert_equal_bits(got, tensor_of(i % size, case.numel, case.dtype))


def test_the_division_happens_once_after_the_sum():
    """Dividing each summand first would lose all of these: they are the smallest number there is."""
    tiny = 2.0**-149
    shards = run_local(lambda t: reduce_scatter(torch.full((4,), tiny), t, divisor=4), 4)
    for shard in shards:
        assert_equal_bits(shard, torch.full((1,), tiny))


def test_equal_cuts_and_none_are_the_same_operation():
    def body(transport):
        full = torch.full((6,), float(transport.rank))
        all_gather(full, transport, cuts=[0, 3, 6] if transport.rank == 0 else None)
        return full

    for full in run_local(body, 2):
        assert_equal_bits(full, torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]))


def test_reduction_of_one_rank_leaves_full_alone_when_out_is_given():
    full, out = torch.arange(4.0), torch.empty(4)
    reduce_scatter(full, local_world(1)[0], out=out, divisor=2)
    assert_equal_bits(out, torch.arange(4.0) / 2)
    assert_equal_bits(full, torch.arange(4.0))


@pytest.mark.parametrize("numel", [0, 1, 5, 8, 9, 64])
@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_segments_cover_the_buffer_in_order(numel, world_size):
    bounds = segment_bounds(numel, world_size)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(numel))
    assert len(bounds) == world_size
    assert max(stop - start for start, stop in bounds) == -(-numel // world_size)


def test_segments_lie_between_the_cuts():
    assert segment_bounds(9, 3, [0, 4, 4, 9]) == [(0, 4), (4, 4), (4, 9)]


@pytest.mark.parametrize(
    "cuts", [[0, 4, 8], [0, 2, 4, 6, 8], [0, 5, 3, 8], [1, 4, 6, 8], [0, 4, 6, 7], [0, -1, 6, 8], []]
)
def test_wrong_cuts_are_refused(cuts):
    full = torch.zeros(8)
    message = rf"cuts \[{', '.join(map(str, cuts))}\] are not 4 ascending offsets from 0 to 8"
    for call in (all_gather, reduce_scatter, all_reduce):
        with pytest.raises(LayoutError, match=message):
            call(full, local_world(3)[0], cuts=cuts)
    with pytest.raises(LayoutError, match=message):
        staging_numel(8, local_world(3)[0], full.dtype, cuts=cuts)


def test_wrong_cuts_are_refused_by_a_single_rank_too():
    for call in (all_gather, reduce_scatter, all_reduce):
        with pytest.raises(LayoutError, match="cuts"):
            call(torch.zeros(8), local_world(1)[0], cuts=[0, 7])


def test_staging_is_two_chunks_and_never_more_than_two_segments():
    four, two = local_world(4)[0], local_world(2)[0]
    assert staging_numel(1000, four, torch.float32, chunk_bytes=400) == 200
    assert staging_numel(1000, four, torch.float32, chunk_bytes=1 << 20) == 500
    assert staging_numel(0, four, torch.float32) == 0
    assert staging_numel(1000, two, torch.float32, cuts=[0, 300, 1000], chunk_bytes=1 << 20) == 1400
    assert staging_numel(1000, two, torch.float32, cuts=[0, 300, 1000], chunk_bytes=400) == 200


def test_staging_of_whole_steps_is_the_longest_segment():
    four, two = Batched(local_world(4)[0]), Batched(local_world(2)[0])
    assert staging_numel(1000, four, torch.float32, chunk_bytes=400) == 250
    assert staging_numel(1000, four, torch.float32) == 250
    assert staging_numel(1000, two, torch.float32, cuts=[0, 300, 1000]) == 700
    with pytest.raises(LayoutError, match="staging has 699 elements, expected at least 700"):
        reduce_scatter(torch.zeros(1000), Batched(local_world(2)[0]), cuts=[0, 300, 1000], staging=torch.zeros(699))


def refuses(match, call, full, **given):
    with pytest.raises(LayoutError, match=match):
        call(full, local_world(2)[0], **given)


def test_buffers_that_do_not_fit_are_refused_before_anything_is_sent():
    full = torch.zeros(8)
    refuses(r"1-D and contiguous, got shape \(2, 4\)", all_gather, full.view(2, 4))
    refuses(r"strides \(2,\)", all_gather, full[::2])
    refuses("out has 3 elements, expected exactly 4", reduce_scatter, full, out=torch.zeros(3))
    refuses(r"out is torch\.float64 on cpu, full is torch\.float32", reduce_scatter, full, out=torch.zeros(4).double())
    refuses(
        r"out is torch\.bfloat16 on cpu, full is torch\.float32", reduce_scatter, full, out=torch.zeros(4).bfloat16()
    )
    refuses("out is torch.float16", reduce_scatter, full.bfloat16(), out=torch.zeros(4).half())
    refuses("out is torch.float64", reduce_scatter, full.half(), out=torch.zeros(4).double())
    refuses("out is torch.float32", reduce_scatter, full.int(), out=torch.zeros(4))
    refuses("staging is torch.float32", reduce_scatter, full.bfloat16(), out=torch.zeros(4), staging=torch.zeros(8))
    refuses("staging has 7 elements, expected at least 8", reduce_scatter, full, staging=torch.zeros(7))
    refuses(r"torch\.bool cannot be summed", reduce_scatter, full.bool())
    refuses(r"torch\.float8_e4m3fn cannot be summed", all_reduce, full.to(torch.float8_e4m3fn))
    refuses(r"cannot divide a sum of torch\.float32 by 0", reduce_scatter, full, divisor=0)
    refuses("cannot divide", all_reduce, full.int(), divisor=2)
    refuses("no rank 2 in a world of 2", broadcast, full, source=2)


def test_an_absent_peer_is_named_with_the_operation():
    ranks = local_world(3, timeout=timedelta(milliseconds=50))
    with pytest.raises(CommError, match=r"unit 'blocks\.0' \(operation 17, 6 elements of torch\.float32\)"):
        all_gather(torch.zeros(6), ranks[1], operation=Operation("all-gather of unit 'blocks.0'", 17))
    with pytest.raises(CommError, match="rank 1 receiving from rank 0"):
        reduce_scatter(torch.zeros(6), ranks[1])


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (("unit 'a'", 1, 6), ("unit 'b'", 1, 6)),
        (("unit 'a'", 1, 6), ("unit 'a'", 2, 6)),
        (("a", 1, 6), ("a", 1, 8)),
        (("a", 1, 6, [0, 3, 6]), ("a", 1, 6, [0, 2, 6])),
    ],
    ids=["another label", "another sequence", "another size", "other cuts"],
)
def test_ranks_that_do_different_operations_never_mix_data(mine, theirs):
    def body(transport):
        label, sequence, numel, *cuts = mine if transport.rank == 0 else theirs
        full = torch.full((numel,), float(transport.rank))
        given = {"operation": Operation(label, sequence), "cuts": cuts[0] if cuts else None}
        with pytest.raises(CommError) as error:
            all_gather(full, transport, chunk_bytes=4, **given)  # one element per message: all messages look alike
        return full.unique().tolist(), str(error.value)

    for rank, (values, message) in enumerate(run_local(body, 2, timeout=timedelta(milliseconds=50))):
        assert values == [float(rank)]
        assert (mine if rank == 0 else theirs)[0] in message
