"""`Precision(keep=...)`: kept modules have the bits of a plain model in which the same modules are cast by hand."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardlite
from shardlite import AdamW, LayoutError, MemoryLimit, Precision, ShardLite
from shardlite.cli.inspect_checkpoint import inspect
from shardlite.plan import Planner, Setting, Source
from shardlite.plan.budget import Recipe, budget_of
from shardlite.plan.timeline import plain_events, timeline_of
from shardlite.wrapping import Options, plan_units
from tests.support.internals import flats, units
from tests.support.models import hf
from tests.support.models.kept import Block, Declares, Net, Router, conv, images, rows
from tests.support.models.losses import BF16
from tests.support.twins.sharded import Pair, Turn, same_bits, same_states, some_stages

WIDE, NARROW = torch.float32, torch.bfloat16


def frozen_router() -> nn.Module:
    net = Net()
    net.blocks.get_submodule("0.router").requires_grad_(False)
    return net


def of_time(name: str, module: nn.Module) -> torch.dtype | None:
    """Compute in fp32 but for the blocks, and in fp32 again in their norms."""
    if isinstance(module, nn.LayerNorm):
        return WIDE
    return NARROW if isinstance(module, Block) else WIDE if name == "" else None


def is_router(_: str, module: nn.Module) -> bool:
    return isinstance(module, Router)


# ---- bits -----------------------------------------------------------------------------------------------------------

_LAYERS = {"inp": NARROW, "head": NARROW, **{f"blocks.{i}.{n}": NARROW for i in (0, 1) for n in ("body.0", "out")}}
_OTHERS = {f"blocks.{i}.{name}": NARROW for i in (0, 1) for name in ("body.1", "body.2")}
_NORMS = {f"blocks.{i}.norm": NARROW for i in (0, 1)}
_ROUTERS = {f"blocks.{i}.router": WIDE for i in (0, 1)}
_BLOCKS = {f"blocks.{i}": NARROW for i in (0, 1)}
ROUTED = {**_LAYERS, **_OTHERS, **_NORMS, **_BLOCKS, **_ROUTERS}
"""By name, the modules whose inputs are cast if the routers are kept."""

TIMED = {**ROUTED, "inp": WIDE, "head": WIDE, **dict.fromkeys(_NORMS, WIDE), **dict.fromkeys(_ROUTERS, NARROW)}
DECLARED = {**_LAYERS, **_OTHERS, **_NORMS, "blocks.0.out": WIDE, "blocks.1.out": WIDE}

CASES: Mapping[str, tuple[Callable[[], nn.Module], Any, Mapping[str, torch.dtype], tuple[str, ...]]] = {
    "a class": (Net, Router, ROUTED, ("router",)),
    "a name": (Net, ["router"], ROUTED, ("router",)),
    "a parameter's name": (Net, "gate", ROUTED, ("router",)),
    "a function": (Net, of_time, TIMED, ("inp", "head", "norm")),
    "called twice": (lambda: Net(again=True), Router, ROUTED, ("router",)),
    "checkpointed": (lambda: Net(saves=False), Router, ROUTED, ("router",)),
    "checkpointed, reentrant": (lambda: Net(saves=True), Router, ROUTED, ("router",)),
    "frozen": (frozen_router, Router, ROUTED, ("router",)),
    "declared": (Declares, None, DECLARED, ("gate", "out")),
    "nothing": (Declares, (), {}, ()),
    "running statistics": (conv, None, {"0": NARROW, "3": NARROW, "5": NARROW}, ("1", "4")),
}
"""By kind: a model, `keep`, the casts of inputs by hand, and the parts of names whose parameters are in fp32."""


def cast_by_hand(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cast, value))
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return cast(args), {name: cast(value) for name, value in kwargs.items()}


class ByHand:
    """A plain model with fp32 masters, whose modules have hooks that cast, trained by SGD on averaged gradients."""

    def __init__(self, module: nn.Module, casts: Mapping[str, torch.dtype], kept: tuple[str, ...]) -> None:
        self.module, self.dtype = module, WIDE if casts.get("inp") is WIDE else NARROW
        self.masters = {name: param.detach().clone() for name, param in module.named_parameters()}
        for name, param in module.named_parameters():
            if not set(kept) & set(name.split(".")):
                param.data = param.data.to(NARROW)
        for name, dtype in casts.items():
            module.get_submodule(name).register_forward_pre_hook(partial(cast_by_hand, dtype), with_kwargs=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_by_hand(self.dtype, self.module, args, kwargs)
        return self.module(*args, **kwargs)

    def step(self, loss: Callable[..., Tensor], turn: Turn) -> Tensor:
        params = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(self.masters[name])
        (value := loss(self, turn)).backward()
        for name, param in params.items():
            if param.grad is not None:
                mean = param.grad.float()
                dist.all_reduce(mean)
                self.masters[name] -= 0.5 * (mean / dist.get_world_size())
                param.grad = None
        return value.detach()


def follows(group: Any, stage: int, make: Any, loss: Any, keep: Any, casts: Any, kept: Any, **options: Any) -> None:
    """Body of a rank: train a model and its plain twin, and compare losses and weights."""
    torch.manual_seed(0)
    module = make()
    twin = ByHand(copy.deepcopy(module), casts(module) if callable(casts) else casts, kept)
    model = ShardLite(module, group=group, stage=stage, precision=Precision(compute=NARROW, keep=keep), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        turn = Turn(step, dist.get_rank(), 0)
        value = loss(model, turn)
        value.backward()
        same_bits("loss", value.detach(), twin.step(loss, turn))
        optimizer.step()
        optimizer.zero_grad()
        got = model.full_state_dict()
        expected = {name: each for name, each in twin.module.named_buffers() if name in got} | twin.masters
        same_states(f"step {step}", {name: got[name] for name in expected}, expected)
    wide = {name for name, param in twin.module.named_parameters() if param.dtype == WIDE}
    assert {name for name, param in module.named_parameters() if param.dtype == WIDE} == wide
    assert sorted(model.kept_names) == sorted(wide)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.stages(0, 2, 3)
@pytest.mark.sample(2)
def test_kept_modules_have_the_bits_of_casts_by_hand(group: Any, stage: int, case: str) -> None:
    make, keep, casts, kept = CASES[case]
    loss = images if case == "running statistics" else rows
    follows(group, stage, make, loss, keep, casts, kept, buffers="own")


@pytest.mark.stages(2, 3)
def test_replicated_modules_are_kept(group: Any, stage: int) -> None:
    net: list[nn.Module] = []

    def router() -> Any:
        yield net[0].get_submodule("blocks.1.router")

    def make() -> nn.Module:
        net.append(Net())
        return net[0]

    follows(group, stage, make, rows, Router, ROUTED, ("router",), replicate=router())


# ---- models of Transformers -----------------------------------------------------------------------------------------


def on_labels(model: Callable[..., Any], turn: Turn) -> Tensor:
    tokens = torch.randint(1, hf.VOCABULARY, (2, 6), generator=turn.generator())
    return model(input_ids=tokens, labels=tokens).loss


def of_layers(module: nn.Module) -> dict[str, torch.dtype]:
    """T5 declares `wo`, and casts for its own norms."""
    layers = (name for name, each in module.named_modules() if isinstance(each, nn.Linear))
    return {name: WIDE if name.endswith("wo") else NARROW for name in layers}


def of_owners(module: nn.Module) -> dict[str, torch.dtype]:
    """With `keep`, units and all modules that own parameters cast."""
    owners = [name for name, each in module.named_modules() if each._parameters and name]
    units = [f"model.layers.{i}" for i in range(2)]
    return {name: WIDE if name.endswith("gate") else NARROW for name in (*owners, *units)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "mixtral"])
@pytest.mark.stages(0, 3)
def test_models_of_transformers_have_the_bits_of_casts_by_hand(group: Any, stage: int, name: str) -> None:
    pytest.importorskip("transformers")
    if name == "t5":
        follows(group, stage, lambda: hf.t5(dropout_rate=0.0), on_labels, None, of_layers, ("wo",))
    else:
        make = partial(hf.mixtral, hidden_size=16, intermediate_size=24)  # rows of 16 bytes in bf16
        follows(group, stage, make, on_labels, "gate", of_owners, ("gate",))


# ---- steps ----------------------------------------------------------------------------------------------------------

KEPT = Precision(compute=NARROW, keep=Router)


@pytest.mark.parametrize("precision", [KEPT, Precision(compute=NARROW, reduce=NARROW, keep=Router)])
@pytest.mark.ranks(3)
def test_steps_follow_the_twin(group: Any, precision: Precision) -> None:
    """With clipping, accumulation and evaluation on three ranks. Gradients of kept parameters are summed in fp32."""
    for stage in some_stages(2, 3):
        pair = Pair(Net, group, stage=stage, precision=precision)
        assert {flat.reduce for flat in flats(pair.model)} == {WIDE, precision.reduce}
        pair.step(rows, ("local", "sharded", "step"), clip=0.01)
        pair.step(rows)
        pair.evaluate(rows)


def trained(group: Any, precision: Precision, stage: int, **options: Any) -> ShardLite:
    """Return a model after three steps of AdamW."""
    torch.manual_seed(0)
    model = ShardLite(Net(), group=group, precision=precision, stage=stage)
    optimizer = AdamW(model.parameters(), lr=0.01, **options)
    for step in range(3):
        rows(model, Turn(step, dist.get_rank(), 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("master", [WIDE, "split24"])
def test_stages_and_steps_in_the_backward_have_the_same_bits(group: Any, master: Any) -> None:
    """With split weights too, which kept parameters do not have."""
    precision = Precision(compute=NARROW, keep=Router, master=master)
    expected = trained(group, precision, 0).full_state_dict()
    for stage in some_stages(2, 3):
        for in_backward in (False, True):
            model = trained(group, precision, stage, in_backward=in_backward)
            same_states(f"stage {stage}, {in_backward=}", model.full_state_dict(), expected)
            for flat in flats(model):
                is_kept = flat.layout.slots[0].name in model.kept_names
                assert (flat.compute, flat.local.dtype) == ((WIDE, WIDE) if is_kept else (NARROW, flat.local.dtype))
                assert (flat.low is None) == (is_kept or master == WIDE)


def test_codes_are_not_made_of_kept_parameters(group: Any) -> None:
    model = ShardLite(Net(), group=group, precision=Precision(compute=NARROW, keep="router", quantized_gather=True))
    assert {flat.quantized: flat.compute for flat in flats(model)} == {True: NARROW, False: WIDE}
    expected = model.full_state_dict()
    rows(model, Turn(0, 0, 0)).backward()
    with model.gathered(writeback=False):
        for name in model.kept_names:
            same_bits(name, model.module.get_parameter(name).detach(), expected[name])


@pytest.mark.parametrize("saves", [None, False, True])
def test_autocast_ends_at_kept_modules(group: Any, saves: bool | None) -> None:
    """As a trainer wraps a forward. A forward that raises comes back to autocast too."""
    seen = []

    def cast(model: Any, turn: Turn) -> Tensor:
        with torch.autocast("cpu", NARROW):
            return rows(model, turn)

    for stage in some_stages(0, 3):
        pair = Pair(lambda: Net(saves=saves), group, stage=stage, precision=KEPT)
        router = pair.model.module.blocks[0].router
        router.register_forward_hook(lambda _, args, output: seen.append((args[0].dtype, output.dtype)))
        pair.step(cast)
        assert set(seen) == {(WIDE, WIDE)}
    with torch.autocast("cpu", NARROW):
        with pytest.raises(RuntimeError):
            router(torch.randn(5, 3))
        assert torch.is_autocast_enabled("cpu")


def test_a_layer_that_the_forward_converts_is_kept_as_the_error_says(group: Any) -> None:
    """As in the routers of Switch Transformers."""

    class Converts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(7, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier.to(WIDE)(x.to(WIDE))

    for stage in some_stages(0, 3):
        with pytest.raises(
            LayoutError, match=r"if a forward converts this module, name it in Precision\(keep=\.\.\.\)"
        ):
            rows(ShardLite(Converts(), group=group, stage=stage, precision=BF16), Turn(0, 0, 0))
        Pair(Converts, group, stage=stage, precision=Precision(compute=NARROW, keep="classifier")).step(rows)


def test_a_model_without_what_is_kept_computes_as_before(group: Any) -> None:
    """`keep=()` switches the declarations off. A model that declares nothing has no hooks that cast."""
    model = ShardLite(Net(), group=group, precision=Precision(compute=NARROW))
    assert not model.kept_names
    assert not any(-2 in module._forward_pre_hooks for module in model.module.modules())
    off = ShardLite(Declares(), group=group, precision=Precision(compute=NARROW, keep=()))
    assert not off.kept_names
    assert not any(-2 in module._forward_pre_hooks for module in off.module.modules())


def test_ignored_layers_take_inputs_in_the_dtype_of_their_weights(group: Any) -> None:
    net = Net()
    ignored = [net.head, net.blocks[0].router]
    model = ShardLite(net, group=group, precision=Precision(compute=NARROW, keep=Router), ignore=ignored)
    rows(model, Turn(0, 0, 0)).backward()
    assert net.head.weight.grad.dtype == net.blocks[0].router.gate.grad.dtype == WIDE
    assert model.kept_names == ["blocks.1.router.gate"]


def test_layers_that_are_units_cast_what_buffers_have_made_wide(group: Any) -> None:
    """As FSDP2 casts the inputs of its units. Nothing is kept."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out = nn.Linear(7, 8), nn.Linear(8, 8)
            self.register_buffer("bias", torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.inp(x) - self.bias)

    for stage in some_stages(0, 3):
        pair = Pair(Scaled, group, stage=stage, units=nn.Linear, precision=BF16)
        pair.step(rows)
        assert pair.model.module.bias.dtype == WIDE
        assert not pair.model.kept_names


# ---- around training ------------------------------------------------------------------------------------------------


def saves_and_loads(group: Any, folder: Any, stage: int) -> None:
    """Body of a rank: a checkpoint of a model that keeps goes into one that does not, with the optimizer."""
    model = ShardLite(Net(), group=group, stage=stage, precision=KEPT)
    optimizer = AdamW(model.parameters(), lr=0.01)
    rows(model, Turn(0, dist.get_rank(), 0)).backward()
    optimizer.step()
    shardlite.save(folder, model, optimizer, step=1)
    for other in (Precision(compute=NARROW), Precision(compute=NARROW, keep=Router, master="split24")):
        loaded = ShardLite(Net(), group=group, stage=3 - stage, precision=other)
        states = AdamW(loaded.parameters())
        shardlite.load(folder, loaded, states)
        for name, value in loaded.full_state_dict().items():
            exact = other.master == WIDE or name in model.kept_names
            torch.testing.assert_close(value, model.full_state_dict()[name], rtol=0 if exact else 2**-16, atol=0)
        rows(loaded, Turn(1, dist.get_rank(), 0)).backward()
        states.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_checkpoints_do_not_depend_on_what_is_kept(cluster: Any, tmp_path: Any, stage: int) -> None:
    cluster.run(saves_and_loads, 2, tmp_path, stage)
    assert "kept in a dtype of their own, beside the compute dtype: blocks.0.router.gate" in "\n".join(
        inspect(tmp_path)
    )


@pytest.mark.parametrize("precision", [KEPT, Precision(compute=NARROW, keep=Router, master="split24")])
def test_kept_parameters_are_budgeted(group: Any, precision: Precision) -> None:
    """In parameters, in gathered weights, and at stages 0 and 2 in the copies that they do not need."""
    for stage in some_stages(0, 2, 3):
        model = trained(group, precision, stage)
        recipe = Recipe(options=Options(stage=stage, precision=precision), world_size=2)
        budget = budget_of(plan_units(Net(), recipe.options, 2, torch.device("cpu")), recipe)
        assert model.memory()["parameters"].now == budget.held["parameters"]
        assert [unit.nbytes for unit in units(model)] == [unit.full for unit in budget.units]
        enough = MemoryLimit(nbytes=timeline_of(budget, list(plain_events(budget))).total)
        ShardLite(Net(), group=group, precision=precision, stage=stage, memory_limit=enough)
        with pytest.raises(LayoutError, match="memory_limit"):
            ShardLite(Net(), group=group, precision=precision, stage=stage, memory_limit=enough.nbytes - 1)


def test_plans_trace_the_casts() -> None:
    """`shardlite plan` runs a model that would raise without them, and counts wide activations."""
    planner = Planner(Source("a model", conv, lambda: (torch.zeros(3, 1, 2, 4),), "three images"))
    narrow = planner.plan(Setting(precision=Precision(compute=NARROW)))
    assert planner.plan(Setting(precision=Precision(compute=NARROW, keep=lambda *_: WIDE))).peak > narrow.peak


# ---- mistakes -------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


def test_a_tied_parameter_has_one_dtype(group: Any) -> None:
    message = r"tied parameter.*'table.weight' in torch.bfloat16 and 'head.weight' in torch.float32.*names of all"
    with pytest.raises(LayoutError, match=message):
        ShardLite(Tied(), group=group, precision=Precision(compute=NARROW, keep="head"))
    model = ShardLite(Tied(), group=group, precision=Precision(compute=NARROW, keep=("head", "table")))
    assert model(torch.arange(4)).dtype == WIDE


class DeclaresTied(Tied):
    _keep_in_fp32_modules = ("head",)


def test_the_remedies_for_declarations_work(group: Any) -> None:
    with pytest.raises(LayoutError, match="tied parameter"):
        ShardLite(DeclaresTied(), group=group, precision=BF16)
    for keep, dtype in ((("head", "table"), WIDE), ((), NARROW)):
        model = ShardLite(DeclaresTied(), group=group, precision=Precision(compute=NARROW, keep=keep))
        assert model(torch.arange(4)).dtype == dtype


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        ("out.weight", LayoutError, "Linear 'blocks.0.out' computes in one dtype.*only weight would.*the whole layer"),
        ("roter", LayoutError, "keep has 'roter', but the model has no module or parameter like it"),
        (nn.Conv1d, LayoutError, "keep has <class .*Conv1d'>, but the model has no module"),
        (is_router, TypeError, r"keep\(.*must return torch.float32, .* or None"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_wrong_keeps_are_refused_on_every_rank(
    group: Any, keep: Any, error: type[Exception], message: str, alone: bool
) -> None:
    """Also if one rank alone has it."""
    right = alone and dist.get_rank() == 0
    with pytest.raises(LayoutError if right else error, match="rank 1" if right else message):
        ShardLite(Net(), group=group, precision=Precision(compute=NARROW, keep=None if right else keep))


def test_ranks_keep_the_same(group: Any) -> None:
    keep = Router if dist.get_rank() else nn.LayerNorm
    with pytest.raises(LayoutError, match=r"norm.weight.*gathered as torch\.(float32|bfloat16)"):
        ShardLite(Net(), group=group, precision=Precision(compute=NARROW, keep=keep))
    ShardLite(Net(), group=group, precision=Precision(compute=NARROW, keep=lambda *_: None))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": "router"}, ValueError, "pass compute too"),
        ({"compute": NARROW, "keep": Router()}, TypeError, "got Router, a module: pass its class or its name"),
        ({"compute": NARROW, "keep": [nn.Linear, Router()]}, TypeError, "got Router, a module"),
        ({"compute": NARROW, "keep": 3}, TypeError, "got 3"),
        ({"compute": NARROW, "keep": ""}, TypeError, "got ''"),
        ({"compute": NARROW, "keep": [torch.float32]}, TypeError, "got torch.float32"),
        ({"compute": NARROW, "keep": dict}, TypeError, "got <class 'dict'>"),
    ],
)
def test_what_is_no_module_is_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Precision(**options)
