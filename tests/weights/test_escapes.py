"""Code that keeps weights past their release outside saved tensors raises an error, or is right and reported.

It must never compute silently with another unit's weights or with placeholders.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from shardlite import EscapedViewWarning, ShardLite
from tests.support.internals import gatherer
from tests.support.models.residual import WIDTH, batch, square
from tests.support.twins.sharded import WIDE, assert_gradients_equal, compare


class Keeps(torch.autograd.Function):
    """x @ w.T, keeping what it needs of `w` as an attribute instead of by `save_for_backward`."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, view: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kept = w.t() if view else w
        ctx.view = view
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = ctx.saved_tensors
        w = ctx.kept.t() if ctx.view else ctx.kept
        return grad @ w, grad.t() @ x, None


class KeepingLayer(nn.Module):
    def __init__(self, view: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Keeps.apply(x, self.weight, self.view))


def keeping(view: bool) -> nn.Sequential:
    return nn.Sequential(*(KeepingLayer(view) for _ in range(4)))


def test_a_kept_view_is_right_and_reported_once(group):
    """A view kept as an attribute stays what it was: its buffer is given up, which is reported once."""
    with pytest.warns(EscapedViewWarning, match=r"unit '\d'") as caught:
        model, _ = compare(keeping(view=True), square, group, prefetch=0)
    assert len(caught) == 1
    assert len(gatherer(model).owners) == 0  # the backward is over


@pytest.mark.ranks(2, WIDE)
def test_a_kept_parameter_is_right(group):
    """The parameter itself, kept as an attribute, is gathered when the backward uses it."""
    compare(keeping(view=False), square, group, prefetch=0)


class ReturnsParameter(nn.Module):
    """Returns a view of its parameter, as learned queries do."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.query.expand(x.shape)


class Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsParameter() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        queries = [block(x) for block in self.blocks]
        return torch.stack([x * query for query in queries]).sum(0)


def test_a_block_that_returns_a_view_of_its_parameter_is_right(group):
    with pytest.warns(EscapedViewWarning, match="outlived"):
        compare(Queries(), square, group, prefetch=0)


class RawSave(nn.Module):
    """Multiplies by a raw weight between the calls of its layers, with hooks of its own innermost."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t, t._version), lambda p: _same_version(*p)):
            return x * self.weight


def _same_version(tensor: Tensor, version: int) -> Tensor:
    if tensor._version != version:
        raise RuntimeError("modified by an inplace operation")
    return tensor


def test_a_weight_saved_around_the_hooks_is_an_error(group):
    """A weight saved around our hooks has another version after its release: PyTorch's own check tells."""
    model = ShardLite(nn.Sequential(*(RawSave() for _ in range(4))), group=group, prefetch=0)
    loss = model(batch()).square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_ordinary_layers_give_no_false_alarm(group):
    """Nothing escapes from ordinary layers (a warning would be an error here)."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(self.norm(x), x, x, need_weights=False)[0]

    net = nn.Sequential(*(Attention() for _ in range(4)))
    twin = copy.deepcopy(net)
    model = ShardLite(net, group=group, prefetch=0)
    x = batch()[None]
    for _ in range(3):
        twin.zero_grad()
        model.zero_grad()
        twin(x).square().mean().backward()
        model(x).square().mean().backward()
        assert_gradients_equal(model, twin)
