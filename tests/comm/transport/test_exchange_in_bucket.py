"""Reductions whose rows are exchanged inside the bucket: bits, calls, memory.

Many ranks are threads whose process group is played by messages. Real groups are in `test_group_collectives.py`.

Legend: `W` ranks, `D` staged elements.
"""

from unittest.mock import Mock, patch

import pytest
import torch
from shardlite_kernels import new_stats, stats

from shardlite.comm.chunking import cut_up
from shardlite.comm.collectives import staging_numel
from shardlite.comm.transport import base
from shardlite.comm.transport.group_collectives import GroupCollectives
from shardlite.comm.transport.messages import Message
from shardlite.comm.transport.staging import SLICE_NBYTES, rows_numel, staged_in_bucket
from shardlite.telemetry import Ledger
from tests.support.ranks.cluster import run_local
from tests.support.transports.calls import reduce_scatter
from tests.support.transports.ring_cases import Case, assert_equal_bits, reduce_everything, ring_sum, tensor_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32]
LLAMA_BLOCK = 218_112_000  # gradients of a block of Llama 3 8B, 872 MB in fp32
RANKS = [*range(2, 17), 19]


class PlayedGroup:
    """The exchanges of a process group, by messages between in-process ranks. It counts them."""

    def __init__(self, transport):
        self._transport = transport
        self.calls = 0

    def alltoall_base(self, received, sent, received_splits, sent_splits, options):
        ranks = self._transport.world_size
        splits = received_splits or [len(received) // ranks] * ranks, sent_splits or [len(sent) // ranks] * ranks
        assert [sum(each) for each in splits] == [len(received), len(sent)]
        self.alltoall(received.split(splits[0]), sent.split(splits[1]), options)

    def alltoall(self, received, sent, options):
        assert not options.asyncOp, "exchanges are on the current stream"
        assert len(received) == len(sent) == self._transport.world_size
        assert {each.dtype for each in (*received, *sent)} == {torch.uint8}, "not every backend has every dtype"
        assert all(each.is_contiguous() for each in (*received, *sent))
        self.calls += 1
        messages = [Message(each, peer, outgoing=False) for peer, each in enumerate(received)]
        messages += [Message(each, peer, outgoing=True) for peer, each in enumerate(sent)]
        self._transport.exchange([each for each in messages if each.tensor.numel()], tag=0).wait()


class InProcess(GroupCollectives):
    """Collectives of in-process ranks. Long reductions are those whose rows need more than `slice_nbytes`."""

    def __init__(self, transport):
        self.rank, self.world_size, self._group = transport.rank, transport.world_size, PlayedGroup(transport)
        self.slice_nbytes = SLICE_NBYTES
        self.holder = self._books = Ledger()


def short_of_memory(transport):
    """Return collectives for which every reduction is long."""
    made = InProcess(transport)
    made.slice_nbytes = 1
    return made


def reduced(made, case, divisor):
    """Return this rank's segment, reduced in its own place."""
    return reduce_scatter(tensor_of(made.rank, case.numel, case.dtype), made, divisor=divisor).clone()


def reduce_both_ways(transport, cases):
    """Reduce in the bucket and, for comparison, with a row of each rank in staging."""
    results = []
    for case in cases:
        made, other = short_of_memory(transport), InProcess(transport)
        results.append([reduced(each, case, divisor_of(case)) for each in (made, other)])
        assert made._group.calls == calls_of(made.world_size, -(-case.numel // made.world_size))
        assert other._group.calls == (made.world_size > 1)
    return results


def divisor_of(case):
    return 3 if case.dtype.is_floating_point else 1


@pytest.mark.parametrize("ranks", RANKS)
def test_the_bits_are_those_of_the_ring_and_of_staged_rows(ranks):
    """At every alignment: segments of an odd length, and of a multiple of 16."""
    lengths = {dtype: (99, 96) if i == ranks % 2 else (99,) for i, dtype in enumerate(DTYPES)}
    cases = [Case(ranks * length, dtype, 1 << 20) for dtype, some in lengths.items() for length in some]
    of_ranks = run_local(reduce_both_ways, ranks, cases)
    for i, case in enumerate(cases):
        expected = ring_sum(ranks, case, divisor_of(case))
        for way in range(2):
            assert_equal_bits(torch.cat([results[i][way] for results in of_ranks]), expected)


def reduce_with_statistics(transport, case, divisor):
    made = short_of_memory(transport)
    out = torch.empty(case.numel // made.world_size)
    found = new_stats(out)
    full = tensor_of(made.rank, case.numel, case.dtype)
    reduce_scatter(full, made, out=out, divisor=divisor, stats=found)
    return out, found, made._group.calls


@pytest.mark.parametrize("ranks", [2, 3, 4, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_in_fp32_and_its_statistics(ranks, dtype):
    case = Case(ranks * 5000, dtype, 1 << 20)
    expected = ring_sum(ranks, case, 3, torch.float32).view(ranks, -1)
    for (out, found, calls), mean in zip(run_local(reduce_with_statistics, ranks, case, 3), expected, strict=True):
        assert_equal_bits(out, mean)
        stats(out, again := new_stats(out))
        assert_equal_bits(found, again)
        assert calls == calls_of(ranks, 5000)


def count_a_reduction(transport, case):
    made = short_of_memory(transport)
    staging = torch.empty(staging_numel(case.numel, made, case.dtype), dtype=case.dtype)
    reduce_scatter(tensor_of(made.rank, case.numel, case.dtype), made, staging=staging)
    return made._group.calls, staging.numel()


@pytest.mark.parametrize("ranks", RANKS)
def test_calls_additions_and_staging(ranks):
    case = Case(ranks * 128, torch.float32, 1 << 20)
    by_rows, by_hop = (Mock(wraps=getattr(base, name)) for name in ("add_rows", "hop"))
    with patch.multiple(base, add_rows=by_rows, hop=by_hop):
        counted = run_local(count_a_reduction, ranks, case)
    expected = {2: (4, 32), 3: (4, 64), 4: (6, 64), 5: (8, 64), 9: (8, 128), 10: (5, 256), 16: (8, 256), 19: (6, 384)}
    if ranks in expected:
        assert counted == [expected[ranks]] * ranks
    assert counted[0] == (calls_of(ranks, 128), staged_in_bucket(128, ranks, 4, 1))
    assert calls_of(ranks, 128) <= 8
    assert (by_rows.call_count, by_hop.call_count) == (ranks, 0), "one addition"


def calls_of(ranks, segment):
    """Return the number of calls, each of which sends at most `D` elements of `W-1` segments, and of whole steps."""
    most = staged_in_bucket(segment, ranks, 1, 0)
    steps = max(most // segment, 1)
    return -(-(ranks - 1) // steps) * -(-segment // most)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9, 16, 64, 512])
@pytest.mark.parametrize("numel", [LLAMA_BLOCK, 2 * 128_256 * 4096], ids=["a block of Llama", "its embedding and head"])
def test_large_units_take_at_most_eight_calls_and_stage_an_eighth(ranks, numel):
    segment = numel // ranks
    staging = rows_numel(segment, ranks, 4)
    assert calls_of(ranks, segment) <= 8
    assert staging <= 1.15 * numel / 8
    if (ranks, numel) == (8, LLAMA_BLOCK):
        assert 4 * staging == 109_056_000


def test_short_reductions_take_one_call():
    """Their rows fit in staging."""
    segment = 30_740_000 // 8  # a block of GPT-2 XL, in fp32
    assert staged_in_bucket(segment, 8, 4) == 0
    assert rows_numel(segment, 8, 4) == 8 * segment
    assert rows_numel(segment, 2, 4) == segment


def reduce_as_a_tree(transport, case):
    made = short_of_memory(transport)  # so that slices are packed
    made.algorithm = "halving"
    return reduce_everything(made, [case], 1), made._staged_in_bucket(cut_up(case.numel, case.dtype, made), 4)


def test_a_tree_is_packed_in_slices():
    case = Case(4 * 333, torch.int32, 1 << 20)
    for k, ((found,), staged) in enumerate(run_local(reduce_as_a_tree, 4, case)):
        assert_equal_bits(found, ring_sum(4, case, 1)[333 * k : 333 * (k + 1)])
        assert staged == 0
