"""How long messages are: by the model of links where they are known, and in any case without effect on a bit."""

import pytest
import torch

from shardlite.comm.chunking import CHUNK_BYTES, cut_up
from shardlite.comm.collectives import reduce_scatter, staging_numel
from shardlite.comm.cost_model import LINKS, LinkCost, best_chunk, plan_of
from shardlite.comm.operation import Operation
from shardlite.comm.traffic import Tally
from tests.support.ranks.cluster import run_local

MIB = 1 << 20
HIDES = LinkCost(alpha=0.0, beta=1e-9, gamma=1e-9, overhead=1e-6, overlaps=True)
"""Additions take as long as messages, and hide behind them if pieces are cut."""


class Known:
    """What a cut asks of a transport."""

    algorithm, node, lends, batched, rank = "ring", 1, False, False, 0

    def __init__(self, link, world_size=4):
        self.link = link
        self.world_size = world_size


def chunk(link, numel, dtype=torch.float32, *, cuts=None, chunk_bytes=None, grain=1):
    return cut_up("reduce-scatter", numel, dtype, Known(link), cuts, chunk_bytes, grain).chunk


def test_messages_are_as_long_as_the_model_says():
    best = best_chunk(plan_of("reduce-scatter", "ring", 4), 16 * MIB, HIDES, most=CHUNK_BYTES)
    assert best < 4 * MIB
    assert chunk(HIDES, 4 * MIB) == best // 4
    assert chunk(HIDES, 4 * MIB, chunk_bytes=12) == 3, "what was asked for"


@pytest.mark.parametrize("link", [None, *LINKS.values()])
def test_over_the_links_of_today_pieces_go_whole(link):
    assert chunk(link, 4 * MIB) == CHUNK_BYTES // 4
    uneven = [0, 1 * MIB, 2 * MIB, 3 * MIB, 4 * MIB + 4]
    assert chunk(link, 4 * MIB + 4, cuts=uneven) == CHUNK_BYTES // 4, "the longest, too"


def test_pieces_too_long_for_a_message_are_cut_evenly():
    numel = 4 * (5 * MIB // 2 + 32)  # of fp32, so each of four pieces is a bit over 10 MiB
    assert chunk(None, numel) == CHUNK_BYTES // 4
    assert chunk(LINKS["p2p"], numel) == (numel // 4) // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("odd", [1, 3, 1001])
def test_no_message_is_left_over(dtype, odd):
    """Lengths in bytes need not be whole elements, nor whole blocks of statistics."""
    for grain in (1, 1024):
        numel = 4 * (CHUNK_BYTES + odd)
        length = chunk(HIDES, numel, dtype, grain=grain)
        assert length % grain == 0
        assert length * dtype.itemsize <= CHUNK_BYTES
        pieces = -(-numel // 4)
        wanted = best_chunk(plan_of("reduce-scatter", "ring", 4), numel * dtype.itemsize, HIDES, most=CHUNK_BYTES)
        assert -(-pieces // length) <= -(-pieces * dtype.itemsize // wanted)


def summed(transport, link):
    transport.link = link
    tally = Tally()
    full = torch.randn(3 * MIB, generator=torch.Generator().manual_seed(transport.rank))
    return reduce_scatter(full, transport, operation=Operation(tally=tally)).clone(), tally.messages


def test_a_link_changes_messages_and_no_bit():
    plain, cut = run_local(summed, 3, None), run_local(summed, 3, HIDES)
    for (mine, few), (theirs, many) in zip(plain, cut, strict=True):
        assert torch.equal(mine, theirs)
        assert many > few == 2


def test_staging_has_room_for_the_messages_that_are_chosen():
    for link in (None, HIDES):
        known = Known(link)
        assert staging_numel(4 * MIB, known, torch.float32) == 2 * min(chunk(link, 4 * MIB), MIB)
