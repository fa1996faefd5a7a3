"""Parameters that every rank keeps whole, with averaged gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardlite
from shardlite import EMA, AdamW, LayoutError, NonFiniteWarning, Precision, Route, ShardLite, WholeParameters
from shardlite.params import ShardTensor
from tests.support.internals import units
from tests.support.twins.plain import PaddedAdamW, Twin
from tests.support.twins.sharded import same_bits, same_states, slow

WIDTH = 20
BF16 = Precision(compute=torch.bfloat16)
SPLIT = Precision(compute=torch.bfloat16, master="split24")


class Block(nn.Module):
    """A block with a router, whose weight is also read outside of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        return x + sum(gates[:, i : i + 1] * torch.tanh(expert(x)) for i, expert in enumerate(self.experts))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net() -> Routed:
    torch.manual_seed(7)
    return Routed()


def routers(module: Routed) -> list[nn.Module | nn.Parameter]:
    return [*(block.router for block in module.blocks), module.norm.weight]


def wrapped(group: Any, stage: int = 3, units: Any = Block, **options: Any) -> ShardLite:
    module = net()
    return ShardLite(module, stage=stage, group=group, units=units, replicate=routers(module), **options)


def loss(module: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    x = x if isinstance(module, ShardLite) else x.to(next(module.parameters()).dtype)
    return module(x).float().square().mean()


def train(model: ShardLite, optimizer: Any, steps: range = range(2)) -> None:
    for step in steps:
        loss(model, step, dist.get_rank()).backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("group", "stage"), [(2, 3), (2, 2), slow(2, 1), slow(2, 0), slow(1, 3)], indirect=["group"])
def test_the_twins_bits(group: Any, stage: int, precision: Precision) -> None:
    """Gradients and weights have the bits of an unsharded run. Norms differ only in rounding."""
    model = wrapped(group, stage, precision=precision)
    twin = Twin(net(), dist.get_world_size(group), units=Block, precision=precision)
    ours = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    theirs = PaddedAdamW(list(twin.masters.values()), lr=0.01, weight_decay=0.1)
    same_states("initial", model.full_state_dict(), twin.masters)
    for step in range(3):
        if step == 1:
            with model.no_sync():
                loss(model, 50, dist.get_rank()).backward()
        loss(model, step, dist.get_rank()).backward()
        turns = [50, 1] if step == 1 else [step]
        twin.backward(lambda plain, r, turns=turns: [loss(plain, each, r).backward() for each in turns])
        for name, master in twin.masters.items():
            same_bits(name, model.full_grad(name), master.grad)
        norm = torch.linalg.vector_norm(torch.stack([m.grad.norm() for m in twin.masters.values()]))
        torch.testing.assert_close(model.clip_grad_norm_(1e9), norm)  # a replicated gradient counts once
        torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 1e9), norm)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        same_states(f"step {step}", model.full_state_dict(), twin.masters)


@pytest.mark.parametrize("precision", [Precision(), BF16, SPLIT], ids=["fp32", "bf16", "split"])
@pytest.mark.parametrize("stage", [3, slow(2)])
def test_weights_can_be_used_at_any_time(group: Any, stage: int, precision: Precision) -> None:
    """Also by one rank alone, outside of the model's forward, and right after a step."""
    model = wrapped(group, stage, precision=precision)
    module = model.module
    optimizer = AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        if dist.get_rank() == 0:
            for i, block in enumerate(module.blocks):
                weight = model.get_parameter(f"blocks.{i}.router.weight") if precision.master != "split24" else None
                x = torch.ones(1, WIDTH, dtype=precision.compute)
                got = block.router(x)
                assert got.isfinite().all()
                if weight is not None:
                    same_bits(
                        "weight",
                        block.router.weight.detach(),
                        dict(model.named_parameters())[f"blocks.{i}.router.weight"]
                        .detach()
                        .to(precision.compute or torch.float32),
                    )
    whole = dict(model.named_parameters())["blocks.0.router.weight"]
    assert whole.shape == (2, WIDTH)
    if precision.master != "split24":
        assert not isinstance(model.state_dict()["blocks.0.router.weight"], ShardTensor)
    assert module.blocks[0].router.state_dict()["weight"].shape == (2, WIDTH)


@pytest.mark.parametrize("precision", [Precision(), BF16, SPLIT], ids=["fp32", "bf16", "split"])
def test_writes_of_the_program_are_kept(group: Any, precision: Precision) -> None:
    model = wrapped(group, precision=precision)
    router = model.module.blocks[1].router
    with torch.no_grad():
        router.weight.fill_(0.5)
        router.bias.data.fill_(0.25)
    loss(model, 0, 0)
    with model.gathered("blocks.1.router.bias", "head.bias"), torch.no_grad():
        model.module.head.bias.fill_(2.0)
    with model.gathered("blocks.2.router.bias", writeback=False), torch.no_grad():
        model.module.blocks[2].router.bias.fill_(8.0)
    state = model.full_state_dict()
    # Writes to the upper half of split weights keep the lower half, which is less than a rounding of the upper one.
    rtol = 2**-8 if precision.master == "split24" else 0
    for name, value in (("weight", 0.5), ("bias", 0.25)):
        got = state[f"blocks.1.router.{name}"]
        torch.testing.assert_close(got, torch.full_like(got, value), rtol=rtol, atol=0)
    assert (state["head.bias"] == 2.0).all()
    assert not (state["blocks.2.router.bias"] == 8.0).any()
    assert not (model.module.blocks[2].router.bias == 8.0).any()


@pytest.mark.parametrize("options", [{"state": "int8"}, {"in_backward": True}], ids=["int8", "in_backward"])
@pytest.mark.parametrize("stage", [3, slow(2)])
def test_other_steps(group: Any, stage: int, options: dict[str, Any]) -> None:
    """As without `replicate`."""
    states = []
    for model in (wrapped(group, stage), ShardLite(net(), stage=stage, group=group, units=Block)):
        optimizer = AdamW(model.parameters(), lr=0.01, **options)
        for step in range(3):
            loss(model, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.full_state_dict())
    same_states("weights", *states)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": lambda params: WholeParameters(params, optim.Adafactor, lr=0.01),
    "muon": lambda params: WholeParameters(params, optim.Muon, lr=0.01, elementwise={"lr": 0.01}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_other_optimizers(group: Any, kind: str) -> None:
    """Elementwise ones, and those that step full parameters on their owners."""
    states = []
    for model in (wrapped(group), ShardLite(net(), group=group, units=Block)):
        optimizer = OPTIMIZERS[kind](model.parameters())
        for step in range(3):
            loss(model, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.full_state_dict())
    same_states("weights", *states)


@pytest.mark.parametrize("stage", [3, slow(1)])
def test_not_a_number_on_one_rank_skips_the_step(group: Any, stage: int) -> None:
    model = wrapped(group, stage)
    optimizer = AdamW(model.parameters(), lr=0.01)
    before = model.full_state_dict()
    router = model.module.blocks[0].router
    router.weight.register_hook(lambda grad: grad * (torch.nan if dist.get_rank() else 1))
    loss(model, 0, 0).backward()
    with pytest.warns(NonFiniteWarning):
        optimizer.step()
    same_states("skipped", model.full_state_dict(), before)
    assert model.skipped_steps == 1


@pytest.mark.parametrize("precision", [Precision(), SPLIT], ids=["fp32", "split"])
def test_checkpoints_and_averages(group: Any, precision: Precision, tmp_path: Path) -> None:
    """A checkpoint of one placement loads into another."""
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    model = wrapped(group, precision=precision)
    optimizer = AdamW(model.parameters(), lr=0.01)
    ema = EMA(model, decay=0.5)
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        ema.update()
    shardlite.save(folder[0], model, optimizer)
    others = [wrapped(group, precision=precision), ShardLite(net(), group=group, units=Block, precision=precision)]
    others.append(ShardLite(net(), group=group, stage=0, precision=precision))
    for other in others:
        its = AdamW(other.parameters(), lr=0.01)
        shardlite.load(folder[0], other, its)
        same_states("loaded", other.full_state_dict(), model.full_state_dict())
        train(other, its, range(2, 4))
    twin = wrapped(group, precision=precision)
    twin.load_state_dict(model.state_dict())
    same_states("state dict", twin.full_state_dict(), model.full_state_dict())
    twin.load_full_state_dict(others[0].full_state_dict())
    same_states("full", dict(twin.full_parameters()), others[0].full_state_dict())
    train(model, optimizer, range(2, 4))
    for other in others:
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(other.full_state_dict()[name], value, msg=name)
    with ema.swapped():
        averaged = dict(model.full_parameters())
        local = model.module.blocks[0].router.weight.detach().float()
        torch.testing.assert_close(averaged["blocks.0.router.weight"], local, rtol=0.01, atol=0)
        assert not torch.equal(averaged["head.weight"], others[0].full_state_dict()["head.weight"])


@pytest.mark.ranks(4)
def test_hybrid_sharding(group: Any) -> None:
    states = []
    for make in (lambda: wrapped(init_device_mesh("cpu", (2, 2))), lambda: wrapped(None, stage=0)):
        model = make()
        train(model, optim.SGD(model.parameters(), lr=0.1), range(2))
        states.append(model.full_state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)


def test_all_ranks_have_the_same_copies(group: Any) -> None:
    """They start from rank 0's values, and stay equal, whichever ranks use them."""
    module = net()
    with torch.no_grad():
        for param in module.parameters():
            param.add_(dist.get_rank())
    model = ShardLite(module, group=group, replicate=routers(module))
    optimizer = AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        (loss(model, step, 0) + module.blocks[0].router(torch.ones(1, WIDTH)).sum() * dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for each in (*module.blocks[0].router.parameters(), module.norm.weight):
        copies = [torch.empty_like(each) for _ in range(2)]
        dist.all_gather(copies, each.detach().clone())
        same_bits("copies", *copies)
    assert "(replicated)" in model.unit_names
    assert model.unit_names == [unit.name for unit in units(model)]


def test_memory_and_traffic_by_formula(group: Any) -> None:
    """Each rank holds full weights and gradients; they are reduced, and never gathered."""
    model = wrapped(group)
    (flat,) = next(unit for unit in units(model) if unit.replicated).flats
    numel = flat.layout.full_numel
    assert flat.local.numel() == numel
    assert sum(shard.numel() for shard in flat.shards) == 3 * (2 * WIDTH + 2) + WIDTH
    loss(model, 0, 0).backward()
    sent = model.traffic()["(replicated)"]
    assert set(sent) == {"reduce"}
    assert sent["reduce"].nbytes == 2 * (numel // 2) * 4  # one half in each of reduce-scatter and all-gather


def test_what_cannot_be_replicated(group: Any) -> None:
    module = net()
    norm = module.norm
    for error, why, options in [
        (TypeError, "replicate must be a list of modules and parameters, got LayerNorm", {"replicate": norm}),
        (LayoutError, "replicate must contain modules and parameters only, got str", {"replicate": ["norm"]}),
        (LayoutError, "'norm.weight' is in `ignore` and in `replicate`", {"replicate": [norm], "ignore": [norm]}),
        (LayoutError, "that the model does not contain", {"replicate": [nn.Linear(2, 2)]}),
        (LayoutError, "no parameters to shard, because all are in `replicate`.*stage=0", {"replicate": [module]}),
    ]:
        with pytest.raises(error, match=why):
            ShardLite(module, group=group, **options)
    assert ShardLite(module, group=group, stage=0, replicate=[module]).unit_names == ["(replicated)"]


class Checkpointed(Routed):
    """Blocks are recomputed in the backward."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0 * self.norm.bias  # reentrant checkpoints need an input that requires a gradient
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stage", [3, slow(1)])
@pytest.mark.parametrize("shared", [True, False])
def test_checkpointed_blocks(group: Any, stage: int, reentrant: bool, shared: bool) -> None:
    """Gradients of a shared router arrive once for each reentrant checkpoint."""
    states = []
    for replicates in (True, False):
        torch.manual_seed(7)
        module = Checkpointed()
        module.reentrant = reentrant
        for block in module.blocks[1:] if shared else ():
            block.router = module.blocks[0].router
        replicate = routers(module) if replicates else ()
        model = ShardLite(module, stage=stage, group=group, units=Block, replicate=replicate)
        train(model, optim.SGD(model.parameters(), lr=0.1))
        states.append(model.full_state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)


@pytest.mark.parametrize("precision", [Precision(), BF16, SPLIT], ids=["fp32", "bf16", "split"])
@pytest.mark.parametrize("transport", ["auto", "p2p", "collectives"])
@pytest.mark.sample(3)
def test_from_the_meta_device_to_a_plain_module(group: Any, precision: Precision, transport: str) -> None:
    """Wrapping within a memory limit, training, and unwrapping."""
    with torch.device("meta"):
        module = net()
    torch.manual_seed(7)
    route = Route(transport=transport)
    model = ShardLite(
        module,
        group=group,
        device="cpu",
        replicate=routers(module),
        precision=precision,
        route=route,
        memory_limit=1 << 30,
    )
    initial = model.full_state_dict()
    if precision.master != "split24":
        same_states("initial", initial, {name: value.float() for name, value in net().state_dict().items()})
    train(model, AdamW(model.parameters(), lr=0.01))
    expected = model.full_state_dict()
    assert not torch.equal(expected["norm.weight"], initial["norm.weight"])
    same_states("streamed", dict(model.full_parameters()), expected)
    same_states("unwrapped", dict(model.unwrap().state_dict()), expected)
    assert type(module.norm.weight) is nn.Parameter
    fresh = net()
    with pytest.raises(LayoutError, match="memory_limit"):
        ShardLite(fresh, group=group, replicate=routers(fresh), memory_limit=1000)


def test_unused_and_frozen_ones(group: Any) -> None:
    """A parameter that one rank uses counts; one that no rank uses keeps `grad` None, and a frozen one its value."""
    module = net()
    extra = nn.Linear(WIDTH, WIDTH)
    module.extra, module.unused = extra, nn.Linear(2, 2)
    module.norm.weight.requires_grad_(False)
    model = ShardLite(module, group=group, replicate=[*routers(module), extra, module.unused])
    (loss(model, 0, 0) + extra(torch.ones(WIDTH)).sum() * (dist.get_rank() or 0)).backward()
    graded = {name for name, shard in model.named_parameters() if shard.grad is not None}
    assert "extra.weight" in graded
    assert not {"unused.weight", "norm.weight"} & graded
    torch.testing.assert_close(model.full_grad("extra.bias"), torch.full((WIDTH,), 0.5))
    assert model.full_grad("unused.bias") is None
    module.extra.requires_grad_(False)
    module.norm.weight.requires_grad_(True)
    model.zero_grad()
    loss(model, 0, 0).backward()
    graded = {name for name, shard in model.named_parameters() if shard.grad is not None}
    assert "norm.weight" in graded
    assert "extra.weight" not in graded


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_an_optimizer_from_before_wrapping_is_adopted(group: Any, kind: str) -> None:
    """Its states of replicated parameters stay whole."""
    make = AdamW if kind == "ours" else optim.AdamW
    states = []
    for replicates in (True, False):
        module = net()
        optimizer = make(module.parameters(), lr=0.01)
        loss(module, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        replicate = routers(module) if replicates else ()
        model = ShardLite(module, group=group, units=Block, replicate=replicate)
        model.adopt(optimizer)
        train(model, optimizer)
        states.append(model.full_state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)
