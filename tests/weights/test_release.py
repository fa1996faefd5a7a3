"""A unit is released after the last use of its weights, whatever is frozen, recomputed, shared or unused.

Every rank computes the same here, so the mean of the gradients is the gradient of one plain copy, to the bit. Without
prefetching, the number of buffers at once shows whether units are released in time.
"""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardlite import ShardLite
from tests.support.internals import units, users
from tests.support.models.small import run_all
from tests.support.twins.sharded import assert_gradients_equal, compare, gathers, most_buffers

DEPTH = 6
WIDTH = 24


class Block(nn.Module):
    """Residual, two matrices; with `rank`, the second is frozen and has a trainable low-rank addition (LoRA)."""

    def __init__(self, rank: int = 0, unused: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        if rank:
            self.requires_grad_(False)
            self.a = nn.Linear(2 * WIDTH, rank, bias=False)
            self.b = nn.Linear(rank, WIDTH, bias=False)
        if unused:
            self.spare = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        low_rank = self.b(self.a(h)) if hasattr(self, "a") else 0
        return x + self.down(h) + low_rank


class Deep(nn.Module):
    """Blocks in a row; `span` of them are checkpointed together."""

    def __init__(self, blocks: list[Block], *, span: int = 0, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.span = span
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not self.span:
            return self._run(x, 0, len(self.blocks))
        for start in range(0, len(self.blocks), self.span):
            stop = start + self.span
            x = checkpoint(self._run, x, start, stop, use_reentrant=self.reentrant)
        return x

    def _run(self, x: Tensor, start: int, stop: int) -> Tensor:
        return run_all(self.blocks[start:stop], x)


def blocks(count: int = DEPTH, **options: object) -> list[Block]:
    return [Block(**options) for _ in range(count)]


def batch() -> Tensor:
    # Reentrant checkpointing needs an input that requires a gradient.
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def square(model: nn.Module) -> Tensor:
    return model(batch()).square().mean()


def test_a_buffer_that_does_not_fit_is_freed_before_the_next_one_is_allocated(group):
    layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH))
    model = ShardLite(layers, units=nn.Linear, group=group, prefetch=0)
    for _ in range(2):
        square(model).backward()
    sizes = [unit.nbytes for unit in units(model)]
    assert model.ledger.peak()["gather buffers"] == max(sizes), sizes


def lora_body(group, span, reentrant):
    model, _ = compare(Deep(blocks(rank=2), span=span, reentrant=reentrant), square, group, prefetch=0)
    return most_buffers(model), gathers(model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("span", [1, 2, 3])
def test_lora_under_checkpointing_is_exact_and_holds_a_span(cluster, span, reentrant):
    """Trainable gradients are complete before the frozen weights were last used."""
    for buffers, _ in cluster.run(lora_body, 2, span, reentrant):
        assert buffers == span


def test_a_recomputed_block_is_released_before_the_next_is_gathered(group):
    """Its last handle is dropped inside a hook of the library, which defers the release."""
    model, _ = compare(Deep(blocks(), span=1), square, group, prefetch=0)
    assert most_buffers(model) == 1


def test_lora_alone_needs_one_buffer_and_two_gathers(cluster):
    for buffers, counts in cluster.run(lora_body, 2, 0, False):
        assert buffers == 1
        assert counts == {f"blocks.{i}": 2 for i in range(DEPTH - 1)} | {f"blocks.{DEPTH - 1}": 1}


def test_frozen_blocks_after_a_trainable_one_are_released(group):
    deep = Deep(blocks())
    for block in deep.blocks[1:]:
        block.requires_grad_(False)
    model, _ = compare(deep, square, group, prefetch=0)
    assert most_buffers(model) == 1
    assert [event for event in model.trace.take() if event.startswith("reduce")] == ["reduce blocks.0"]


def test_an_unused_parameter_does_not_hold_its_unit(group):
    model, _ = compare(Deep(blocks(unused=True)), square, group, prefetch=0)
    buffers, reductions = (
        most_buffers(model),
        [event.split()[1] for event in model.trace.take() if event.startswith("reduce")],
    )
    assert buffers == 1
    assert reductions == [f"blocks.{i}" for i in reversed(range(DEPTH))]  # at the end, in the fixed order


def preference_loss(model: nn.Module) -> Tensor:
    """Two forwards, one backward (DPO)."""
    return nn.functional.logsigmoid(model(batch()).sum() - model(2 * batch()).sum())


def test_two_forwards_and_one_backward_need_one_buffer(group):
    model, _ = compare(Deep(blocks()), preference_loss, group, prefetch=0)
    assert most_buffers(model) == 1
    assert all(count <= 4 for count in gathers(model).values())


def test_double_backward_is_exact_and_leaves_nothing_held(group):
    """A gradient penalty: the graph of the first backward holds handles, and is walked again."""
    deep = Deep(blocks(3))

    def penalised(model: nn.Module) -> Tensor:
        x = batch()
        loss = model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    model, _ = compare(deep, penalised, group, prefetch=0)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert most_buffers(model) <= 3
    assert not any(users(model))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_model_of_any_depth_runs_through_few_buffers(group, prefetch):
    model, twin = compare(Deep(blocks(20)), square, group, prefetch=prefetch)
    for _ in range(2):
        model.zero_grad()
        twin.zero_grad()
        square(twin).backward()
        square(model).backward()
        assert_gradients_equal(model, twin)
    assert most_buffers(model) == 1 + prefetch


class CallsBlocks(nn.Module):
    """Calls two blocks in this order, each under reentrant checkpointing."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks(2))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = checkpoint(self.blocks[place], x, use_reentrant=True)
        return x


def test_a_block_twice_under_reentrant_checkpointing_is_reduced_once(group):
    """Gradients of a block are complete twice in one backward."""
    model, _ = compare(CallsBlocks(0, 1, 0, 1), square, group)
    reductions = [event for event in model.trace.take() if event.startswith("reduce")]
    assert sorted(reductions) == ["reduce blocks.0", "reduce blocks.1"]


def test_two_losses_of_blocks_called_twice_under_reentrant_checkpointing(group):
    """Two forwards, two backwards, and a block that each calls twice."""
    plain = CallsBlocks(0, 0, 1, 1)
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group)
    for _ in range(2):
        losses = [(square(model), square(twin)) for _ in range(2)]
        for ours, theirs in losses:
            ours.backward()
            theirs.backward()
            assert_gradients_equal(model, twin)
            model.zero_grad()
            twin.zero_grad()


def test_nested_reentrant_backwards_reduce_each_unit_once(group):
    """Reentrant inside reentrant: three levels of backward."""
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # the inner one's first forward has none

    class Nested(Deep):
        def forward(self, x: Tensor) -> Tensor:
            def inner(x: Tensor) -> Tensor:
                return checkpoint(self._run, x, 1, 3, use_reentrant=True)

            def outer(x: Tensor) -> Tensor:
                return inner(self._run(x, 0, 1))

            return self._run(checkpoint(outer, x, use_reentrant=True), 3, 4)

    model, _ = compare(Nested(blocks(4)), square, group)
    reductions = [event for event in model.trace.take() if event.startswith("reduce")]
    assert sorted(reductions) == [f"reduce blocks.{i}" for i in range(4)]


def test_gradients_of_inputs_alone_reduce_nothing(group):
    model = ShardLite(Deep(blocks(3)), group=group)
    twin_input, x = batch(), batch()
    twin = Deep(blocks(3))
    twin.load_state_dict(model.full_state_dict())
    model.trace.take()
    (expected,) = torch.autograd.grad(twin(twin_input).square().mean(), twin_input)
    (got,) = torch.autograd.grad(model(x).square().mean(), x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert all(shard.grad is None for shard in model.parameters())
    assert not [event for event in model.trace.take() if event.startswith("reduce")]
    assert not any(users(model))
