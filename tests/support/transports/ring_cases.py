"""Test cases of ring collectives: buffers of every shape, a written-out model of their order, and bodies.

A body sees only a transport, so each runs on every kind of it.
"""

from random import Random
from typing import NamedTuple

import torch
from torch.testing import assert_close

from shardlite.comm.chunking import segment_bounds
from shardlite.comm.collectives import broadcast, staging_numel
from shardlite.comm.operation import Operation
from tests.support.transports.calls import all_gather, all_reduce, reduce_scatter

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int32, torch.int64, torch.uint8]
EVERY_DTYPE = [*FLOATS, *INTEGERS, torch.bool]
NARROW = [torch.bfloat16, torch.float16]
SMALL_CHUNK = 200  # bytes: a segment of the tests below travels in many messages


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


# Bodies.


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


def assert_gathered_and_summed(results, cases):
    size = len(results)
    for i, case in enumerate(cases):
        total = ring_sum(size, case, size)
        for (gathers, sums), (start, stop) in zip(results, case.bounds(size), strict=True):
            assert_equal_bits(gathers[i], tensor_of(99, case.numel, case.dtype))
            assert_equal_bits(sums[i], total[start:stop])
