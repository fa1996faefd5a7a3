"""Full state dicts by `torch.distributed.checkpoint.state_dict`, from wrapped models and into them."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

from shardlite import AdamW, CheckpointError, LayoutError, Precision, ShardLite
from shardlite.params import ShardTensor
from tests.support.checkpoints import same_state
from tests.support.twins.sharded import same_bits, take_step

Make = Callable[..., optim.Optimizer]


def grouped(params: Any) -> AdamW:
    """Groups with and without decay, as most programs have them: shards lie in memory in another order."""
    shards = list(params)
    decayed, others = [p for p in shards if p.ndim > 1], [p for p in shards if p.ndim <= 1]
    return AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "groups": grouped,
    "in_backward": lambda params: AdamW(params, lr=0.01, in_backward=True),
    "ours": lambda params: AdamW(params, lr=0.01),
    "int8": lambda params: AdamW(params, lr=0.01, state="int8"),
    "fused": lambda params: optim.AdamW(params, lr=0.01, fused=True),
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
}
FULL = {"full_state_dict": True}


class Scaled(nn.Linear):
    """A layer with a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__(7, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.nothing.sum()


def net(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    """A model with tied weights, buffers, and a frozen parameter. Cuts between shards fall anywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), norm(7), nn.Linear(7, 7), nn.Linear(7, 7))
    model[3].weight = model[2].weight
    model[3].bias.requires_grad_(False)
    return model


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 1) -> None:
    """Train on data that is the same on each rank, so that an unsharded model has the same bits."""
    for step in range(steps):
        take_step(optimizer, model(torch.randn(5, 7, generator=torch.Generator().manual_seed(step))).square().mean())


def trained(group: Any, make: Make, steps: int = 2, **options: Any) -> tuple[ShardLite, optim.Optimizer]:
    narrow = "precision" in options and options["precision"].compute is not None
    norm = nn.LayerNorm if narrow else nn.BatchNorm1d  # whose statistics PyTorch does not take in bf16 on a CPU
    model = ShardLite(net(norm), group=group, units=nn.Linear, **options)
    optimizer = make(model.parameters())
    train(model, optimizer, steps)
    return model, optimizer


def written(state: Any) -> Any:
    """What `torch.save` writes of a state dict."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def leaves(state: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {k: v for key, each in state.items() for k, v in leaves(each, f"{prefix}{key}.").items()}
    return {prefix: state}


def same(got: Any, expected: Any) -> None:
    ours, theirs = leaves(got), leaves(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            assert type(ours[name]) is Tensor, name
            same_bits(name, ours[name], value)
        else:
            assert ours[name] == value, name


# ---- out of a model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "stage"), [(2, 3), (2, 2), (2, 0), (3, 3)], indirect=["group"])
@pytest.mark.parametrize("kind", ["ours", "groups", "in_backward", "fused", "sgd"])
@pytest.mark.sample(2)
def test_full_tensors_come_out(group: Any, kind: str, stage: int) -> None:
    """Full tensors are those of an unsharded model that has had the same steps, in a file, too."""
    model, optimizer = trained(group, OPTIMIZERS[kind], stage=stage)
    plain, its = trained(group, OPTIMIZERS[kind], stage=0)
    expected = get_state_dict(plain, its)
    for cpu in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=cpu)
        got = get_state_dict(model, optimizer, options=options)
        if cpu and dist.get_rank() != 0:
            assert got == ({}, {}), "only rank 0 has any"
            continue
        for part, its_part in zip(got, expected, strict=True):
            same(written(part), its_part)


@pytest.mark.ranks(4)
def test_a_model_over_some_of_the_ranks(group: Any) -> None:
    """With `cpu_offload` the first rank of the model has the state, also where that is not rank 0."""
    last = dist.new_group([1, 2])
    if dist.get_rank() not in (1, 2):
        return
    model, optimizer = trained(last, OPTIMIZERS["ours"])
    got = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True, **FULL))
    assert bool(got[0]) == bool(got[1]) == (dist.get_rank() == 1)
    if dist.get_rank() == 1:
        same(got[0], model.full_state_dict(rank=0))
    else:
        model.full_state_dict(rank=0)


@pytest.mark.parametrize("stage", [3, 2, 0])
def test_tensors_have_storages_of_their_own(group: Any, stage: int) -> None:
    """Each tensor of a state dict has a storage of its own, or tools that write files take them for tied ones."""
    model, _ = trained(group, OPTIMIZERS["ours"], stage=stage)
    states = [get_model_state_dict(model, options=StateDictOptions(**FULL))]
    if stage == 0:
        states += [model.state_dict(), model.module.state_dict()]
    with model.gathered():
        states.append(model.module.state_dict())
        for i, state in enumerate(states):
            places = {name: value.untyped_storage().data_ptr() for name, value in state.items() if value.numel()}
            assert (places.pop("3.weight") == places["2.weight"]) == (i > 0), "tied weights are, unless they are copies"
            assert len(set(places.values())) == len(places)
        states.clear()  # views of gathered weights do not outlive their use
        del state
    if stage > 0:
        with pytest.raises(LayoutError, match=r"untyped_storage\(\): this rank has only a part of the tensor"):
            model.state_dict()["0.weight"].untyped_storage()


def test_options_that_select(group: Any) -> None:
    model, _ = trained(group, OPTIMIZERS["ours"])
    got = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True, **FULL))
    assert model.full_state_dict().keys() - got.keys() == {"3.bias"}
    offloaded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert type(offloaded["2.weight"]) is ShardTensor, "this rank's part, on the CPU"


@pytest.mark.ranks(4)
def test_hybrid_sharding(group: Any) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    model, optimizer = trained(mesh, OPTIMIZERS["ours"])
    plain, its = trained(group, OPTIMIZERS["ours"], stage=0)
    got = get_state_dict(model, optimizer, options=StateDictOptions(**FULL))
    same_state(plain.full_state_dict(), got[0])
    fresh, other = trained(mesh, OPTIMIZERS["ours"], 0)
    given = copy.deepcopy(got) if dist.get_rank() == 0 else ({}, {})
    options = StateDictOptions(broadcast_from_rank0=True, **FULL)
    set_state_dict(fresh, other, model_state_dict=given[0], optim_state_dict=given[1], options=options)
    for each in ((fresh, other), (plain, its)):
        train(*each)
    same(fresh.full_state_dict(), plain.full_state_dict())


# ---- into a model ----------------------------------------------------------------------------------------------------


def into_body(group: Any, kind: str, stage: int, flatten: bool, master: Any) -> None:
    """A run goes on with the same bits at another stage, whether each rank has the whole or the first one only."""
    precision = Precision(compute=torch.bfloat16 if master == "split24" else None, master=master)
    model, optimizer = trained(group, OPTIMIZERS[kind], stage=3, precision=precision)
    shared = {"flatten_optimizer_state_dict": flatten, **FULL}
    saved = get_state_dict(model, optimizer, options=StateDictOptions(**shared))
    train(model, optimizer)
    expected = model.full_state_dict()
    for broadcast in (False, True):
        other, its = trained(group, OPTIMIZERS[kind], 1, stage=stage, precision=precision)
        given = ({}, {}) if broadcast and dist.get_rank() > 0 else copy.deepcopy(saved)
        options = StateDictOptions(broadcast_from_rank0=broadcast, cpu_offload=broadcast, **shared)
        result = set_state_dict(other, its, model_state_dict=given[0], optim_state_dict=given[1], options=options)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        train(other, its)
        same(other.full_state_dict(), expected)


@pytest.mark.parametrize("stage", [3, 1, 0])
@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.sample(3)
def test_full_tensors_go_in(cluster, kind, flatten, stage):
    cluster.check(into_body, 2, kind, stage, flatten, torch.float32)


@pytest.mark.parametrize("stage", [2, 0])
def test_full_tensors_go_into_split_weights(cluster, stage):
    cluster.check(into_body, 3, "ours", stage, False, "split24")


def test_a_plain_run_goes_on_sharded(group: Any) -> None:
    """The state of an unsharded run, which has seen the same data, goes on in shards."""
    plain = net()
    its = OPTIMIZERS["fused"](plain.parameters())
    train(plain, its, 2)
    saved = copy.deepcopy(get_state_dict(plain, its))
    model, optimizer = trained(group, OPTIMIZERS["fused"], 0)
    options = StateDictOptions(**FULL)
    set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=options)
    for each in ((plain, its), (model, optimizer)):
        train(*each)
    same(model.full_state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("stage", [3, 0])
def test_what_is_missing_stays(group: Any, broadcast: bool, stage: int) -> None:
    """With `strict=False` what is missing keeps its values, for a tied weight too that is given by its other name."""
    model, _ = trained(group, OPTIMIZERS["ours"], stage=stage)
    before = model.full_state_dict()
    some = {"3.weight": torch.full((7, 7), 2.0), "1.running_mean": torch.full((7,), 3.0), "other": torch.ones(1)}
    given = {} if broadcast and dist.get_rank() > 0 else dict(some)
    options = StateDictOptions(broadcast_from_rank0=broadcast, strict=False, **FULL)
    result = set_model_state_dict(model, given, options=options)
    assert result.unexpected_keys == ["other"]
    assert sorted(result.missing_keys) == sorted(before.keys() - some.keys())
    known = {name: value for name, value in some.items() if name in before}
    same(model.full_state_dict(), {**before, **known, "2.weight": some["3.weight"]})
    with pytest.raises(LayoutError, match="other"):
        set_model_state_dict(model, given, options=StateDictOptions(broadcast_from_rank0=broadcast, **FULL))


# ---- around a model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [False, True])
def test_a_compiled_model(group: Any, before: bool) -> None:
    """The module is compiled before it is wrapped, or the wrapped model is."""
    if before:
        layers = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
        model = passed = ShardLite(torch.compile(layers, backend="eager"), group=group)
        optimizer: optim.Optimizer = OPTIMIZERS["ours"](model.parameters())
    else:
        model, optimizer = trained(group, OPTIMIZERS["ours"])
        passed = torch.compile(model, backend="eager")
    options = StateDictOptions(**FULL)
    got = get_state_dict(passed, optimizer, options=options)
    same(got[0], model.full_state_dict())
    set_model_state_dict(passed, {name: torch.zeros_like(each) for name, each in got[0].items()}, options=options)
    assert not any(value.any() for value in model.full_state_dict().values())
    set_optimizer_state_dict(passed, optimizer, got[1], options=options)


def test_what_is_refused(group: Any) -> None:
    model, optimizer = trained(group, OPTIMIZERS["ours"])
    outer = nn.ModuleDict({"inside": model, "rest": nn.Linear(2, 2)})
    named = outer.state_dict()
    assert {name: type(value) for name, value in named.items() if name.startswith("inside.0.w")} == {
        "inside.0.weight": ShardTensor
    }, "nothing of a wrapped model is missing from the state dict of the module around it"
    full = {f"inside.{name}": value for name, value in model.full_state_dict().items()}
    for call in (
        lambda: outer.load_state_dict({**named, **full}),
        lambda: get_model_state_dict(outer),
        lambda: get_optimizer_state_dict(outer, optimizer),
        lambda: set_model_state_dict(outer, named),
    ):
        with pytest.raises(LayoutError, match="a ShardLite model inside, 'inside': "):
            call()
    with pytest.raises(LayoutError, match="submodules="):
        get_model_state_dict(model, submodules={model.module[0]})
    with pytest.raises(LayoutError, match="by names"):
        set_model_state_dict(model, {model.module[0]: {}})
    with pytest.raises(LayoutError, match=r"full_tensor\(\): cannot gather a snapshot"):
        model.state_dict()["0.weight"].snapshot(torch.clone).full_tensor()


@pytest.mark.parametrize("stage", [3, 0])
@pytest.mark.parametrize("kind", ["ours", "fused"])
def test_states_of_something_else_are_refused(group: Any, kind: str, stage: int) -> None:
    """A state of another model, or no state at all, raises an error on all ranks and changes nothing."""
    model, optimizer = trained(group, OPTIMIZERS[kind], stage=stage)
    options = StateDictOptions(**FULL)
    before = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    wider = copy.deepcopy(before)
    for state in wider["state"].values():
        state.update({key: torch.zeros(9, 9) for key, value in state.items() if value.numel() > 1})
    shards = get_optimizer_state_dict(model, optimizer)
    refused: list[tuple[Any, str]] = [
        (wider, "shape"),
        ({}, "'state' and 'param_groups', got nothing"),
        ({"a": 1}, "got a"),
    ]
    for given, words in refused + ([(shards, "takes full tensors, got shards")] if stage else []):
        for broadcast in (False, True):
            told = StateDictOptions(broadcast_from_rank0=broadcast, **FULL)
            with pytest.raises((LayoutError, ValueError, RuntimeError), match=words if given else "empty|got nothing"):
                set_optimizer_state_dict(model, optimizer, given, options=told)
    same(get_optimizer_state_dict(model, optimizer, options=options), before)
    if stage:
        with pytest.raises(LayoutError, match="is a shard, but full tensors are required"):
            model.load_full_state_dict(model.state_dict())


def test_states_that_cannot_be_sent(group: Any) -> None:
    """A state that the first rank cannot send raises an error on all ranks; other ranks' arguments are ignored."""
    model, optimizer = trained(group, OPTIMIZERS["ours"])
    options = StateDictOptions(broadcast_from_rank0=True, **FULL)
    saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**FULL))
    first = dist.get_rank(group) == 0
    bad = {**saved, "param_groups": [{**saved["param_groups"][0], "lr": Make}]}
    with pytest.raises((CheckpointError, LayoutError), match="holds something that is neither a tensor, a number"):
        set_optimizer_state_dict(model, optimizer, bad if first else {}, options=options)
    set_optimizer_state_dict(model, optimizer, saved if first else {"state": lambda: None}, options=options)
