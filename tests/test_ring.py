"""Ring collectives against a written-out model of their order, to the bit."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.testing import assert_close

from shardlite.errors import CommError, LayoutError
from shardlite.ring import Operation, all_gather, all_reduce, broadcast, reduce_scatter, segment_bounds, staging_numel
from shardlite.transport import local_world
from tests.cluster import run_local

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int32, torch.int64, torch.uint8]
EVERY_DTYPE = [*FLOATS, *INTEGERS, torch.bool]
SMALL_CHUNK = 96  # bytes: a segment of the tests below travels in many messages
WORLDS = [("threads", n) for n in range(1, 9)] + [("gloo", n) for n in range(1, 5)]


@pytest.fixture(params=WORLDS, ids=lambda world: f"{world[0]}{world[1]}")
def world(request):
    """`(run, world_size)`: in-process ranks from 1 to 8, and gloo ranks from 1 to 4."""
    kind, size = request.param
    run = run_local if kind == "threads" else request.getfixturevalue("cluster").run_transport
    return run, size


def sizes(world_size):
    return sorted({0, 1, world_size - 1, world_size, world_size + 1, 1000})


def tensor_of(rank, numel, dtype):
    """The buffer of one rank; any process can make any rank's."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (numel,), generator=generator).to(dtype)


def add(partial, own, divisor):
    """The arithmetic of a hop: fp32 for the low precisions, one rounding."""
    wide = torch.float32 if partial.dtype in (torch.bfloat16, torch.float16) else partial.dtype
    total = partial.to(wide) + own.to(wide)
    return (total / divisor if divisor != 1 else total).to(partial.dtype)


def ring_sum(world_size, numel, dtype, divisor):
    """The specification: segment `k` is summed in the order k+1, k+2, ..., k; the last addition divides."""
    ranks = [tensor_of(r, numel, dtype) for r in range(world_size)]
    total = torch.empty(numel, dtype=dtype)
    for k, (start, stop) in enumerate(segment_bounds(numel, world_size)):
        order = [(k + 1 + i) % world_size for i in range(world_size)]
        partial = ranks[order[0]][start:stop]
        for r in order[1:]:
            partial = add(partial, ranks[r][start:stop], divisor if r == k else 1)
        total[start:stop] = partial if world_size > 1 or divisor == 1 else partial / divisor
    return total


def assert_equal_bits(got, expected):
    assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# Bodies: they see only a transport, so each runs on threads and on gloo.


def gather_everything(transport, cases):
    results = []
    for i, (numel, dtype, chunk) in enumerate(cases):
        start, stop = segment_bounds(numel, transport.world_size)[transport.rank]
        full = torch.zeros(numel, dtype=dtype)
        full[start:stop] = tensor_of(99, numel, dtype)[start:stop]
        all_gather(full, transport, operation=Operation("gather", i), chunk_bytes=chunk)
        results.append(full)
    return results


def reduce_everything(transport, cases, divisor):
    results = []
    for i, (numel, dtype, chunk) in enumerate(cases):
        start, stop = segment_bounds(numel, transport.world_size)[transport.rank]
        staging = torch.empty(staging_numel(numel, transport.world_size, dtype, chunk_bytes=chunk), dtype=dtype)
        out = torch.empty(stop - start, dtype=dtype)
        given = {"divisor": divisor, "operation": Operation("reduce", i), "chunk_bytes": chunk}
        shard = reduce_scatter(tensor_of(transport.rank, numel, dtype), transport, out=out, staging=staging, **given)
        assert shard is out
        full = tensor_of(transport.rank, numel, dtype)
        in_place = reduce_scatter(full, transport, **given)
        assert_equal_bits(in_place, out)
        assert_equal_bits(full[start:stop], out)
        results.append(out)
    return results


def all_reduce_everything(transport, cases, divisor):
    results = []
    for i, (numel, dtype, chunk) in enumerate(cases):
        full = tensor_of(transport.rank, numel, dtype)
        all_reduce(full, transport, divisor=divisor, operation=Operation("sum", i), chunk_bytes=chunk)
        results.append(full)
    return results


def broadcast_everything(transport, cases):
    results = []
    for i, (numel, dtype, chunk) in enumerate(cases):
        full = tensor_of(transport.rank, numel, dtype)
        source = i % transport.world_size
        broadcast(full, transport, source=source, operation=Operation("broadcast", i), chunk_bytes=chunk)
        results.append(full)
    return results


def two_at_once(transport, numel, rounds):
    """Gathers in one thread and reductions in another, as a training step has them."""
    cases = [(numel + i, torch.float32, 1 << 12) for i in range(rounds)]
    with ThreadPoolExecutor(2) as pool:
        gathers = pool.submit(gather_everything, transport, cases)
        sums = pool.submit(reduce_everything, transport, cases, transport.world_size)
        return gathers.result(), sums.result()


def cases_for(world_size, dtypes):
    return [(n, dtype, chunk) for n in sizes(world_size) for dtype in dtypes for chunk in (SMALL_CHUNK, 1 << 20)]


def test_all_gather_fills_every_segment(world):
    run, size = world
    cases = cases_for(size, EVERY_DTYPE)
    for result in run(gather_everything, size, cases):
        for got, (numel, dtype, _) in zip(result, cases, strict=True):
            assert_equal_bits(got, tensor_of(99, numel, dtype))


@pytest.mark.parametrize("divide", [False, True])
def test_reduce_scatter_adds_in_ring_order(world, divide):
    run, size = world
    divisor = size if divide else 1
    cases = cases_for(size, FLOATS if divide else FLOATS + INTEGERS)
    for rank, result in enumerate(run(reduce_everything, size, cases, divisor)):
        for got, (numel, dtype, _) in zip(result, cases, strict=True):
            start, stop = segment_bounds(numel, size)[rank]
            assert_equal_bits(got, ring_sum(size, numel, dtype, divisor)[start:stop])


def test_all_reduce_gives_every_rank_the_same_bits(world):
    run, size = world
    cases = cases_for(size, FLOATS)
    for result in run(all_reduce_everything, size, cases, 3):
        for got, (numel, dtype, _) in zip(result, cases, strict=True):
            assert_equal_bits(got, ring_sum(size, numel, dtype, 3))


def test_broadcast_from_every_source(world):
    run, size = world
    cases = cases_for(size, EVERY_DTYPE)
    for result in run(broadcast_everything, size, cases):
        for i, (got, (numel, dtype, _)) in enumerate(zip(result, cases, strict=True)):
            assert_equal_bits(got, tensor_of(i % size, numel, dtype))


@pytest.mark.parametrize("kind", ["threads", "gloo"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_gather_and_a_reduction_at_the_same_time(request, kind, size):
    run = run_local if kind == "threads" else request.getfixturevalue("cluster").run_transport
    numel, rounds = 100_003, 5
    for rank, (gathers, sums) in enumerate(run(two_at_once, size, numel, rounds)):
        for i in range(rounds):
            assert_equal_bits(gathers[i], tensor_of(99, numel + i, torch.float32))
            start, stop = segment_bounds(numel + i, size)[rank]
            assert_equal_bits(sums[i], ring_sum(size, numel + i, torch.float32, size)[start:stop])


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_late_rank_changes_nothing(late):
    cases = [(1000, torch.float32, 256)]
    delays = [0.005 if r == late else 0.0 for r in range(3)]
    for rank, (got,) in enumerate(run_local(reduce_everything, 3, cases, 3, delays=delays)):
        start, stop = segment_bounds(1000, 3)[rank]
        assert_equal_bits(got, ring_sum(3, 1000, torch.float32, 3)[start:stop])
    for (got,) in run_local(gather_everything, 3, cases, delays=delays):
        assert_equal_bits(got, tensor_of(99, 1000, torch.float32))


def test_the_division_happens_once_after_the_sum():
    """Dividing each summand first would lose all of these: they are the smallest number there is."""
    tiny = 2.0**-149
    shards = run_local(lambda t: reduce_scatter(torch.full((4,), tiny), t, divisor=4), 4)
    for shard in shards:
        assert_equal_bits(shard, torch.full((1,), tiny))


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


def test_staging_is_two_chunks_and_never_more_than_two_segments():
    assert staging_numel(1000, 4, torch.float32, chunk_bytes=400) == 200
    assert staging_numel(1000, 4, torch.float32, chunk_bytes=1 << 20) == 500
    assert staging_numel(0, 4, torch.float32) == 0


def refuses(match, call, full, **given):
    with pytest.raises(LayoutError, match=match):
        call(full, local_world(2)[0], **given)


def test_buffers_that_do_not_fit_are_refused_before_anything_is_sent():
    full = torch.zeros(8)
    refuses(r"1-D and contiguous, got shape \(2, 4\)", all_gather, full.view(2, 4))
    refuses(r"strides \(2,\)", all_gather, full[::2])
    refuses("out has 3 elements, expected exactly 4", reduce_scatter, full, out=torch.zeros(3))
    refuses(r"out is torch\.float64 on cpu, full is torch\.float32", reduce_scatter, full, out=torch.zeros(4).double())
    refuses("staging has 7 elements, expected at least 8", reduce_scatter, full, staging=torch.zeros(7))
    refuses(r"torch\.bool cannot be summed", reduce_scatter, full.bool())
    refuses(r"torch\.float8_e4m3fn cannot be summed", all_reduce, full.to(torch.float8_e4m3fn))
    refuses(r"cannot divide a sum of torch\.float32 by 0", reduce_scatter, full, divisor=0)
    refuses("cannot divide", all_reduce, full.int(), divisor=2)
    refuses("no rank 2 in a world of 2", broadcast, full, source=2)


def test_an_absent_peer_is_named_with_the_operation():
    ranks = local_world(3, timeout=timedelta(milliseconds=50))
    with pytest.raises(
        CommError, match=r"all-gather of unit 'blocks\.0' \(operation 17, 6 elements of torch\.float32\)"
    ):
        all_gather(torch.zeros(6), ranks[1], operation=Operation("all-gather of unit 'blocks.0'", 17))
    with pytest.raises(CommError, match="rank 1 receiving from rank 0"):
        reduce_scatter(torch.zeros(6), ranks[1])


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [(("unit 'a'", 1, 6), ("unit 'b'", 1, 6)), (("unit 'a'", 1, 6), ("unit 'a'", 2, 6)), (("a", 1, 6), ("a", 1, 8))],
    ids=["another label", "another sequence", "another size"],
)
def test_ranks_that_do_different_operations_never_mix_data(mine, theirs):
    def body(transport):
        label, sequence, numel = mine if transport.rank == 0 else theirs
        full = torch.full((numel,), float(transport.rank))
        with pytest.raises(CommError) as error:
            all_gather(full, transport, operation=Operation(label, sequence))
        return full.unique().tolist(), str(error.value)

    for rank, (values, message) in enumerate(run_local(body, 2, timeout=timedelta(milliseconds=50))):
        assert values == [float(rank)]
        assert (mine if rank == 0 else theirs)[0] in message
