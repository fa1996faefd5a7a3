"""The length of messages, which changes no bit."""

import pytest
import torch

from shardlite.comm.chunking import CHUNK_BYTES, cut_up
from shardlite.comm.collectives import staging_numel
from shardlite.comm.operation import Operation
from shardlite.comm.traffic import Tally
from tests.support.ranks.cluster import run_local
from tests.support.ranks.local_world import local_world
from tests.support.transports.calls import reduce_scatter

MIB = 1 << 20


def chunk(numel, dtype=torch.float32, **options):
    return cut_up(numel, dtype, local_world(4)[0], **{"cuts": None, **options}).chunk


def test_short_pieces_go_whole():
    assert chunk(4 * MIB) == CHUNK_BYTES // 4
    assert chunk(4 * MIB, chunk_bytes=12) == 3, "what was asked for"
    uneven = [0, 1 * MIB, 2 * MIB, 3 * MIB, 4 * MIB + 4]
    assert chunk(4 * MIB + 4, cuts=uneven) == CHUNK_BYTES // 4, "the longest, too"


def test_pieces_too_long_for_a_message_are_cut_evenly():
    numel = 4 * (5 * MIB // 2 + 32)  # of fp32, so each of four pieces is a bit over 10 MiB
    assert chunk(numel) == (numel // 4) // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("odd", [1, 3, 1001])
def test_no_message_is_left_over(dtype, odd):
    """Lengths in bytes need not be whole elements, nor whole blocks of statistics."""
    for grain in (1, 1024):
        pieces = CHUNK_BYTES + odd
        length = chunk(4 * pieces, dtype, grain=grain)
        assert length % grain == 0
        assert length * dtype.itemsize <= CHUNK_BYTES
        assert -(-pieces // length) <= -(-pieces * dtype.itemsize // CHUNK_BYTES)


def summed(transport, chunk_bytes):
    tally = Tally()
    full = torch.randn(3 * MIB, generator=torch.Generator().manual_seed(transport.rank))
    total = reduce_scatter(full, transport, operation=Operation(tally=tally), chunk_bytes=chunk_bytes)
    return total.clone(), tally.messages


def test_the_length_of_messages_changes_no_bit():
    plain, cut = run_local(summed, 3, None), run_local(summed, 3, 1 << 18)
    for (mine, few), (theirs, many) in zip(plain, cut, strict=True):
        assert torch.equal(mine, theirs)
        assert many > few == 2


def test_staging_has_room_for_two_messages():
    rank = local_world(4)[0]
    assert staging_numel(4 * MIB, rank, torch.float32) == 2 * MIB
    assert staging_numel(64 * MIB, rank, torch.float32) == 2 * CHUNK_BYTES // 4
