"""A backward gathers blocks ahead also if they are recomputed. `test_stream_races.py` finds races of such gathers."""

from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.comm.streams import programs
from tests.comm.streams.programs import WIDTH, WORLD_SIZE, Block, Training
from tests.comm.streams.simulated_gpu import Gpu


class Recomputed(nn.Module):
    """Blocks that are each checkpointed from outside, so that a unit's forward runs again in the backward."""

    def __init__(self, depth=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_blocks_that_are_recomputed_are_gathered_ahead():
    """A block's buffer becomes idle when the recomputation of the block before begins."""
    with Gpu(lag=3).ranks(WORLD_SIZE), mock.patch.object(programs, "net", return_value=Recomputed()):
        training = Training()
        training.step(4)
        training.model.trace.take()
        training.step()
        events = training.model.trace.take()
    gathers = [place for place, event in enumerate(events) if event.startswith("gather blocks")]
    assert len(gathers) == 4 + 2  # the last two blocks of the forward are still there
    waits = [events.index(events[place].replace("gather", "wait"), place) for place in gathers]
    assert all(wait > place + 1 for place, wait in zip(gathers, waits, strict=True)), events
