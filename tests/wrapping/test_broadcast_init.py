"""Rank 0's values are broadcast in pieces, through a buffer of one piece."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from shardlite import Precision, ShardLite
from shardlite.comm.transport.shared_memory.rendezvous import rendezvous
from shardlite.wrapping import init

ROWS = 250  # of a parameter that is longer than a piece
PIECE = 4 * 1024  # bytes per rank
SPLIT = Precision(compute=torch.bfloat16, master="split24")

assert_equal = partial(assert_close, rtol=0, atol=0)


class Mixed(nn.Module):
    """Parameters that lie in one piece, end in the next, go through several, are strided, or have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.randn(5, 7))
        self.long = nn.Parameter(torch.randn(ROWS, 33))
        self.scalar = nn.Parameter(torch.randn(()))
        self.strided = nn.Parameter(torch.randn(33, ROWS).t())
        self.none = nn.Parameter(torch.randn(0, 3))
        self.frozen = nn.Parameter(torch.randn(ROWS, 3), requires_grad=False)


def states(group, stage, precision):
    """Wrap a model, and load another one's values. Return both states on rank 0, and the peaks of memory."""
    torch.manual_seed(0)
    models = [Mixed(), Mixed()]
    wanted = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    if group.rank() != 0:
        for param in models[0].parameters():
            param.data.fill_(float("nan"))
    heap = rendezvous(group).neighbours.heap
    heap.trim()  # forget what was used before
    others = heap.live  # models of earlier tests that are not collected yet
    model = ShardLite(models[0], stage=stage, group=group, precision=precision)
    peaks = model.ledger.peak()["staging"], heap._most - others  # copies of messages are in the heap, too
    got = [model.full_state_dict(rank=0)]
    model.load_full_state_dict(wanted[1] if group.rank() == 0 else None)
    got.append(model.full_state_dict(rank=0))
    return wanted, got, peaks


@pytest.mark.parametrize("precision", [Precision(), SPLIT], ids=["fp32", "split24"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_values_travel_in_pieces(group, stage, precision):
    """Check what arrives, and the peaks of memory if values are sent in pieces, and if they are not."""
    wanted, whole, most = states(group, stage, precision)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "CHUNK_BYTES", PIECE // init._CHUNKS)
        _, pieces, most_in_pieces = states(group, stage, precision)
    for each, state, exact in zip(pieces, whole, wanted, strict=True):
        assert each.keys() == state.keys()
        for name in each:
            assert_equal(each[name], exact[name] if precision == Precision() else state[name])
    assert max(most_in_pieces) <= 2 * PIECE
    assert min(most) >= 4 * ROWS * 66  # the long parameters alone
