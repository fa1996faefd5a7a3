"""Ring collectives against a written-out model of their order, to the bit."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from random import Random
from typing import NamedTuple

import pytest
import torch
from torch.testing import assert_close

from shardlite import schedule
from shardlite.errors import CommError, LayoutError
from shardlite.ring import Operation, all_gather, all_reduce, broadcast, reduce_scatter, segment_bounds, staging_numel
from shardlite.transport import local_world
from shardlite.walk import BLOCK
from tests.cluster import run_local
from tests.delays import Delayed
from tests.worlds import IN_PROCESS, PLAYED, Batched, run

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int32, torch.int64, torch.uint8]
EVERY_DTYPE = [*FLOATS, *INTEGERS, torch.bool]
NARROW = [torch.bfloat16, torch.float16]
SMALL_CHUNK = 96  # bytes: a segment of the tests below travels in many messages
SIZES = {
    "threads": range(1, 9),
    "steps": range(1, 6),
    "gloo": range(1, 5),
    "shared": range(1, 5),
    "staged": [3],
    "batches": [2, 3],
    "symmetric": range(1, 5),
}
WORLDS = [(kind, size) for kind, sizes in SIZES.items() for size in sizes]


class Case(NamedTuple):
    """One buffer: its length, dtype and cuts, and the bytes per message."""

    numel: int
    dtype: torch.dtype
    chunk: int
    cuts: list[int] | None = None

    def bounds(self, world_size):
        if self.cuts is None:
            return segment_bounds(self.numel, world_size)
        return [(self.cuts[k], self.cuts[k + 1]) for k in range(world_size)]


@pytest.fixture(params=WORLDS, ids=lambda world: f"{world[0]}{world[1]}")
def world(request):
    """`(run, world_size)`: every kind of transport, from 1 rank up."""
    kind, size = request.param
    cluster = None if kind in (*IN_PROCESS, *PLAYED) else request.getfixturevalue("cluster")
    return lambda body, size, *args: run(kind, cluster, body, size, *args), size


def cases_for(world_size, dtypes):
    sizes = sorted({0, 1, world_size - 1, world_size, world_size + 1, 1000})
    chunks = SMALL_CHUNK, 1 << 20
    equal = [Case(n, dtype, chunk) for n in sizes for dtype in dtypes for chunk in chunks]
    ragged = [(cuts, dtype) for cuts in ragged_cuts(world_size) for dtype in dtypes[::2]]
    return equal + [Case(cuts[-1], dtype, chunk, cuts) for cuts, dtype in ragged for chunk in chunks]


def ragged_cuts(world_size):
    """Segments of any length: all in the first, all in the last, none at all, and a mixture with empty ones."""
    n = 203
    inner = sorted(Random(world_size).choices([0, 17, 17, 50, 120, n], k=world_size - 1))
    return [[0, *[n] * world_size], [*[0] * world_size, n], [0] * (world_size + 1), [0, *inner, n]]


def tensor_of(rank, numel, dtype):
    """The buffer of one rank; any process can make any rank's."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (numel,), generator=generator).to(dtype)


def add(partial, own, divisor, out):
    """The arithmetic of a hop: fp32 for the low precisions, one rounding to the dtype `out`."""
    wide = torch.float32 if partial.dtype in NARROW else partial.dtype
    total = partial.to(wide) + own.to(wide)
    return (total / divisor if divisor != 1 else total).to(out)


def ring_sum(world_size, case, divisor, out=None):
    """The specification: segment `k` is summed in the order k+1, k+2, ..., k; the last addition divides.

    Only that one rounds to the dtype `out`, if given.
    """
    ranks = [tensor_of(r, case.numel, case.dtype) for r in range(world_size)]
    total = torch.empty(case.numel, dtype=out or case.dtype)
    for k, (start, stop) in enumerate(case.bounds(world_size)):
        order = [(k + 1 + i) % world_size for i in range(world_size)]
        partial = ranks[order[0]][start:stop]
        for r in order[1:]:
            last = r == k
            partial = add(partial, ranks[r][start:stop], divisor if last else 1, total.dtype if last else case.dtype)
        alone = world_size == 1 and divisor != 1
        total[start:stop] = partial.to(total.dtype) / divisor if alone else partial
    return total


def assert_equal_bits(got, expected):
    assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# Bodies: they see only a transport, so each runs on every kind of it.


def gather_everything(transport, cases):
    results = []
    for i, case in enumerate(cases):
        start, stop = case.bounds(transport.world_size)[transport.rank]
        full = torch.zeros(case.numel, dtype=case.dtype)
        full[start:stop] = tensor_of(99, case.numel, case.dtype)[start:stop]
        all_gather(full, transport, cuts=case.cuts, operation=Operation("gather", i), chunk_bytes=case.chunk)
        results.append(full)
    return results


def reduce_everything(transport, cases, divisor):
    results = []
    for i, case in enumerate(cases):
        start, stop = case.bounds(transport.world_size)[transport.rank]
        cut = {"cuts": case.cuts, "chunk_bytes": case.chunk}
        needed = staging_numel(case.numel, transport, case.dtype, **cut)
        staging, out = (torch.empty(n, dtype=case.dtype) for n in (needed, stop - start))
        given = {"divisor": divisor, "operation": Operation("reduce", i), **cut}
        full = tensor_of(transport.rank, case.numel, case.dtype)
        # Without staging, equal segments are staged in `out`.
        assert reduce_scatter(full, transport, out=out, staging=None if i % 3 else staging, **given) is out
        full = tensor_of(transport.rank, case.numel, case.dtype)
        in_place = reduce_scatter(full, transport, **given)
        assert_equal_bits(in_place, out)
        assert_equal_bits(full[start:stop], out)
        results.append(out)
    return results


def reduce_to_fp32(transport, cases, divisor):
    results = []
    for i, case in enumerate(cases):
        start, stop = case.bounds(transport.world_size)[transport.rank]
        out = torch.empty(stop - start)
        full = tensor_of(transport.rank, case.numel, case.dtype)
        given = {"cuts": case.cuts, "operation": Operation("reduce", i), "chunk_bytes": case.chunk}
        results.append(reduce_scatter(full, transport, out=out, divisor=divisor, **given))
    return results


def all_reduce_everything(transport, cases, divisor):
    results = []
    for i, case in enumerate(cases):
        full = tensor_of(transport.rank, case.numel, case.dtype)
        given = {"cuts": case.cuts, "operation": Operation("sum", i), "chunk_bytes": case.chunk}
        all_reduce(full, transport, divisor=divisor, **given)
        results.append(full)
    return results


def broadcast_everything(transport, cases):
    results = []
    for i, case in enumerate(cases):
        full = tensor_of(transport.rank, case.numel, case.dtype)
        source = i % transport.world_size
        broadcast(full, transport, source=source, operation=Operation("broadcast", i), chunk_bytes=case.chunk)
        results.append(full)
    return results


def two_at_once(transport, cases, seed=0, longest=0.0):
    """Gathers in one thread and reductions in another, as a training step has them, with delays."""
    delayed = [Delayed(transport, seed + i, longest=longest) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        gathers = pool.submit(gather_everything, delayed[0], cases)
        sums = pool.submit(reduce_everything, delayed[1], cases, transport.world_size)
        return gathers.result(), sums.result()


def assert_gathered_and_summed(results, cases):
    size = len(results)
    for i, case in enumerate(cases):
        total = ring_sum(size, case, size)
        for (gathers, sums), (start, stop) in zip(results, case.bounds(size), strict=True):
            assert_equal_bits(gathers[i], tensor_of(99, case.numel, case.dtype))
            assert_equal_bits(sums[i], total[start:stop])


def test_all_gather_fills_every_segment(world):
    run, size = world
    cases = cases_for(size, EVERY_DTYPE)
    for result in run(gather_everything, size, cases):
        for got, case in zip(result, cases, strict=True):
            assert_equal_bits(got, tensor_of(99, case.numel, case.dtype))


@pytest.mark.parametrize("divide", [False, True])
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


@pytest.mark.parametrize("kind", ["threads", "steps", "gloo", "staged"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_gather_and_a_reduction_at_the_same_time(cluster, kind, size):
    cases = [Case(100_003 + i, torch.float32, 1 << 12) for i in range(5)]
    assert_gathered_and_summed(run(kind, cluster, two_at_once, size, cases), cases)


def test_large_buffers_with_random_delays(cluster):
    """Several MB in messages of 1 MB, each side late at random: small buffers fit into a socket and hide races."""
    n = 1_500_001
    cases = [Case(n, torch.float32, 1 << 20, cuts) for cuts in (None, [0, 400_000, 400_000, n], [0, 5, n, n])]
    assert_gathered_and_summed(run("gloo", cluster, two_at_once, 3, cases, 7, 0.02), cases)


@pytest.mark.parametrize("kind", IN_PROCESS)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_late_rank_changes_nothing(late, kind):
    cases = [Case(1000, torch.float32, 256)]

    def body(transport):
        given = transport if kind == "threads" else Batched(transport)
        return gather_everything(given, cases), reduce_everything(given, cases, 3)

    delays = [0.005 if r == late else 0.0 for r in range(3)]
    assert_gathered_and_summed(run_local(body, 3, delays=delays), cases)


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


def test_staging_of_whole_steps_is_the_longest_segment_in_whole_chunks():
    four, two = Batched(local_world(4)[0]), Batched(local_world(2)[0])
    assert staging_numel(1000, four, torch.float32, chunk_bytes=400) == 300
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
    with pytest.raises(
        CommError, match=r"all-gather of unit 'blocks\.0' \(operation 17, 6 elements of torch\.float32\)"
    ):
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


# Other algorithms: the order of additions that their schedules say, over every kind of transport.

BY_ALGORITHM = [
    *((algorithm, size, 1) for algorithm in ("direct", "bidirectional") for size in (1, 2, 3, 4)),
    *(("hierarchical", size, node) for size, node in ((4, 2), (4, 1), (3, 3), (4, 4))),
]


def sum_in_order(order, summands, wide):
    """The sum of rank numbers as `order_of_addition` nests them, rounded to the dtype of the wire at each addition."""
    if isinstance(order, int):
        return summands[order]
    first, second = (sum_in_order(each, summands, wide) for each in order)
    return (first.to(wide) + second.to(wide)).to(summands[0].dtype)


def reduce_by_algorithm(transport, cases, divisor):
    results = []
    for i, case in enumerate(cases):
        start, stop = case.bounds(transport.world_size)[transport.rank]
        cut = {"cuts": case.cuts, "chunk_bytes": case.chunk}
        out = torch.empty(stop - start, dtype=case.dtype)
        full = tensor_of(transport.rank, case.numel, case.dtype)
        staging = torch.empty(staging_numel(case.numel, transport, case.dtype, **cut), dtype=case.dtype)
        operation = Operation("reduce", i)
        reduce_scatter(full, transport, out=out, staging=staging, divisor=divisor, operation=operation, **cut)
        results.append(out)
    return results


@pytest.mark.parametrize("kind", ["threads", "steps", "gloo", "shared", "batches", "symmetric"])
@pytest.mark.parametrize(("algorithm", "size", "node"), BY_ALGORITHM)
def test_other_algorithms_add_in_the_order_of_their_schedule(cluster, kind, algorithm, size, node):
    cases = cases_for(size, [torch.float32, torch.bfloat16])
    results = run(kind, cluster, reduce_by_algorithm, size, cases, 1, algorithm=algorithm, node=node)
    plan = schedule.reduce_scatter(algorithm, size, node=node)
    for rank, shards in enumerate(results):
        for case, shard in zip(cases, shards, strict=True):
            start, stop = case.bounds(size)[rank]
            summands = [tensor_of(r, case.numel, case.dtype)[start:stop] for r in range(size)]
            half = -(-(stop - start) // plan.parts)
            for part in range(plan.parts):
                here = slice(min(part * half, stop - start), min((part + 1) * half, stop - start))
                order = schedule.order_of_addition(plan, rank, part)
                assert_equal_bits(shard[here], sum_in_order(order, [each[here] for each in summands], torch.float32))


@pytest.mark.parametrize("kind", ["threads", "steps", "gloo", "shared", "batches", "symmetric"])
@pytest.mark.parametrize(("algorithm", "size", "node"), BY_ALGORITHM)
def test_other_algorithms_gather_everything(cluster, kind, algorithm, size, node):
    cases = cases_for(size, [torch.float32, torch.bool])
    for results in run(kind, cluster, gather_everything, size, cases, algorithm=algorithm, node=node):
        for case, full in zip(cases, results, strict=True):
            assert_equal_bits(full, tensor_of(99, case.numel, case.dtype))


def reduce_large(transport, numel):
    """More than a block of a sum of several lent messages."""
    full = torch.randn(numel, generator=torch.Generator().manual_seed(transport.rank))
    return reduce_scatter(full, transport, divisor=transport.world_size).clone()


@pytest.mark.parametrize("size", [3, 4])
def test_the_order_of_the_ring_in_large_sums_of_lent_messages(cluster, size):
    numel = size * (2 * BLOCK + 77)
    direct = run("shared", cluster, reduce_large, size, numel)
    ring = run("shared", cluster, reduce_large, size, numel, algorithm="ring")
    for one, other in zip(direct, ring, strict=True):
        assert_equal_bits(one, other)
