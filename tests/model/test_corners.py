"""Corner cases of autograd and `nn.Module`: a sharded model works, or refuses them.

Every rank computes the same here, so the mean of the gradients is the gradient of one plain copy, to the bit.
"""

import warnings

import pytest
import torch
from torch import Tensor, nn

from shardlite import LayoutError, ShardLite
from tests.support.models.residual import WIDTH, batch, net, square
from tests.support.twins.sharded import assert_gradients_equal, compare, with_twin


class SparseInput(nn.Module):
    """Saves a sparse tensor for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        adjacency = torch.eye(3).to_sparse()
        return torch.sparse.mm(adjacency, x) @ self.weight


def test_saved_sparse_tensors_pass_through(group):
    compare(nn.Sequential(SparseInput(), SparseInput()), square, group)


def test_inference_then_training(group):
    """Buffers that were gathered for inference serve training afterwards."""
    model, twin = with_twin(net(), group)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(model(batch()), twin(batch()), rtol=0, atol=0)
    square(model).backward()
    square(twin).backward()
    assert_gradients_equal(model, twin)


def test_buffers_come_from_rank_0_and_are_updated_in_place(group):
    """Running statistics are the module's own, and rank 0's at the start."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        model[1].running_mean += torch.distributed.get_rank(group)
    wrapped = ShardLite(model, group=group)
    assert not wrapped.full_state_dict()["1.running_mean"].any()
    square(wrapped).backward()
    assert dict(wrapped.named_buffers())["1.running_mean"].any()


def test_shards_are_not_in_the_graph(group):
    model = ShardLite(net(), group=group)
    with pytest.raises(LayoutError, match="shards are not in autograd's graph"):
        torch.autograd.grad(square(model), list(model.parameters()))


@pytest.mark.slow
def test_compiling_the_whole_model(group):
    """The whole model compiled: each unit breaks the graph, and a retained graph can be walked twice."""
    warnings.filterwarnings("ignore", r"The \.grad attribute")  # the compiler looks at it when it meets module hooks
    model, twin = with_twin(net(), group)
    compiled = torch.compile(model, backend="aot_eager")
    ours, theirs = square(compiled), square(twin)
    for _ in range(2):
        ours.backward(retain_graph=True)
        theirs.backward(retain_graph=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert_gradients_equal(model, twin)
