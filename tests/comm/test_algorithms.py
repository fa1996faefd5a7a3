"""Algorithms other than the ring add in the order of their schedules, over every transport."""

import pytest
import torch

from shardlite.comm import schedule
from shardlite.comm.collectives import staging_numel
from shardlite.comm.operation import Operation
from tests.support.transports.calls import reduce_scatter
from tests.support.transports.ring_cases import assert_equal_bits, cases_for, tensor_of
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
