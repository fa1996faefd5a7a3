"""The messages and bytes of each exchange of a ring collective, by formula."""

import pytest
import torch

from shardlite.comm.collectives import broadcast
from shardlite.comm.operation import Operation
from shardlite.comm.traffic import Tally
from tests.support.ranks.cluster import run_local
from tests.support.transports.calls import all_gather, all_reduce, reduce_scatter
from tests.support.transports.worlds import IN_PROCESS, Batched, run


def counts_by_step(transport):
    """`(receives, sends)` of each exchange."""
    return [(sum(not m.outgoing for m in step), sum(m.outgoing for m in step)) for step in transport.steps]


def exchanges(transport, call, **given):
    batched = Batched(transport)
    call(torch.zeros(12), batched, chunk_bytes=8, **given)
    return counts_by_step(batched)


@pytest.mark.parametrize("call", [all_gather, reduce_scatter])
def test_a_ring_step_is_one_exchange_of_whole_pieces(call):
    """Whatever the length of a message: nothing would be gained by cutting."""
    assert run_local(exchanges, 3, call) == [[(1, 1), (1, 1)]] * 3


def test_empty_segments_make_no_messages():
    assert run_local(lambda t: exchanges(t, all_gather, cuts=[0, 12, 12, 12]), 3) == [
        [(0, 1)],
        [(1, 0), (0, 1)],
        [(1, 0)],
    ]


def test_a_batched_broadcast_passes_a_chunk_on_while_the_next_one_comes():
    first, between, last = run_local(exchanges, 3, broadcast)
    assert first == [(0, 1)] * 6
    assert between == [(1, 0), *[(1, 1)] * 5, (0, 1)]
    assert last == [(1, 0)] * 6


# What a rank sends, by formula.


def tally_of(transport, call, cuts=None, numel=24):
    tally = Tally()
    kept = {"cuts": cuts} if cuts else {}
    call(torch.zeros(numel, dtype=torch.float64), transport, chunk_bytes=32, operation=Operation(tally=tally), **kept)
    return tally


def messages(numel, kind):
    """Of 32 bytes of fp64; in batches a piece is one message."""
    return -(-numel // 4) if kind == "threads" else int(numel > 0)


@pytest.mark.parametrize("kind", IN_PROCESS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_rank_sends_its_share_of_equal_segments(kind, size):
    share = (size - 1) * 24 * 8 // size
    for call, times in ((all_gather, 1), (reduce_scatter, 1), (all_reduce, 2)):
        expected = Tally(times * (size - 1) * messages(24 // size, kind), times * share)
        assert run(kind, None, tally_of, size, call) == [expected] * size


@pytest.mark.parametrize("kind", IN_PROCESS)
@pytest.mark.parametrize("cuts", [[0, 3, 3, 24], [0, 24, 24, 24], [0, 5, 14, 24]])
def test_a_rank_sends_all_segments_but_one(kind, cuts):
    """A gather leaves out the right neighbour's own segment, a reduction this rank's."""
    lengths = [cuts[k + 1] - cuts[k] for k in range(3)]
    in_messages = [messages(length, kind) for length in lengths]

    def all_but(k):
        return Tally(sum(in_messages) - in_messages[k], (24 - lengths[k]) * 8)

    gathered = [all_but((r + 1) % 3) for r in range(3)]
    reduced = [all_but(r) for r in range(3)]
    both = [Tally(g.messages + r.messages, g.nbytes + r.nbytes) for g, r in zip(gathered, reduced, strict=True)]
    for call, expected in ((all_gather, gathered), (reduce_scatter, reduced), (all_reduce, both)):
        assert run(kind, None, tally_of, 3, call, cuts) == expected


@pytest.mark.parametrize("kind", IN_PROCESS)
def test_every_rank_but_the_last_of_a_broadcast_sends_the_whole(kind):
    assert run(kind, None, tally_of, 3, broadcast) == [Tally(6, 192), Tally(6, 192), Tally()]
