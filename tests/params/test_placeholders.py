"""Placeholders: reading a sharded parameter returns its values, or raises an error."""

import copy
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardlite import AdamW, LayoutError, ShardLite
from tests.support.models.residual import WIDTH, Block, Chain, net, square
from tests.support.twins.sharded import Turn, same_bits, same_states, take_step, trained

WORDS = 1000


class Methods(nn.Module):
    """Has methods beside its forward, and weights of its own that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, words: Tensor) -> Any:
        x = functional.one_hot(words % WIDTH, WIDTH).float()
        for block in self.blocks:
            x = block(x)
        return {"x": x, "scale": self.scale, "all": [self.blocks[0].inner.bias, None]}

    def loss(self, words: Tensor) -> Tensor:
        out = self(words)
        weight = self.blocks[1].inner.weight
        return (functional.linear(out["x"] * self.scale, weight) + self.blocks[0].inner.bias).square().mean()


def by_method(model: Any, turn: Turn) -> Tensor:
    whole = model if isinstance(model, ShardLite) else model.module
    return whole.loss(torch.randint(WORDS, (4, 3), generator=turn.generator()))


def by_outputs(model: Any, turn: Turn) -> Tensor:
    out = model(torch.randint(WORDS, (4, 3), generator=turn.generator()))
    return (out["x"] * out["scale"] + out["all"][0]).square().mean()


@pytest.mark.stages(0, 3)
@pytest.mark.parametrize("loss", [by_method, by_outputs])
def test_methods_and_outputs(group: Any, loss: Any, stage: int) -> None:
    trained(Methods, loss, group, stage=stage, units=Block)


def test_outside_of_a_pass_it_is_an_error(group: Any) -> None:
    model = ShardLite(nn.ModuleDict({"table": nn.Embedding(WORDS, WIDTH)}), group=group)
    assert "sharded" in repr(model.module.table.weight)
    assert model.module.table.weight.shape == (WORDS, WIDTH)
    for use in (lambda p: p.sum(), lambda p: p.T, lambda p: p.data, lambda p: nn.init.zeros_(p), lambda p: p * 2):
        with pytest.raises(LayoutError, match=r"parameter 'table\.weight' is sharded"):
            use(model.module.table.weight)


# ---- writes through `.data` of shards --------------------------------------------------------------------------------


def by_subtraction(params: list[nn.Parameter]) -> None:
    for param in params:
        param.data -= 0.1 * param.grad


def by_assignment(params: list[nn.Parameter]) -> None:
    for param in params:
        param.data = param.data - 0.1 * param.grad


def by_decay(params: list[nn.Parameter]) -> None:
    torch.optim.SGD(params, lr=0.1).step()
    for param in params:
        param.data.mul_(0.9)


def by_clipping(params: list[nn.Parameter]) -> None:
    torch.optim.SGD(params, lr=0.1).step()
    for param in params:
        param.data.clamp_(-0.05, 0.05)


@pytest.mark.stages(1, 3)
@pytest.mark.parametrize("step", [by_subtraction, by_assignment, by_decay, by_clipping])
@pytest.mark.sample(2)
def test_shards_may_be_written_through_data(group: Any, step: Any, stage: int) -> None:
    """Train, and evaluate with other weights for a while, as moving averages are used."""
    plain = net()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage)
    for _ in range(3):
        for each in (model, twin):
            each.zero_grad()
            square(each).backward()
            step(list(each.parameters()))
        same_bits("loss", square(model).detach(), square(twin).detach())
        losses = []
        for each in (model, twin):
            kept = [param.data.clone() for param in each.parameters()]
            for param in each.parameters():
                param.data.copy_(param.data * 0.5)
            with torch.no_grad():
                losses.append(square(each))
            for param, former in zip(each.parameters(), kept, strict=True):
                param.data.copy_(former)
            losses.append(square(each).detach())
        same_bits("averaged", losses[0], losses[2])
        same_bits("restored", losses[1], losses[3])


def shards_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def whole_by_name(model: ShardLite) -> dict[str, nn.Parameter]:
    return dict(model.module.named_parameters())


@pytest.mark.parametrize("of", [shards_by_name, whole_by_name])
@pytest.mark.stages(2, 3)
def test_former_data_keeps_its_values(group: Any, of: Any, stage: int) -> None:
    """Averages take the place of weights for a while, as a program does it that knows of no shards."""
    model = ShardLite(net(), group=group, stage=stage)
    with model.gathered() if of is whole_by_name else nullcontext():
        params = of(model)
        before = {name: param.detach().clone() for name, param in params.items()}
        kept = {name: param.data for name, param in params.items()}
        assert all(param.data.isfinite().all() for param in params.values())  # other `.data`, which are gone at once
        for param in params.values():
            param.data = torch.full_like(param.data, 0.25)
        assert all((param == 0.25).all() for param in params.values())
        same_states("kept", kept, before)
        other = nn.Parameter(torch.zeros_like(next(iter(params.values())).data))
        first = next(iter(params.values()))
        first.data, other.data = other.data, first.data
        assert (first == 0).all()
        assert (other == 0.25).all()
        for name, param in params.items():
            param.data = kept[name]
            same_bits(f"{name} restored", param.detach(), before[name])


@pytest.mark.parametrize("state", ["fp32", "int8"])
@pytest.mark.stages(0, 3)
def test_data_is_moved_and_put_back_between_steps(group: Any, state: str, stage: int) -> None:
    """Adversarial training moves weights, and puts copies back: the library itself has no views of `.data`."""
    plain = net()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage)
    pairs = [
        (each, AdamW(each.parameters(), lr=0.01, state=state if each is model else "fp32")) for each in (model, twin)
    ]
    for _ in range(3):
        losses = []
        for each, optimizer in pairs:
            square(each).backward()
            kept = [param.data.clone() for param in each.parameters()]
            for param in each.parameters():
                param.data.mul_(0.5)
            losses.append(square(each))
            losses[-1].backward()
            for param, former in zip(each.parameters(), kept, strict=True):
                param.data = former
            optimizer.step()
            optimizer.zero_grad()
        if state == "fp32":
            same_bits("moved", losses[0].detach(), losses[1].detach())


@pytest.mark.stages(0, 3)
def test_data_that_would_change_something_else_is_refused(group: Any, stage: int) -> None:
    plain = net()
    plain[1].inner.bias._no_weight_decay = True
    model = ShardLite(plain, group=group, stage=stage)
    assert [name for name, each in model.named_parameters() if hasattr(each, "_no_weight_decay")] == ["1.inner.bias"]
    shard = next(model.parameters())
    before = shard.detach().clone()
    with pytest.raises(LayoutError, match=r"data of shape \[7, 7, 7\], but the size of its shards is fixed: load"):
        shard.data = torch.zeros(7, 7, 7)
    row = shard.data[:1]
    with pytest.raises(LayoutError, match=r"view of its former `\.data`, or a graph that saved it, is alive"):
        shard.data = torch.zeros_like(before)
    assert torch.equal(shard.detach(), before)
    del row
    shard.data = torch.zeros_like(before)
    assert not shard.any()


# ---- TorchScript ----------------------------------------------------------------------------------------------------


def scripted(block: nn.Module, how: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(block) if how == "script" else torch.jit.trace(block, torch.randn(2, WIDTH))


def on_width(model: Any, turn: Turn) -> Tensor:
    with torch.jit.optimized_execution(False):  # or the second call adds in another order than the first
        return model(torch.randn(4, WIDTH, generator=turn.generator())).square().mean()


@pytest.mark.stages(2, 3)
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript(group: Any, how: str, stage: int) -> None:
    make = lambda: Chain((scripted(Block(), how) for _ in range(3)), first=nn.Linear(WIDTH, WIDTH))  # noqa: E731
    trained(make, on_width, group, stage=stage)


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_that_is_one_torchscript_module(group: Any, how: str, stage: int) -> None:
    """It would run with what its shards are replaced by."""
    if stage > 0:
        with pytest.raises(LayoutError, match=r"a TorchScript module does not run: script the model's blocks instead"):
            ShardLite(scripted(net(), how), group=group, stage=stage)
    else:
        trained(lambda: scripted(net(), how), on_width, group, stage=stage)
    trained(lambda: nn.Sequential(scripted(net(), how)), on_width, group, stage=stage)  # as the refusal says


# ---- what programs for one process do ------------------------------------------------------------------------------


class ConfiguresItself(nn.Sequential):
    """As nanoGPT: builds its optimizer, from its own parameters."""

    def configure_optimizers(self, kind: Any) -> tuple[torch.optim.Optimizer, int]:
        params = [p for p in self.parameters() if p.requires_grad]
        matrices = [p for p in params if p.dim() >= 2]
        others = [p for p in params if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return kind(groups, lr=0.01), sum(p.numel() for p in matrices)


@pytest.mark.stages(1, 3)
def test_a_model_may_build_its_optimizer(group: Any, stage: int) -> None:
    """Accumulate over two micro-batches, by the attribute of `DistributedDataParallel`."""
    plain = ConfiguresItself(*net())
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage)
    ours, numel = model.configure_optimizers(torch.optim.AdamW)
    theirs, all_of_them = twin.configure_optimizers(torch.optim.AdamW)
    assert numel == all_of_them
    assert model.numel() == sum(p.numel() for p in twin.parameters())
    if stage:  # at stage 0 the module's own parameters are whole
        own, _ = model.configure_optimizers(AdamW)
        assert {param for each in own.param_groups for param in each["params"]} == set(model.parameters())
    held = {param for each in ours.param_groups for param in each["params"]}
    assert held == set(model.parameters())
    for _ in range(3):
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            assert model.require_backward_grad_sync == (micro == 1)
            for each in (model, twin):
                each(torch.ones(2, WIDTH) * (micro + 1)).square().mean().backward()
            if micro == 0:
                assert all(param.grad is None for param in model.parameters())
        for each in (ours, theirs):
            take_step(each)
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])


# ---- gradients by way of the module's own parameters ----------------------------------------------------------------


def by_outer(model: ShardLite) -> None:
    nn.ModuleDict({"model": model}).zero_grad()


def by_module(model: ShardLite) -> None:
    model.module.zero_grad()


def to_zero(model: ShardLite) -> None:
    model.module.zero_grad(set_to_none=False)


def by_loop(model: ShardLite) -> None:
    for param in model.module.parameters():
        param.grad = None


@pytest.mark.stages(1, 3)
@pytest.mark.parametrize("drop", [by_outer, by_module, to_zero, by_loop])
@pytest.mark.sample(2)
def test_gradients_are_dropped(group: Any, drop: Any, stage: int) -> None:
    model = ShardLite(net(), group=group, stage=stage)
    with pytest.raises(LayoutError, match=r"assign the gradient to the shard"):  # nothing steps by it
        next(model.module.parameters()).grad = torch.zeros(WIDTH, WIDTH)
    for accumulated in (False, True):
        with model.no_sync() if accumulated else nullcontext():
            square(model).backward()
        assert all(param.grad is not None for param in model.module.parameters())
        drop(model)
        square(model).backward()
        once = [param.grad.clone() for param in model.parameters()]
        model.zero_grad()
        assert all(param.grad is None for param in model.module.parameters())
        square(model).backward()
        assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), once, strict=True))
        model.zero_grad()


# ---- functions of parameters ----------------------------------------------------------------------------------------


def adapted_loss(module: nn.Module, x: Tensor) -> Tensor:
    """Return the loss after a step on another one (MAML, Finn et al. 2017)."""
    params = dict(module.named_parameters())
    inner = torch.func.functional_call(module, params, (x,)).square().mean()
    grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    fast = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
    return torch.func.functional_call(module, fast, (x.flip(0),)).square().mean()


@pytest.mark.stages(0, 3)
def test_a_model_may_be_called_with_other_parameters(group: Any, stage: int) -> None:
    plain = net()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    x = torch.randn(4, WIDTH)
    for _ in range(3):
        losses = []
        for module, optimizer in zip((model.module, twin), optimizers, strict=True):
            with model.gathered() if stage == 3 and module is model.module else nullcontext():
                loss = adapted_loss(module, x)
            take_step(optimizer, loss)
            losses.append(loss.detach())
        same_bits("loss", *losses)


def test_shards_can_be_saved(group: Any, tmp_path: Path) -> None:
    """Shards are written and read as plain parameters, also after a read of their `.data`."""
    model = ShardLite(net(), group=group)
    shards = dict(model.named_parameters())
    kept = [shard.data for shard in shards.values()]
    file = f"{tmp_path}/{torch.distributed.get_rank()}"
    torch.save(shards, file)
    loaded = torch.load(file, weights_only=False)
    for name, before in zip(shards, kept, strict=True):
        assert type(loaded[name]) is nn.Parameter
        assert torch.equal(loaded[name], before)
