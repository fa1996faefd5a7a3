"""Misuse whose results would be lost silently raises an error with a remedy, or gives the right numbers."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardlite import AdamW, LayoutError, ShardLite
from tests.support.models.residual import WIDTH, Block, net, square
from tests.support.twins.sharded import assert_gradients_equal, compare, with_twin


def watch(module: nn.Module) -> None:
    """Look at weights after each forward, and at gradients, as `wandb.watch(module, log="all")` does."""

    def look(module: nn.Module, *_: object) -> None:
        for param in module.parameters():
            assert param.data.cpu().isfinite().all()

    module.register_forward_hook(look)
    for param in module.parameters():
        param.register_hook(lambda grad: None)


@pytest.mark.stages(0, 3)
def test_hooks_that_look_at_weights(group, stage):
    plain = net()
    model = ShardLite(plain, group=group, stage=stage)
    watch(plain)
    if stage == 3:
        with pytest.raises(LayoutError, match=r"hook of `model\.module` reads it.*call the ShardLite model instead"):
            square(plain)
    square(model).backward()


def test_weights_can_only_be_read_while_they_are_held(group):
    """Between uses a weight is a placeholder, whatever happens to lie in a buffer."""
    plain = net()
    model = ShardLite(plain, group=group)
    square(model)
    for name, param in plain.named_parameters():
        with pytest.raises(LayoutError, match=f"parameter '{name}' is sharded, so its values are not available"):
            param.isnan()
    state = Block().state_dict()
    with pytest.raises(LayoutError, match=r"use load_full_state_dict\(\) of the ShardLite model"):
        plain[2].load_state_dict(state)
    with model.gathered():
        plain[2].load_state_dict(state)
    full = model.full_state_dict()
    assert all(torch.equal(full[f"2.{name}"], value) for name, value in state.items())


def test_steps_by_hand_through_data(group):
    """`p.data -= ...` does not raise versions; gathers after a backward are fresh all the same."""
    model, twin = with_twin(net(), group)
    for each in (model, twin):
        for _ in range(3):
            each.zero_grad()
            square(each).backward()
            for param in each.parameters():
                param.data -= 0.1 * param.grad
    assert torch.equal(square(model), square(twin))


def repointed_body(group):
    model = ShardLite(net(), group=group)
    optimizer = AdamW(model.parameters())
    square(model).backward()
    first = next(model.parameters())
    nn.Parameter.data.__set__(first, first.detach().clone())  # as C++ code may do
    with pytest.raises(LayoutError, match=r"'0\.inner\.weight' was assigned other memory"):
        optimizer.step()
    with pytest.raises(LayoutError, match="was assigned other memory"):
        square(model)


def repointed_weight_body(group):
    plain = net()
    model = ShardLite(plain, group=group)
    with pytest.raises(LayoutError, match=r"parameter '1\.inner\.weight' is sharded"):
        plain[1].inner.weight.data = torch.zeros(WIDTH, WIDTH)
    plain = net()
    model = ShardLite(plain, group=group, stage=0)
    square(model)
    nn.Parameter.data.__set__(plain[1].inner.weight, torch.zeros(WIDTH, WIDTH))  # as C++ code may do
    with pytest.raises(LayoutError, match=r"memory of parameter '1\.inner\.weight' was replaced"):
        square(model)


def frozen_shard_body(group):
    model = ShardLite(net(), group=group)
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(LayoutError, match="was given a requires_grad that differs from the module's own parameter"):
        square(model)


def shard_hook_body(group):
    model = ShardLite(net(), group=group)
    next(model.parameters()).register_hook(lambda grad: grad.clamp(-1, 1))
    with pytest.raises(LayoutError, match="has a hook, which would never run"):
        square(model)


def written_body(group):
    """An embedding with a maximal norm rewrites its weight in every forward."""
    plain = nn.Sequential(nn.Embedding(9, WIDTH, max_norm=0.01), Block(), Block())
    with pytest.raises(LayoutError, match=r"'0' has max_norm=0\.01: its forward would scale only the rows"):
        ShardLite(plain, group=group)


def wrapped_by_ddp_body(group):
    model = ShardLite(nn.Linear(9, 9), group=group)
    with pytest.raises(LayoutError, match="would overwrite the shards of all ranks with the first"):
        DistributedDataParallel(model, process_group=group)


def inner_copied_body(group):
    """Where there is nothing that refuses to be copied, the copy does not run."""
    models = [ShardLite(nn.Sequential(nn.Linear(9, 9)), group=group, stage=stage) for stage in (0, 3)]
    duplicate = copy.deepcopy(models[0].module)
    with pytest.raises(LayoutError, match="this module is a copy of a wrapped one"):
        duplicate(torch.ones(2, 9))
    with pytest.raises(LayoutError, match="wrap a second instance"):
        copy.deepcopy(models[1].module)


def wrapped_twice_body(group):
    encoder = Block()
    first = ShardLite(nn.Sequential(encoder, Block()), group=group)
    with pytest.raises(LayoutError, match="belongs or belonged to another wrapped model"):
        ShardLite(nn.Sequential(encoder, Block()), group=group)
    inner = first.module
    del first
    with pytest.raises(LayoutError, match="belongs or belonged to another wrapped model"):
        ShardLite(inner, group=group)


def lazy_body(group):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules are said to be under development
        lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    with pytest.raises(LayoutError, match="has no shape yet"):
        ShardLite(lazy, group=group)


def inference_body(group):
    with torch.inference_mode(), pytest.raises(LayoutError, match=r"outside of torch\.inference_mode"):
        ShardLite(net(), group=group)


@pytest.mark.parametrize(
    "body",
    [
        repointed_body,
        repointed_weight_body,
        frozen_shard_body,
        shard_hook_body,
        written_body,
        wrapped_by_ddp_body,
        inner_copied_body,
        wrapped_twice_body,
        lazy_body,
        inference_body,
    ],
)
def test_what_would_be_lost_is_an_error(group, body):
    body(group)


def test_layers_of_an_entered_unit_under_reentrant_checkpointing(group):
    """Layers of the root, each under reentrant checkpointing, one of them three times."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.second = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.first, self.second, self.first, self.first):
                x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
            return x

    model, twin = with_twin(Root(), group, units=lambda name, module: False)
    for _ in range(2):
        square(model).backward()
        square(twin).backward()
        assert_gradients_equal(model, twin)
        model.zero_grad()
        twin.zero_grad()


def test_frozen_integer_weights(group):
    """Frozen integer weights travel with the others, and an optimizer on all parameters leaves them alone."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-8, 8, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
            self.kept = nn.Parameter(torch.randn(WIDTH, WIDTH) > 0, requires_grad=False)  # cannot be summed
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ (self.weight.float() * self.kept * self.scale))

    model, _ = compare(nn.Sequential(Quantised(), Quantised()), square, group)
    optimizer = AdamW(model.parameters())
    optimizer.step()
    assert {shard.dtype for shard in optimizer.state} == {torch.float32}
