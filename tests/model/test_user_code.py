"""User code inside a sharded model: module hooks, autograd functions, function transforms.

Each is beside plain data parallel, to the bit, or an error that says what to do.

Legend: `B` rows of a batch, `D` width.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from shardlite import EscapedViewWarning, LayoutError, ShardLite
from tests.support.models.residual import WIDTH, Block, net, on_rows, rows
from tests.support.models.small import run_all
from tests.support.twins.sharded import Pair, Turn, same_bits, trained

Model = Callable[..., Any]


# ---- hooks of modules ---------------------------------------------------------------------------------------------


class Scaled(Block):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


class Observed(nn.Module):
    """Notes by turn what its hooks see. [B, D] -> [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.turn: Turn | None = None
        self.notes: dict[Turn | None, list[tuple[str, Tensor]]] = defaultdict(list)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(run_all(self.blocks, x))

    def note(self, what: str, tensor: Tensor) -> None:
        self.notes[self.turn].append((what, tensor.detach().clone()))

    def reads(self, what: str, layer: nn.Linear) -> Callable[..., None]:
        """Return a hook that reads a weight."""
        return lambda *_: self.note(what, layer.weight)

    def observe(self) -> "Observed":
        """Add hooks to the model, to units, and to layers inside them, which read and change all that they can."""
        self.register_forward_hook(lambda _, inputs, y: self.note("model", y))
        for i, block in enumerate(self.blocks):
            block.register_forward_pre_hook(scale_by(1 + i / 4), with_kwargs=True)
            block.register_forward_hook(lambda _, args, kwargs, y: y + kwargs["scale"], with_kwargs=True)
            block.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,))
            block.register_full_backward_hook(lambda _, grads, __, i=i: self.note(f"gradient into {i}", grads[0]))
            block.register_forward_pre_hook(self.reads(f"weight of {i} before", block.inner))
            block.inner.register_forward_hook(self.reads(f"weight of {i} inside", block.inner))
            block.inner.register_forward_hook(lambda layer, inputs, y: y + layer.bias)
            block.inner.register_full_backward_hook(lambda _, grads, __: (grads[0] / 2,))
        self.head.register_forward_hook(triple_gradient)
        return self

    def observe_ends(self) -> "Observed":
        """Add hooks that read weights where units end."""
        for i, block in enumerate(self.blocks):
            block.register_forward_hook(self.reads(f"weight of {i} after", block.inner))
        return self


def scale_by(scale: float) -> Callable[..., Any]:
    return lambda _, args, kwargs: (args, kwargs | {"scale": scale})


def triple_gradient(_: nn.Module, __: Any, y: Tensor) -> None:
    y.register_hook(lambda slope: slope * 3)


def watched(model: Any, turn: Turn) -> Tensor:
    model.module.turn = turn
    return model(rows(turn).requires_grad_()).square().mean()


@pytest.mark.parametrize("before", [True, False], ids=["before-wrapping", "after-wrapping"])
@pytest.mark.ways((2, 3))
def test_forward_and_backward_hooks_of_modules(group: Any, before: bool, stage: int) -> None:
    """What hooks see and change is what they do in the twin, added before wrapping or after it.

    Where a unit ends, a hook that was added after wrapping comes too late to read its weights.
    """
    pair = Pair(lambda: Observed().observe().observe_ends() if before else Observed(), group, stage=stage)
    ours, theirs = pair.model.module, pair.twin.module
    if not before:
        ours.observe()
        theirs.observe()
    for step in range(2):
        pair.step(watched, clip=0.01)
        turn = Turn(step, pair.rank, 0)
        assert len(ours.notes[turn]) == len(theirs.notes[turn]) == 1 + 3 * (4 if before else 3)
        for (what, got), (what_there, expected) in zip(ours.notes[turn], theirs.notes[turn], strict=True):
            assert what == what_there
            same_bits(f"step {step}: {what}", got, expected)


@pytest.mark.ways((2, 3))
def test_global_hooks_and_hooks_that_stop_a_forward(group: Any, stage: int) -> None:
    """Hooks of every module of the process, and one that leaves the model by an exception."""
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, y: seen.append(type(module)))
    try:
        pair = trained(net, on_rows, group, stage=stage)
    finally:
        handle.remove()
    assert {Block, nn.Linear, ShardLite} <= set(seen)

    def stop(*_: Any) -> None:
        raise StopIteration

    handle = pair.model.module[1].inner.register_forward_hook(stop)
    with pytest.raises(StopIteration):
        pair.model(rows(Turn(0, 0, 0)))
    handle.remove()
    pair.step(on_rows)


# ---- autograd functions that keep weights themselves --------------------------------------------------------------


class KeepsTuple(torch.autograd.Function):
    """A product with a frozen matrix that is kept as an attribute of the context, as bitsandbytes' MatMul4Bit does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, b: Tensor) -> Tensor:
        ctx.tensors = (None, b)
        return x @ b

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None]:
        return grads @ ctx.tensors[1].t(), None


class Quantised(nn.Module):
    """A frozen matrix with a trained addition of low rank, which gives a view of the matrix to the function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4, requires_grad=False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(KeepsTuple.apply(x, self.weight.t()) + self.b(self.a(x)))


class Saves(torch.autograd.Function):
    """The same, by the book: it also saves a view, and something that it has made of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w.t(), w.sin())
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, Tensor]:
        x, transposed, sine = ctx.saved_tensors
        return grads @ transposed.t(), grads.t() @ x + 0 * sine


class Saving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Saves.apply(x, self.weight))


@pytest.mark.ways((4, 3), (2, 2))
def test_a_function_that_keeps_a_view_of_a_weight_is_right_and_reported(group: Any, stage: int) -> None:
    """Reported at stage 3, where it costs memory, and right at every stage."""
    with pytest.warns(EscapedViewWarning, match="outlived") if stage == 3 else nullcontext():
        trained(partial(net, 4, Quantised), on_rows, group, stage=stage)


@pytest.mark.ways((2, 3))
def test_a_function_that_saves_weights_for_backward(group: Any, stage: int) -> None:
    trained(partial(net, 4, Saving), on_rows, group, stage=stage)


# ---- function transforms ------------------------------------------------------------------------------------------


class ByRows(Block):
    """[B, D] -> [B, D]"""

    def forward(self, x: Tensor) -> Tensor:
        return x + vmap(lambda row: torch.tanh(functional.linear(row, self.inner.weight, self.inner.bias)))(x)


class CallsFunctionally(Block):
    """Calls its layer with the layer's own parameters, and a function of nothing but them."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(functional_call(self.inner, dict(self.inner.named_parameters()), (x,)))


class Adapts(Block):
    """Calls its layer with other tensors: its parameters after a step of their own (MAML, Finn et al. 2017)."""

    def forward(self, x: Tensor) -> Tensor:
        params = dict(self.inner.named_parameters())
        with torch.enable_grad():
            slopes = torch.autograd.grad(self.inner(x).square().mean(), list(params.values()), create_graph=True)
        adapted = {name: param - 0.1 * slope for (name, param), slope in zip(params.items(), slopes, strict=True)}
        return x + torch.tanh(functional_call(self.inner, adapted, (x,)))


class TakesSlopes(Block):
    """Differentiates its layer in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return vmap(grad(lambda row: torch.tanh(self.inner(row)).sum()))(x)


@pytest.mark.ways((2, 3))
def test_vmap_and_functional_call_inside_a_forward(group: Any, stage: int) -> None:
    for kind in (ByRows, CallsFunctionally, Adapts):
        trained(partial(net, 3, kind), on_rows, group, stage=stage)

    def around(model: Model, turn: Turn) -> Tensor:
        module = model.module
        return functional_call(module, dict(module.named_parameters()), (rows(turn),)).square().mean()

    trained(net, around, group, stage=stage)


@pytest.mark.ways((2, 3))
def test_functional_call_of_a_unit_with_other_tensors_is_an_error(group: Any, stage: int) -> None:
    """A unit that is called with other tensors would use those, and train nothing."""
    model = ShardLite(net(), group=group, stage=stage)
    x = rows(Turn(0, 0, 0))
    doubled = {name: 2 * shard for name, shard in model.named_parameters()}
    for module in (model, model.module):
        with pytest.raises(LayoutError, match="was replaced after wrapping"):
            functional_call(module, doubled, (x,))
    on_rows(model, Turn(0, 0, 0)).backward()
    assert all(shard.grad is not None for shard in model.parameters())


@pytest.mark.ways((2, 3))
def test_func_grad_inside_a_forward_works_below_stage_3(group: Any, stage: int) -> None:
    """PyTorch has no function transforms of differentiation under saved-tensor hooks (stage 3)."""
    if stage < 3:
        trained(partial(net, 3, TakesSlopes), on_rows, group, stage=stage)
        return
    model = ShardLite(net(3, TakesSlopes), group=group, stage=stage)
    with pytest.raises(LayoutError, match=r"inside `with model\.gathered\(\):`"):
        on_rows(model, Turn(0, 0, 0))


# ---- programs around the model --------------------------------------------------------------------------------------


class Yielding(nn.Module):
    """Has a method that yields. [B, D] -> [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale

    @torch.inference_mode()
    def stream(self, x: Tensor) -> Any:
        while True:
            x = self.forward(x)
            x = x + (yield x)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_method_that_yields_reads_weights(group, stage):
    plain, model = Yielding(), Yielding()
    model.load_state_dict(plain.state_dict())
    model, x = ShardLite(model, stage=stage, group=group), torch.ones(2, WIDTH)
    steps = [each.stream(x) for each in (plain, model)]
    for sent in (None, 1.0, 2.0):
        expected, got = [each.send(sent) for each in steps]
        assert torch.equal(got, expected) or group.rank() > 0  # the weights are rank 0's
    with pytest.raises(TypeError, match="Tensor"):  # raised in the body, at its `yield`
        steps[1].send("no tensor")
    model(x).sum().backward()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_hook_of_the_loss_may_run_forwards_and_backwards_of_parts(group, stage):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model = ShardLite(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), stage=stage, group=group)
    model.load_full_state_dict(plain.state_dict())
    parts = torch.randn(group.size(), 6, 4).split(2, dim=1)

    def backward_of(each: Any, x: list[Tensor]) -> None:
        """Embed without gradients, and let a hook of the loss embed again, as GradCache does."""
        with torch.no_grad():
            found = [each(part) for part in x]

        def again(scale: Tensor) -> None:
            with torch.enable_grad():
                for part, grad in zip(x, found, strict=True):
                    ((each(part) * grad).sum() * scale).backward()

        loss = torch.ones((), requires_grad=True)
        loss.register_hook(again)
        (loss * 2).backward()

    backward_of(model, [part[group.rank()] for part in parts])
    for rank in range(group.size()):
        backward_of(plain, [part[rank] for part in parts])
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.full_grad(name), param.grad / group.size())


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_from_before_wrapping_may_be_clipped(group, stage):
    torch.manual_seed(0)
    plain, module = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    params, expected = [*module.parameters()], [*plain.parameters()]
    model = ShardLite(module, stage=stage, group=group)
    model.load_full_state_dict(plain.state_dict())
    for each in (model, plain):
        each(torch.ones(2, WIDTH)).square().sum().backward()
    norms = [nn.utils.clip_grad_norm_(each, 0.1) for each in (params, expected)]
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(model.full_grad("weight"), plain.weight.grad)
    model.zero_grad()
    with pytest.raises(LayoutError, match="was given the unsharded parameter"):
        nn.utils.clip_grad_norm_(params, 0.1)
