"""Saved-tensor hooks: entered around everything that uses a weight, and not around the user's loss.

Every rank computes the same here, so the mean of the gradients is the gradient of one plain copy, to the bit.
"""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardlite import AdamW, ShardLite
from shardlite.weights.saved_tensors import Call, Calls, Handle
from tests.support.internals import users
from tests.support.models.residual import WIDTH, Block, Chain, batch
from tests.support.twins.sharded import assert_gradients_equal, compare


def on_a_thread(drop: Callable[[], None]) -> None:
    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()


def chain(kind: type[Block] = Block) -> Chain:
    return Chain((kind() for _ in range(3)), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))


def test_a_loss_on_a_weight_gathered_by_hand(group):
    """A loss on a weight that was gathered by hand, used outside any forward."""

    def loss(model: nn.Module) -> Tensor:
        if not isinstance(model, ShardLite):
            return model(batch()).square().mean() + (model.head.weight @ model.head.weight.T).square().mean()
        out = model(batch()).square().mean()
        with model.gathered("head.weight"):
            return out + (model.module.head.weight @ model.module.head.weight.T).square().mean()

    compare(chain(), loss, group)


def test_hooks_of_the_user_around_the_model_see_everything_but_weights(group):
    counts = []

    def loss(model: nn.Module) -> Tensor:
        seen = []

        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor)
            return tensor.clone()

        with saved_tensors_hooks(pack, lambda packed: packed):
            value = model(batch()).square().mean()
        counts.append(len(seen))
        return value

    compare(chain(), loss, group)
    weights = 2 + 3  # of the first layer, the head and each block
    plain, ours = counts
    assert ours == plain - weights


def test_hooks_inside_a_block_do_not_get_the_weights(group):
    """Hooks entered inside a block, around its layers: ours are innermost again at each layer."""
    copies: list[Tensor] = []

    class Offloads(Block):
        def forward(self, x: Tensor) -> Tensor:
            def pack(tensor: Tensor) -> Tensor:
                copies.append(tensor)
                return tensor.clone()

            with saved_tensors_hooks(pack, lambda packed: packed):
                return super().forward(x)

    def loss(model: nn.Module) -> Tensor:
        copies.clear()
        return model(batch()).square().mean()

    compare(chain(Offloads), loss, group)  # runs the plain model first
    shapes = [tuple(tensor.shape) for tensor in copies]
    assert (3, WIDTH) in shapes
    assert (WIDTH, WIDTH) not in shapes


class InPlace(nn.Module):
    """Modifies a tensor that sigmoid has saved for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        s = self.blocks[0](x).sigmoid()
        s.mul_(2.0)
        return self.blocks[1](s)


@pytest.mark.parametrize("stage", [0, 3])
def test_in_place_changes_of_saved_activations_are_errors(group, stage):
    model = ShardLite(InPlace(), group=group, stage=stage)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(batch()).sum().backward()


def test_saved_activations_do_not_leak(group):
    """Activations die with the graph, without the garbage collector: packing makes no cycles."""
    model = ShardLite(chain(), group=group)
    gc.collect()
    gc.disable()
    try:
        x = batch().exp()
        storage = weakref.ref(x.untyped_storage())
        out = model(x)
        del x
        assert storage() is not None
        del out
        assert storage() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_between_forward_and_backward_is_an_error(group, stage):
    net = chain()
    model = ShardLite(net, group=group, stage=stage)
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(batch()).sum().backward()
    loss = model(batch()).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    twin = chain()
    twin.load_state_dict(model.full_state_dict())
    twin(batch()).sum().backward()
    model(batch()).sum().backward()
    assert_gradients_equal(model, twin)


def test_a_retained_graph_can_be_used_again_until_a_step(group):
    net = chain()
    twin = copy.deepcopy(net)
    model = ShardLite(net, group=group, prefetch=0)
    ours, theirs = model(batch()).square().sum(), twin(batch()).square().sum()
    for _ in range(2):
        ours.backward(retain_graph=True)
        theirs.backward(retain_graph=True)
    assert_gradients_equal(model, twin)
    held = users(model)
    optimizer = AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ours.backward()
    assert not any(held)


@pytest.mark.parametrize("collect", [lambda drop: drop(), on_a_thread], ids=["inside of other code", "on a thread"])
def test_a_last_handle_that_is_garbage_is_released_later(collect):
    """The garbage collector runs on any thread, and inside of code that changes buffers."""
    unit, resharded = mock.Mock(users=1, nbytes=8, gathered_version=0), []
    unit.escaped.return_value = False
    calls = Calls(mock.Mock(reshard=resharded.append), [unit], on_use=lambda unit: None)
    call = Call(unit, calls)
    handles = [Handle(call, torch.ones(2)), Handle(call, torch.ones(2))]
    call.uses = True
    collect(handles.clear)
    assert (calls.live[unit], calls.lingering, resharded) == ([], [call], [])
    calls.settle()
    assert (calls.lingering, resharded) == ([], [unit])


def test_looking_into_the_graph_gives_values_and_holds_nothing(group):
    """The graph is read outside a backward."""
    net = chain()
    twin = copy.deepcopy(net)
    model = ShardLite(net, group=group)
    out, expected = model(batch()), twin(batch())
    got = out.grad_fn._saved_mat2 if hasattr(out.grad_fn, "_saved_mat2") else out.grad_fn._saved_weight
    want = expected.grad_fn._saved_mat2 if hasattr(expected.grad_fn, "_saved_mat2") else expected.grad_fn._saved_weight
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    out.sum().backward()
    expected.sum().backward()
    assert_gradients_equal(model, twin)
    assert not any(users(model))
