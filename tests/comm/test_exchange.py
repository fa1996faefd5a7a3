"""`exchange`: parcels of tensors go to the ranks that they name, over transports of messages and of batches."""

from datetime import timedelta

import pytest
import torch

from shardlite.comm.collectives import exchange
from shardlite.comm.operation import Operation
from shardlite.comm.traffic import Tally
from shardlite.comm.transport.batches import MOST_DISTANCES
from shardlite.comm.transport.gloo import GlooTransport
from shardlite.comm.transport.nccl import MOST_IN_BATCH
from tests.support.ranks.cluster import run_local
from tests.support.transports.worlds import Batched


def parcels_of(rank, world_size, owner):
    """Every other rank sends two tensors to `owner`, in which it is named. Return the parcel, and what arrives."""
    if rank != owner:
        sent = [torch.full((rank + 1,), 10.0 * rank + owner), torch.full((3,), rank, dtype=torch.int64)]
        return ([(each, owner) for each in sent], []), {}
    others = [each for each in range(world_size) if each != rank]
    memory = {each: (torch.zeros(each + 1), torch.zeros(3, dtype=torch.int64)) for each in others}
    return ([], [(tensor, each) for each in others for tensor in memory[each]]), memory


def exchanged(transport, batched):
    rank, size, tally = transport.rank, transport.world_size, Tally()
    made = [parcels_of(rank, size, owner) for owner in range(size)]
    used = Batched(transport) if batched else transport
    exchange([parcel for parcel, _ in made], used, 7, operation=Operation(tally=tally))
    for owner, (_, memory) in enumerate(made):
        for other, (first, second) in memory.items():
            assert first.tolist() == [10.0 * other + owner] * (other + 1)
            assert second.tolist() == [other] * 3
    assert tally.nbytes == (size - 1) * (4 * (rank + 1) + 24)
    return [len(step) for step in used.steps] if batched else []


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("batched", [False, True], ids=["messages", "batches"])
def test_tensors_arrive_where_they_are_sent(world_size, batched):
    run_local(exchanged, world_size, batched)


def test_a_batch_has_no_more_messages_than_nccl_supports():
    """A parcel has at most two tensors for each other rank, and a batch has the ranks of some distances."""
    assert 2 * MOST_DISTANCES <= MOST_IN_BATCH
    steps = run_local(exchanged, 5, True)
    assert max(length for each in steps for length in each) <= 2 * 4


def test_over_process_groups(group):
    exchanged(GlooTransport(group, timedelta(seconds=30)), False)
