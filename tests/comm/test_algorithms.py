"""Algorithms other than the ring add in the order of their schedules, over every transport."""

import pytest
import torch

from shardlite.comm import schedule
from shardlite.comm.collectives import staging_numel
from shardlite.comm.operation import Operation
from shardlite.comm.transport.loans import BLOCK
from tests.support.transports.calls import reduce_scatter
from tests.support.transports.ring_cases import assert_equal_bits, cases_for, gather_everything, tensor_of
from tests.support.transports.worlds import run

BY_ALGORITHM = [
    *((algorithm, size, 1) for algorithm in ("direct", "bidirectional") for size in (1, 2, 3, 4)),
    *(("hierarchical", size, node) for size, node in ((4, 2), (4, 1), (3, 3), (4, 4))),
    *(("halving", size, 1) for size in (2, 4)),
]


KINDS = ["threads", "steps", "gloo", "shared", "batches"]


def everywhere(shift):
    """All algorithms over all kinds of transport. Fast tests take two kinds for each algorithm, by turns."""
    for place, case in enumerate(BY_ALGORITHM):
        fast = {KINDS[(place + shift + more) % len(KINDS)] for more in (0, 3)}
        for kind in KINDS:
            yield pytest.param(*case, kind, marks=() if kind in fast else pytest.mark.slow)


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


@pytest.mark.parametrize(("algorithm", "size", "node", "kind"), [*everywhere(0)])
@pytest.mark.sample(3)
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


@pytest.mark.parametrize(("algorithm", "size", "node", "kind"), [*everywhere(1)])
@pytest.mark.sample(3)
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
