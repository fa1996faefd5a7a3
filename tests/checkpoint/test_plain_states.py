"""A run changes from data parallelism to ShardLite in the middle, and back, with the whole state of its optimizer."""

import io
import warnings
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
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from shardlite import (
    AdamW,
    LayoutError,
    ShardLite,
    WholeParameters,
    full_optimizer_state,
    load,
    load_optimizer_state,
    save,
)
from tests.support.optim_cases import ByHand
from tests.support.twins.sharded import same_bits, some_stages, take_step


class Branches(nn.Module):
    """A model with tied weights, a scalar, a frozen parameter, and a branch that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rare, self.last = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 7)
        self.never = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.tied = nn.Linear(7, 9)
        self.tied.weight = self.first.weight
        self.tied.bias.requires_grad_(False)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        x = torch.tanh(self.first(x) * self.scale)
        x = self.rare(x) if rare else x
        return self.tied(self.last(x))


def two_groups(params: Any, kind: Callable[..., optim.Optimizer], **options: Any) -> optim.Optimizer:
    """Groups in another order than the model's parameters, as programs have them that spare biases from decay."""
    params = list(params)
    others, matrices = ([p for p in params if (p.ndim > 1) is wanted] for wanted in (False, True))
    return kind([{"params": matrices}, {"params": others, "lr": 0.005}], lr=0.01, **options)


def plain_and_ours(kind: Any, **options: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    make = lambda params: two_groups(params, kind, **options)  # noqa: E731
    return make, make


OPTIMIZERS = {
    "sgd": plain_and_ours(optim.SGD, momentum=0.9),
    "adam": plain_and_ours(optim.Adam),
    "adamw": plain_and_ours(optim.AdamW, fused=False),
    "rmsprop": plain_and_ours(optim.RMSprop, momentum=0.5),
    "ours": (
        lambda params: two_groups(params, optim.AdamW, fused=True),
        lambda params: two_groups(params, AdamW),
    ),
    "whole": (
        lambda params: two_groups(params, optim.Adafactor),
        lambda params: two_groups(params, WholeParameters, optimizer_class=optim.Adafactor),
    ),
}


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    """Train each rank on its own batches. Only step 3 and later ones use the branch `rare`."""
    for step in steps:
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        take_step(optimizer, model(x, rare=step >= 3).square().mean())


def from_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def data_parallel(module: nn.Module, group: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, process_group=group, find_unused_parameters=True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_changes_in_the_middle_and_back(group: Any, kind: str) -> None:
    """On two ranks, gradients of DDP have the bits of ShardLite's. PyTorch's fused step rounds tails differently."""
    plain, ours = OPTIMIZERS[kind]
    for stage in some_stages(2, 3):
        twin = data_parallel(Branches(), group)
        its = plain(twin.parameters())
        train(twin, its, range(9))

        first = data_parallel(Branches(), group)
        optimizer = plain(first.parameters())
        train(first, optimizer, range(2))
        state = from_file(optimizer.state_dict()) if dist.get_rank() == 0 else None

        model = ShardLite(first.module, group=group, stage=stage)
        sharded = ours(model.parameters())
        load_optimizer_state(model, sharded, state)
        train(model, sharded, range(2, 5))
        state, weights = full_optimizer_state(model, sharded), model.full_state_dict()
        at_zero = full_optimizer_state(model, sharded, rank=0)
        if dist.get_rank() == 0:
            torch.testing.assert_close(at_zero["state"], state["state"], rtol=0, atol=0)
            assert at_zero["param_groups"] == state["param_groups"]
        else:
            assert at_zero == {}

        module = Branches()
        module.load_state_dict(weights)
        last = data_parallel(module, group)
        optimizer = plain(last.parameters())
        optimizer.load_state_dict(from_file(state))
        train(last, optimizer, range(5, 9))
        for (name, got), expected in zip(last.named_parameters(), twin.parameters(), strict=True):
            if kind == "ours":
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
            else:
                same_bits(name, got, expected)


@pytest.mark.parametrize("group", [1, 3], indirect=True)
@pytest.mark.parametrize("kind", ["adam", "ours", "whole"])
def test_what_is_loaded_comes_out(group: Any, kind: str) -> None:
    """Covers any number of ranks, parameters without state, and group options."""
    plain, ours = OPTIMIZERS[kind]
    module = Branches()
    optimizer = plain(module.parameters())
    for step in range(2):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        take_step(optimizer, module(x, rare=False).square().mean())
    optimizer.param_groups[1]["lr"] = 0.123
    expected = optimizer.state_dict()
    for stage in some_stages(0, 3):
        model = ShardLite(Branches(), group=group, stage=stage)
        sharded = ours(model.parameters())
        load_optimizer_state(model, sharded, expected)
        got = full_optimizer_state(model, sharded)
        assert got["state"].keys() == expected["state"].keys()
        for index, entry in expected["state"].items():
            assert entry.keys() <= got["state"][index].keys()
            for key, value in entry.items():
                same_bits(f"{index} {key}", torch.as_tensor(got["state"][index][key]), torch.as_tensor(value))
        assert [group["lr"] for group in got["param_groups"]] == [0.01, 0.123]
        assert [group["params"] for group in got["param_groups"]] == [
            group["params"] for group in expected["param_groups"]
        ]


class Small(nn.Sequential):
    """Shards of one element, one-element parameters, and a scalar."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(7, 3), nn.Linear(3, 1))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) * self.scale


def train_small(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        take_step(optimizer, model(torch.randn(4, 7, generator=torch.Generator().manual_seed(step))).square().mean())


def numbers_body(group: Any, folder: Any, count: tuple[int, ...]) -> None:
    make = lambda params: ByHand(params, count=count)  # noqa: E731
    module = Small()
    optimizer = make(module.parameters())
    train_small(module, optimizer, range(2))
    expected = optimizer.state_dict()

    model = ShardLite(Small(), group=group)
    model.load_full_state_dict(module.state_dict())
    sharded = make(model.parameters())
    load_optimizer_state(model, sharded, expected)
    assert all(entry["t"].shape == count for entry in sharded.state.values())
    torch.testing.assert_close(full_optimizer_state(model, sharded)["state"], expected["state"], rtol=0, atol=0)
    save(folder, model, sharded, step=2)
    again = ShardLite(Small(), group=group)
    resumed = make(again.parameters())
    load(folder, again, resumed)
    assert all(entry["t"].shape == count for entry in resumed.state.values())
    train_small(again, resumed, range(2, 4))
    train_small(module, optimizer, range(2, 4))
    torch.testing.assert_close(again.full_state_dict(), module.state_dict())


@pytest.mark.parametrize("count", [(), (1,), (1, 1)])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.sample(2)
def test_numbers_of_any_name_and_lists_of_moments(cluster: Any, tmp_path: Any, ranks: int, count: Any) -> None:
    """A number has as many elements and dimensions as some parameter, or as its shard on some rank."""
    cluster.run(numbers_body, ranks, tmp_path, count)


@pytest.mark.parametrize("kind", ["adam", "ours", "whole"])
def test_a_compiled_submodule_does_not_change_names(group: Any, kind: str) -> None:
    plain, ours = OPTIMIZERS[kind]
    module = Small()
    optimizer = plain(module.parameters())
    train_small(module, optimizer, range(2))
    expected = optimizer.state_dict()
    inner = Small()
    inner[0] = torch.compile(inner[0], backend="eager")
    model = ShardLite(inner, group=group)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert weights.keys() == module.state_dict().keys()
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    sharded = ours(model.parameters())
    load_optimizer_state(model, sharded, expected)
    got = full_optimizer_state(model, sharded)
    assert got["state"].keys() == expected["state"].keys()
    for index, entry in expected["state"].items():
        for key, value in entry.items():
            same_bits(f"{index} {key}", torch.as_tensor(got["state"][index][key]), torch.as_tensor(value))


class Equal(nn.Sequential):
    """Parameters of equal shapes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(4, 4) for _ in range(3)))


def grouped(params: Any, groups: list[tuple[list[int], float]], kind: Any = optim.Adam, prefix: str = "") -> Any:
    """An optimizer of `named_parameters()` by the numbers of their layers, with a learning rate for each group."""
    params = list(params)
    named = [
        {"params": [(prefix + n, p) for i in layers for n, p in params if n.startswith(f"{i}.")], "lr": lr, "mine": lr}
        for layers, lr in groups
    ]
    return WholeParameters(named, kind) if kind is optim.Adafactor else kind(named)


FIRST = [([2], 0.2), ([0, 1], 0.1)]
REGROUPED = {
    "other order": [([1, 0], 0.0), ([2], 0.0)],
    "more groups": [([1], 0.0), ([2], 0.0), ([0], 0.0)],
    "the same": [([2], 0.0), ([0, 1], 0.0)],
}


def trained(prefix: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole state of a plain optimizer with a scheduler, and its entries by name."""
    module = Equal()
    optimizer = grouped(module.named_parameters(), FIRST, prefix=prefix)
    optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(2):
        take_step(optimizer, module(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean())
    return optimizer.state_dict(), {name: optimizer.state[param] for name, param in module.named_parameters()}


def check_regrouped(state: dict[str, Any], groups: list[tuple[list[int], float]], entries: dict[str, Any]) -> None:
    names = [name for layers, _ in groups for i in layers for name in (f"{i}.weight", f"{i}.bias")]
    for index, name in enumerate(names):
        same_bits(name, state["state"][index]["exp_avg"], entries[name]["exp_avg"])
    expected = [0.2 if 2 in layers else 0.1 for layers, _ in groups]
    assert [group["initial_lr"] for group in state["param_groups"]] == expected
    assert [group["mine"] for group in state["param_groups"]] == expected
    assert [name for group in state["param_groups"] for name in group["param_names"]] == names


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
@pytest.mark.parametrize("name", REGROUPED)
@pytest.mark.sample(2)
def test_a_state_with_names_is_matched_by_names(group: Any, name: str, prefix: str) -> None:
    """Also if the groups have another order, are divided otherwise, or the plain model was wrapped."""
    state, entries = trained(prefix)
    for stage in some_stages(0, 3):
        model = ShardLite(Equal(), group=group, stage=stage)
        optimizer = grouped(model.named_parameters(), REGROUPED[name])
        load_optimizer_state(model, optimizer, state if dist.get_rank() == 0 else None)
        check_regrouped(full_optimizer_state(model, optimizer), REGROUPED[name], entries)


@pytest.mark.parametrize("kind", [optim.Adam, AdamW, optim.Adafactor])
@pytest.mark.stages(0, 2, 3)
def test_states_of_shards_are_matched_by_names(group: Any, kind: Any, stage: int) -> None:
    """By `optimizer.load_state_dict`, and by PyTorch's function of names."""

    def make(groups: Any) -> tuple[ShardLite, Any]:
        model = ShardLite(Equal(), group=group, stage=stage)
        named = [
            {"params": [p for i in layers for n, p in model.named_parameters() if n.startswith(f"{i}.")], "lr": lr}
            for layers, lr in groups
        ]
        return model, WholeParameters(named, kind) if kind is optim.Adafactor else kind(named)

    model, optimizer = make(FIRST)
    for step in range(2):
        take_step(optimizer, model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean())
    whole = StateDictOptions(full_state_dict=True)
    expected = get_optimizer_state_dict(model, optimizer, options=whole)
    state = optimizer.state_dict()
    for by_names in (True, False)[: 1 if kind is optim.Adafactor else 2]:  # owners depend on the groups
        other, again = make(REGROUPED["other order"])
        if by_names:
            set_optimizer_state_dict(other, again, expected, options=whole)
        else:
            again.load_state_dict(state)
        got = get_optimizer_state_dict(other, again, options=whole)
        assert [each["lr"] for each in got["param_groups"]] == [0.1, 0.2]
        assert got["state"].keys() == expected["state"].keys()
        for name, entry in got["state"].items():
            for key, value in entry.items():
                same_bits(f"{name} {key}", torch.as_tensor(value), torch.as_tensor(expected["state"][name][key]))


def test_groups_that_do_not_fit_by_name_are_refused(group: Any) -> None:
    state, _ = trained()
    model = ShardLite(Equal(), group=group)
    fewer = {"state": {}, "param_groups": state["param_groups"][:1]}
    for groups, given, message in (
        ([([0, 1, 2], 0.0)], state, "group 0 .* has parameters of 2 groups of the state, which have different .*lr"),
        (FIRST, fewer, r"the state has no parameters '0\.bias'"),
        ([([0, 1], 0.0)], state, r"the optimizer has no parameters '2\.bias', '2\.weight' of the state"),
    ):
        optimizer = grouped(model.named_parameters(), groups)
        with pytest.raises(LayoutError, match=message):
            load_optimizer_state(model, optimizer, given if dist.get_rank() == 0 else None)
        assert not optimizer.state


@pytest.mark.parametrize("at", [0, 1, 2])
def test_empty_groups_keep_their_options(group: Any, at: int) -> None:
    def run(model: nn.Module) -> optim.Optimizer:
        groups = [{"params": [param], "lr": lr} for param, lr in zip(model.parameters(), (0.1, 0.2), strict=True)]
        groups.insert(at, {"params": [], "lr": 0.5, "betas": (0.5, 0.6)})
        optimizer = optim.AdamW(groups)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="group . of AdamW has no parameters")
            take_step(optimizer, model(torch.ones(2, 4)).sum())
        return optimizer

    expected = run(nn.Linear(4, 4)).state_dict()["param_groups"]
    model = ShardLite(nn.Linear(4, 4), group=group)
    optimizer = run(model)
    state = full_optimizer_state(model, optimizer)
    for each in optimizer.param_groups:
        each.update(lr=0.0, betas=(0.0, 0.0))
    load_optimizer_state(model, optimizer, state)
    for got in (state["param_groups"], optimizer.state_dict()["param_groups"]):
        assert [(each["lr"], each["betas"]) for each in got] == [(each["lr"], each["betas"]) for each in expected]


def renamed(state: dict[str, Any]) -> dict[str, Any]:
    groups = [{**group, "params": [f"other.{key}" for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {}, "param_groups": groups}


def test_a_state_that_does_not_fit_is_refused_on_every_rank(group: Any) -> None:
    plain, ours = OPTIMIZERS["adam"]
    state = plain(Branches().parameters()).state_dict()
    model = ShardLite(Branches(), group=group)
    optimizer = ours(model.parameters())
    for wrong, message in (
        (None, "needs a full optimizer.state_dict"),
        ({"state": state["state"]}, "needs a full optimizer.state_dict"),
        ({**state, "param_groups": state["param_groups"][:1]}, "has groups of .* and Adam of"),
        ({**state, "param_groups": state["param_groups"][::-1]}, "has groups of .* and Adam of"),
        ({**state, "state": {99: {}}}, "has no parameters 99 of the state"),
        (renamed(state), "has no parameters 'other.0', .* of the state"),
        (
            {**state, "state": {0: {"exp_avg": torch.ones(3, 9)}}},
            r"'exp_avg' of 'first.weight' has shape \[3, 9\], but",
        ),
    ):
        with pytest.raises(LayoutError, match=message):
            load_optimizer_state(model, optimizer, wrong if dist.get_rank() == 0 else None)
        assert not optimizer.state


def test_an_optimizer_of_other_parameters_is_refused(group: Any) -> None:
    model = ShardLite(Branches(), group=group)
    other = optim.Adam(Branches().parameters())
    for call in (
        lambda: load_optimizer_state(model, other, other.state_dict()),
        lambda: full_optimizer_state(model, other),
    ):
        with pytest.raises(LayoutError, match=r"are not of the ShardLite model: .* call model.adopt"):
            call()
    with pytest.raises(ValueError, match="rank must be 0 or None, got 1"):
        full_optimizer_state(model, other, rank=1)


@pytest.mark.parametrize("kind", [optim.AdamW, AdamW])
def test_the_state_of_a_new_optimizer_is_empty_and_stays_empty(group, kind):
    model = ShardLite(nn.Linear(7, 9), group=group)
    optimizer = kind(model.parameters(), lr=0.1)
    state = full_optimizer_state(model, optimizer)
    assert state["state"] == {}
    assert [each["params"] for each in state["param_groups"]] == [[0, 1]]
    assert full_optimizer_state(model, optimizer, rank=0) == (state if group.rank() == 0 else {})
    assert not optimizer.state
    load_optimizer_state(model, optimizer, state)
