"""Optimizers of sharded models: construction, kinds, groups and schedulers.

Every rank trains a twin of its own (see `plain.py`) on the batches of all ranks, and compares to the bit.

Legend: `W` ranks.
"""

import copy
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from shardlite import AdamW, LayoutError, ShardLite, ShardWarning
from tests.support.models.small import named
from tests.support.twins.plain import PaddedAdamW, Twin
from tests.support.twins.sharded import WIDE, same_bits, some_stages, take_step

STAGES = (0, 1, 2, 3)
Make = Callable[..., optim.Optimizer]
Named = Iterable[tuple[str, nn.Parameter]]

OURS: tuple[Make, Make] = (lambda p: AdamW(p, lr=0.02), lambda p: PaddedAdamW(p, lr=0.02))
FOREACH: tuple[Make, Make] = (lambda p: optim.AdamW(p, lr=0.02, foreach=True),) * 2
MOMENTUM: tuple[Make, Make] = (lambda p: optim.SGD(p, lr=0.05, momentum=0.9),) * 2
"""For shards, and for the twin."""


def net(hidden: int = 33, width: int = 5) -> nn.Sequential:
    """[B, 16] -> [B, width]; if `hidden` is a multiple of 32 from [B, 32].

    In the latter case padding changes nothing, and even kernels that round the last elements of a tensor otherwise
    step whole parameters and shards alike.
    """
    torch.manual_seed(4)
    wide = 16 if hidden % 32 else 32
    first, last = nn.Linear(wide, hidden), nn.Linear(hidden, width)
    return named(norm=nn.LayerNorm(wide), first=first, tanh=nn.Tanh(), last=last)


def loss(model: Callable[[Tensor], Tensor], width: int, step: int, rank: int) -> Tensor:
    return model(torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


class Trained:
    """A sharded model and its twin, side by side."""

    def __init__(self, module: nn.Module, group: Any, twin: Twin | None = None, **options: Any):
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.width = module.first.in_features
        self.twin = twin or Twin(copy.deepcopy(module), self.world_size, nn.Linear)
        self.model = ShardLite(module, group=group, units=nn.Linear, **options)

    def backward(self, step: int) -> None:
        self.twin.backward(lambda _, rank: loss(self.twin, self.width, step, rank).backward())
        loss(self.model, self.width, step, self.rank).backward()

    def check(self, what: str, view: Callable[[Tensor], Tensor | None] = lambda tensor: tensor.detach()) -> None:
        for name, shard in self.model.named_parameters():
            got, whole = view(shard), view(self.twin.masters[name])
            assert (got is None) == (whole is None), f"{what}: {name!r}: {got}, the twin's is {whole}"
            if got is not None:
                expected = whole.reshape(-1) if self.model.stage == 0 else self.twin.part(name, whole, self.rank)
                same_bits(f"stage {self.model.stage}, {what}: {name!r}", got.reshape(-1), expected)

    def train(
        self, steps: Iterable[int], optimizers: Sequence[optim.Optimizer], schedulers: Sequence[Any] = ()
    ) -> None:
        for step in steps:
            before = {name: master.detach().clone() for name, master in self.twin.masters.items()}
            self.backward(step)
            for optimizer in optimizers:
                take_step(optimizer)
            for scheduler in schedulers:
                scheduler.step()
            self.check(f"step {step}")
            assert not [n for n, master in self.twin.masters.items() if torch.equal(master, before[n])]


# ---- built before the model was wrapped -----------------------------------------------------------------------------


def split_by(
    params: Named, chooses: Callable[[str, nn.Parameter], bool], names: bool = False, **options: Any
) -> list[dict[str, Any]]:
    """Two groups: what is chosen, without decay and with other options, is the second."""
    groups: tuple[list[Any], list[Any]] = [], []
    for name, param in params:
        groups[chooses(name, param)].append((name, param) if names else param)
    return [{"params": groups[0], "weight_decay": 0.4}, {"params": groups[1], "weight_decay": 0.0, **options}]


def two_groups(params: Named) -> list[dict[str, Any]]:
    return split_by(params, lambda name, _: "last" in name, lr=0.05)


@pytest.mark.ranks(1, 2, WIDE)
def test_our_optimizer_is_adopted_with_its_groups_and_scheduler(group: Any) -> None:
    """Groups, and a scheduler that was attached before, go on."""
    for stage in some_stages(0, 3):
        module = net()
        optimizer = AdamW(two_groups(module.named_parameters()), lr=0.02)
        scheduler = LambdaLR(optimizer, lambda t: 0.5**t)
        trained = Trained(module, group, stage=stage)
        theirs = PaddedAdamW(two_groups(trained.twin.masters.items()), lr=0.02)
        schedulers = scheduler, LambdaLR(theirs, lambda t: 0.5**t)
        held = [param for each in optimizer.param_groups for param in each["params"]]
        assert {id(param) for param in held} == {id(shard) for shard in trained.model.parameters()}
        trained.train(range(4), (optimizer, theirs), schedulers)
        assert [each["lr"] for each in optimizer.param_groups] == [0.02 / 16, 0.05 / 16]


@pytest.mark.ranks(1, 2, WIDE)
def test_a_model_can_be_wrapped_in_the_middle_of_training(group: Any) -> None:
    """The moments of steps that were made before wrapping are cut like the weights.

    Before, all ranks train on the same batch, and the mean of 2^n equal gradients is each of them.
    """
    world_size = dist.get_world_size(group)
    for stage in some_stages(2, 3):
        module = net(64, 32)
        twin = Twin(copy.deepcopy(module), world_size, nn.Linear)
        optimizer, theirs = OURS[0](module.parameters()), OURS[1](twin.masters.values())
        for step in range(3):
            twin.backward(lambda *_, t=twin, s=step: loss(t, 32, s, 0).backward())
            loss(module, 32, step, 0).backward()
            for each in (optimizer, theirs):
                take_step(each)
        trained = Trained(module, group, twin, stage=stage)
        trained.check("when it was wrapped")
        trained.train(range(3, 6), (optimizer, theirs))
        for shard, master in zip(trained.model.parameters(), twin.masters.values(), strict=True):
            assert int(optimizer.state[shard]["step"]) == int(theirs.state[master]["step"]) == 6
            assert optimizer.state[shard]["exp_avg"].shape == shard.shape


FOREIGN: list[Make] = [
    lambda p: optim.SGD(p, lr=0.1),
    lambda p: optim.AdamW(p, fused=True),
    lambda p: optim.Adagrad(p),
    lambda p: optim.SGD([{"params": list(p)[2:4]}], lr=0.1),
]


@pytest.mark.parametrize("stepped", [False, True])
def test_another_optimizer_is_refused_at_its_first_step(group: Any, stepped: bool) -> None:
    """Another optimizer would train nothing: its first step says so, whatever it has stepped before."""
    for stage, make in zip(STAGES, FOREIGN, strict=True):
        first = ShardLite(net(), group=group)
        module = net()
        optimizer = make(module.parameters())
        if stepped:
            loss(module, 16, 0, 0).backward()
            optimizer.step()
            module.zero_grad()
        del first
        gc.collect()
        model = ShardLite(module, stage=stage, group=group)
        loss(model, 16, 0, 0).backward()
        before = [shard.detach().clone() for shard in model.parameters()]
        remedy = r"build it from `parameters\(\)` of the ShardLite model, after wrapping"
        for _ in range(2):
            with pytest.raises(LayoutError, match=f"{type(optimizer).__name__} holds the unsharded .*{remedy}"):
                optimizer.step()
        for shard, expected in zip(model.parameters(), before, strict=True):
            same_bits("a weight", shard.detach(), expected)


AROUND = {
    "DataParallel": nn.DataParallel,
    "Sequential": lambda model: nn.Sequential(model, nn.Tanh()),
    "module": lambda model: model.module,
}


@pytest.mark.stages(0, 3)
@pytest.mark.parametrize("around", AROUND)
def test_an_optimizer_over_a_module_around_the_model_is_refused(group: Any, around: str, stage: int) -> None:
    """`parameters()` of such a module are the wrapped module's own."""
    model = ShardLite(net(), stage=stage, group=group)
    outer = AROUND[around](model)
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    later = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    later.add_param_group({"params": list(outer.parameters())})
    loss(model, 16, 0, 0).backward()
    for each in (optimizer, later):
        with pytest.raises(LayoutError, match=r"holds the unsharded .*build it from.* not from a module in or around"):
            each.step()


# ---- optimizers that are not elementwise ----------------------------------------------------------------------------


class OwnLBFGS(optim.LBFGS):
    """A subclass is no more elementwise than its parent."""


class Cautious(optim.SGD):
    """Steps only where the momentum and the gradient agree, and divides by the share of these elements."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            agrees = (param.grad * self.state[param].setdefault("average", param.grad.clone()) > 0).to(param.dtype)
            param.sub_(param.grad * agrees / agrees.mean().clamp(min=1e-3), alpha=0.1)


class Largest(optim.SGD):
    """Raises on the rank that has no element of a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad / param.grad.abs().max())


WHOLE: list[tuple[Make, str]] = [
    (lambda p: optim.Muon([each for each in p if each.ndim == 2]), "WholeParameters"),
    (lambda p: optim.Adafactor(p), "WholeParameters"),
    (lambda p: optim.LBFGS(p, lr=0.1), "Use stage=0"),
    (lambda p: OwnLBFGS(p, lr=0.1), "Use stage=0"),
    (lambda p: Cautious(p), "WholeParameters"),
    (lambda p: Largest(p), "WholeParameters"),
]


def test_optimizers_that_need_whole_matrices_are_refused_where_there_are_none(group: Any) -> None:
    """At stage 0 every rank has whole parameters, so there they train like the twin."""
    for stage in some_stages(0, 3):
        for make, remedy in WHOLE:
            trained = Trained(net(), group, stage=stage)
            optimizer, theirs = make(trained.model.parameters()), make(trained.twin.masters.values())
            trained.backward(0)
            name = type(optimizer).__name__
            words = f"^{name} cannot step shards, because .*{remedy}"
            with pytest.raises(LayoutError, match=words) if stage else nullcontext():
                optimizer.step(lambda: torch.ones(()))
            if stage == 0:
                theirs.step(lambda: torch.ones(()))
            trained.check(name)


class Untried(optim.SGD):
    """Keeps something that only its constructor's caller knows."""

    def __init__(self, params: Any, rate: Callable[[], float]):
        super().__init__(params, lr=rate())
        self.source = torch.nn.Identity()


def test_an_optimizer_without_a_twin_is_warned_of(group: Any) -> None:
    trained = Trained(net(), group)
    optimizers = Untried(trained.model.parameters(), lambda: 0.1), optim.SGD(trained.twin.masters.values(), lr=0.1)
    trained.backward(0)
    with pytest.warns(ShardWarning, match=r"^Untried was not checked, because .*missing.*'rate'.*WholeParameters"):
        optimizers[0].step()
    take_step(optimizers[1])
    trained.check("a step")


# ---- groups, schedulers, zero_grad ----------------------------------------------------------------------------------


def by_dimension(params: Named) -> list[dict[str, Any]]:
    return split_by(params, lambda _, param: param.ndim < 2)


def by_name(params: Named) -> list[dict[str, Any]]:
    return split_by(params, lambda name, _: name.endswith("bias") or "norm" in name, names=True)


@pytest.mark.parametrize("rule", [by_dimension, by_name])
@pytest.mark.ranks(2, WIDE)
def test_groups_by_dimension_and_by_name(group: Any, rule: Callable[[Named], list[dict[str, Any]]]) -> None:
    """Rules that look at dimensions and names choose the same for shards, however few of them a rank has."""
    for stage in (0, 3):
        for ours, theirs in (OURS, FOREACH):
            trained = Trained(net(), group, stage=stage)
            groups = rule(trained.model.named_parameters())
            optimizers = ours(groups), theirs(rule(trained.twin.masters.items()))
            trained.train(range(3), optimizers)
            assert len(groups[0]["params"]) == 2
            assert optimizers[0].param_groups[0].get("param_names") == optimizers[1].param_groups[0].get("param_names")


SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "lambda": lambda o: LambdaLR(o, [lambda t: 0.5**t, lambda t: 1 / (1 + t)]),
    "one-cycle": lambda o: OneCycleLR(o, max_lr=[0.1, 0.05], total_steps=6, cycle_momentum=True),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.2),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.ranks(2, WIDE)
def test_schedulers(group: Any, name: str) -> None:
    """A scheduler that needs a loss gets one that all ranks know."""
    losses = (5.0, 3.0, 2.9, 2.8, 1.0)
    for ours, theirs in (OURS, MOMENTUM):
        trained = Trained(net(), group)
        optimizers = (
            ours(two_groups(trained.model.named_parameters())),
            theirs(two_groups(trained.twin.masters.items())),
        )
        schedulers = [SCHEDULES[name](optimizer) for optimizer in optimizers]
        rates = []
        for step, value in enumerate(losses):
            trained.backward(step)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                take_step(optimizer)
                scheduler.step(*[value] if name == "plateau" else [])
            trained.check(f"{name}, step {step}")
            rates.append([float(each["lr"]) for each in optimizers[0].param_groups])
            assert rates[-1] == [float(each["lr"]) for each in optimizers[1].param_groups]
        assert len({tuple(each) for each in rates}) > 2


@pytest.mark.parametrize(("group", "ours"), [(2, True), (2, False), (4, True)], indirect=["group"])
def test_zero_grad_in_both_ways(group: Any, ours: bool) -> None:
    """Gradients that are set to zero are added to; those that are dropped are made anew."""
    for stage in some_stages(0, 3):
        for set_to_none in (True, False):
            trained = Trained(net(), group, stage=stage)
            optimizers = [make(p) for make, p in zip(OURS if ours else MOMENTUM, sides(trained), strict=True)]
            for step in range(3):
                trained.backward(step)
                trained.check(f"gradients of step {step}", lambda tensor: tensor.grad)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
                trained.check(f"after zero_grad({set_to_none=})", lambda tensor: tensor.grad)
                trained.check(f"step {step}")
            for optimizer in optimizers:
                optimizer.step()  # of zeros, or of nothing
            trained.check("a step without a backward")


def sides(trained: Trained) -> tuple[Iterable[nn.Parameter], Iterable[nn.Parameter]]:
    return trained.model.parameters(), trained.twin.masters.values()
