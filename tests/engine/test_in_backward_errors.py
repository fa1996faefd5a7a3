"""Unsupported uses of `AdamW(in_backward=True)` raise an error, and never hang or give wrong numbers.

Legend: `W` ranks.
"""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from shardlite import AdamW, LayoutError, NonFiniteError, PhaseError, Precision, ShardLite
from tests.support.models.losses import on_rows, on_tokens
from tests.support.models.small import MLP, LanguageModel
from tests.support.models.small import Context as CalledTwice
from tests.support.models.trapped import AnyError, Trapped, loss_of
from tests.support.twins.duos import Duo
from tests.support.twins.sharded import Turn, accumulating, same_bits, same_states, slow, take_step

EVERY_STAGE = pytest.mark.parametrize(
    ("group", "stage"), [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3)], ids=str, indirect=["group"]
)
WIDTH = 12


def wrapped(group: Any, **options: Any) -> ShardLite:
    torch.manual_seed(0)
    return ShardLite(MLP([7, 33, 5]), group=group, units=nn.Linear, **options)


def loss(model: nn.Module, seed: int = 0) -> Tensor:
    return on_rows(model, Turn(seed, torch.distributed.get_rank(), 0))


# ---- order ----------------------------------------------------------------------------------------------------------


@EVERY_STAGE
@pytest.mark.sample(3)
def test_a_backward_before_the_step_is_refused(group: Any, stage: int) -> None:
    """A second backward is refused, changes nothing, and after `step()` training goes on."""
    duo = Duo(lambda: MLP([7, 33, 5]), group, stage=stage, units=nn.Linear)
    duo.step(on_rows)
    model, optimizer = duo.inside.model, duo.inside.optimizer
    for local in (False, True)[: group.size()]:  # a rank that is alone keeps `.grad` there
        duo.backward(on_rows)
        message = r"has taken a step in an earlier backward: call step\(\)"
        with accumulating(model, "local" if local else "step"), pytest.raises(PhaseError, match=message):
            loss(model).backward()
        take_step(optimizer)
        duo.ordinary.finish()
        duo.compare()
        duo.steps += 1
        duo.step(on_rows, ("local", "step"))


@EVERY_STAGE
@pytest.mark.sample(2)
def test_a_graph_that_is_retained(group: Any, stage: int) -> None:
    """Two losses of one forward, one loss twice, with a step between, and inside `no_sync()`."""
    duo = Duo(lambda: MLP([7, 33, 5]), group, stage=stage, units=nn.Linear)
    model, optimizer = duo.inside.model, duo.inside.optimizer
    out = model(torch.ones(2, 7))
    out.sum().backward(retain_graph=True)
    before = model.full_state_dict()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|an earlier backward"):
            out.square().sum().backward()
        optimizer.step()
        model.zero_grad()
    same_states("state", model.full_state_dict(), before)

    def two_losses(model: Callable[..., Any], turn: Turn) -> Tensor:
        out = model(torch.randn(2, 7, generator=turn.generator()))
        if isinstance(model, ShardLite):
            with model.no_sync():
                out.sum().backward(retain_graph=True)
        return out.square().sum()

    fresh = Duo(lambda: MLP([7, 33, 5]), group, stage=stage, units=nn.Linear)
    fresh.step(two_losses)
    fresh.step(two_losses)


@pytest.mark.ranks(1, 2)
def test_hyper_parameters_that_come_too_late(group: Any) -> None:
    """A learning rate for the step that was taken already."""
    for lr in (0.1, torch.tensor(0.1)):
        model = wrapped(group)
        optimizer = AdamW(model.parameters(), lr=lr, in_backward=True)
        loss(model).backward()
        for each in optimizer.param_groups:
            if isinstance(each["lr"], Tensor):
                each["lr"].fill_(0.2)
            else:
                each["lr"] = 0.2
        with pytest.raises(PhaseError, match=r"hyper-parameters were changed between the backward and step\(\)"):
            optimizer.step()
        loss(model).backward()
        optimizer.step()
        assert {int(state["step"]) for state in optimizer.state.values()} == {2}


# ---- what it does not go with ---------------------------------------------------------------------------------------


@EVERY_STAGE
@pytest.mark.sample(2)
def test_what_wants_gradients_afterwards_is_refused(group: Any, stage: int) -> None:
    model = wrapped(group, stage=stage)
    optimizer = AdamW(model.parameters(), in_backward=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss(model)).backward()
    for call in (
        lambda: model.clip_grad_norm_(1.0),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: scaler.step(optimizer),
        lambda: optim.SGD(model.parameters(), lr=0.1).step(),
    ):
        with pytest.raises(PhaseError, match=r"AdamW\(in_backward=True\) has already stepped with each gradient"):
            call()
    optimizer.step()
    loss(model).backward()
    optimizer.step()


def test_optimizers_that_do_not_fit_are_refused(group: Any) -> None:
    """One that lacks parameters, two, and one whose gradients are there already."""
    model = wrapped(group)
    params = list(model.parameters())
    some = AdamW(params[:-1], in_backward=True)
    with pytest.raises(LayoutError, match=r"hold all trainable parameters .*: it lacks '2\.bias'"):
        loss(model).backward()
    del some
    whole, other = (AdamW(params, in_backward=True) for _ in range(2))
    with pytest.raises(LayoutError, match="there are 2"):
        loss(model).backward()
    del other
    model.zero_grad()
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(PhaseError, match=r"would ignore the gradient that the shard of '0\.weight' already has"):
        loss(model).backward()
    model.zero_grad()
    loss(model).backward()
    whole.step()


@pytest.mark.ranks(1, 2)
def test_an_optimizer_that_was_dropped_steps_no_more(group: Any) -> None:
    """One that was dropped steps no more, and one that was not is found out."""
    model = wrapped(group)
    first = AdamW(model.parameters(), in_backward=True)
    loss(model).backward()
    first.step()
    gc.disable()
    try:
        del first
        second = optim.SGD(model.parameters(), lr=0.1)
        loss(model).backward()
        assert all(param.grad is not None for param in model.parameters())
        before = model.full_state_dict()
        second.step()
        assert any(not torch.equal(value, before[name]) for name, value in model.full_state_dict().items())
    finally:
        gc.enable()


@pytest.mark.ranks(1)
def test_a_copied_optimizer(group: Any) -> None:
    """A copy of an optimizer of plain parameters steps in the backward, too."""
    layer = nn.Linear(3, 2)
    optimizer = AdamW(layer.parameters(), in_backward=True)
    twin, theirs = copy.deepcopy((layer, optimizer))
    for each, its in ((layer, optimizer), (twin, theirs)):
        each(torch.ones(1, 3)).sum().backward()
        assert each.weight.grad is None
        its.step()
    same_bits("weight", twin.weight.detach(), layer.weight.detach())


# ---- weights that are used again ------------------------------------------------------------------------------------


class Stopping(nn.Module):
    """A layer whose weight brings no gradient where it is told so. [B, D] -> [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor, stop: bool) -> Tensor:
        return torch.tanh(x @ (self.weight.detach() if stop else self.weight))


class UsedAgain(nn.Module):
    """Each weight is used without a gradient first, so in the backward last, when its own gradient is complete."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Stopping() for _ in range(4))
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for stop in (True, False):
            for block in self.blocks:
                x = checkpoint(block, x, stop, use_reentrant=False) if self.recomputed else block(x, stop)
        return x


class UsedTogether(Stopping):
    """Both uses are in one module. [B, D] -> [B, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ self.weight.detach()) @ self.weight)


def on_wide(model: Callable[..., Any], turn: Turn) -> Tensor:
    return model(torch.randn(3, WIDTH, generator=turn.generator())).square().mean()


@pytest.mark.parametrize("kind", ["calls", "recomputed", "one-call"])
@pytest.mark.ranks(2, slow(3))
@pytest.mark.stages(0, 3)
def test_a_weight_that_is_used_after_its_gradient_was_complete(group: Any, kind: str, stage: int) -> None:
    """The bits of the ordinary step, or an error in the backward."""
    makes: dict[str, Callable[[], nn.Module]] = {
        "calls": UsedAgain,
        "recomputed": lambda: UsedAgain(recomputed=True),
        "one-call": lambda: nn.Sequential(*(UsedTogether() for _ in range(3))),
    }
    kinds = (Stopping, UsedTogether)
    for options in ({}, {"precision": Precision(compute=torch.bfloat16, master="split24")}, {"prefetch": 0}):
        duo = Duo(makes[kind], group, stage=stage, units=kinds, **options)
        duo.ordinary.backward(on_wide, [Turn(0, duo.rank, 0)], ("step",))
        if kind == "one-call" and stage == 3 and group.size() > 1:  # nothing is gathered anew
            duo.inside.backward(on_wide, [Turn(0, duo.rank, 0)], ("step",))
            duo.finish()
        else:
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation|is recomputed in a backward"):
                duo.inside.backward(on_wide, [Turn(0, duo.rank, 0)], ("step",))


@EVERY_STAGE
@pytest.mark.sample(3)
def test_gradients_of_gradients(group: Any, stage: int) -> None:
    """A gradient penalty with `create_graph`, whose inner gradients are those of inputs."""

    def penalised(model: Callable[..., Any], turn: Turn) -> Tensor:
        x = torch.randn(3, 7, generator=turn.generator(), requires_grad=True)
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    duo = Duo(lambda: MLP([7, 33, 5]), group, stage=stage, units=nn.Linear)
    for _ in range(2):
        duo.step(penalised)


@pytest.mark.stages(0, 2, 3)
def test_a_penalty_in_a_backward_of_its_own(group: Any, stage: int) -> None:
    """The first backward has stepped weights that the second needs. In `no_sync()` it steps nothing."""

    def parts(model: nn.Module) -> tuple[Tensor, Tensor]:
        x = torch.ones(3, 7, requires_grad=True) * (1 + group.rank())
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out, slope.square().sum()

    torch.manual_seed(0)
    module, twin = MLP([7, 33, 5]), MLP([7, 33, 5])
    twin.load_state_dict(module.state_dict())
    model, wrong = (ShardLite(copy.deepcopy(module), group=group, stage=stage) for _ in range(2))
    out, penalty = parts(wrong)
    stepping = AdamW(wrong.parameters(), in_backward=True)
    out.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"steps in every backward.*no_sync\(\)" if stage == 3 else "inplace operation"
    ):
        penalty.backward()
    del stepping
    optimizer, ordinary = (
        AdamW(model.parameters(), lr=0.01, in_backward=True),
        torch.optim.AdamW(twin.parameters(), lr=0.01),
    )
    for _ in range(2):
        out, penalty = parts(model)
        with model.no_sync():
            out.backward(retain_graph=True)
        penalty.backward()
        optimizer.step()
        sum(parts(twin)).backward()
        for param in twin.parameters():
            dist.all_reduce(param.grad, group=group)
            param.grad /= group.size()
        ordinary.step()
        ordinary.zero_grad()
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name])


@pytest.mark.ranks(1)
def test_parts_of_a_gradient_on_one_rank_are_found_out(group: Any) -> None:
    """On one rank a reentrant backward brings parts of a gradient, which must not be stepped by."""
    model = ShardLite(CalledTwice(reentrant=True), group=group)
    optimizer = AdamW(model.parameters(), in_backward=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|earlier backward"):
        model(torch.randn(2, 6, requires_grad=True)).sum().backward()
    del optimizer


# ---- failures -------------------------------------------------------------------------------------------------------


def breaks_off(group: Any, stage: int, places: tuple[int, ...]) -> dict[str, Tensor]:
    """An exception in the backward, on all ranks; return the weights afterwards.

    Units that all ranks had reduced are stepped, others are as they were: the same on all ranks, and in all that they
    compute with.
    """
    duo = Duo(Trapped, group, stage=stage)
    duo.step(loss_of)
    model, optimizer = duo.inside.model, duo.inside.optimizer
    before = model.full_state_dict()
    duo.ordinary.backward(loss_of, [Turn(1, duo.rank, 0)], ("step",))
    duo.ordinary.finish()
    stepped = duo.ordinary.model.full_state_dict()
    trap = model.module.traps[places[duo.rank % len(places)]]
    trap.error, trap.backwards = AnyError("in the backward"), True
    with pytest.raises(AnyError):
        loss_of(model, Turn(1, duo.rank, 0)).backward()
    trap.error = None
    with pytest.raises(PhaseError, match=r"has stepped only some of the weights: continue from a checkpoint"):
        optimizer.step()
    model.zero_grad()
    with pytest.raises(PhaseError, match="earlier backward"):
        loss_of(model, Turn(1, duo.rank, 0)).backward()
    optimizer.step()
    full = model.full_state_dict()
    kinds = set()
    for name, value in full.items():
        kind = [torch.equal(value, stepped[name]), torch.equal(value, before[name])]
        assert any(kind), f"{name} is neither new nor old"
        kinds.add(kind[0])
        counts = {int(optimizer.state[shard]["step"]) for n, shard in model.named_parameters() if n == name}
        assert counts == {2 if kind[0] else 1}, name
    assert kinds == {True, False}
    with model.gathered(writeback=False):
        for name, param in model.module.named_parameters():
            same_bits(f"{name}, gathered", param.detach(), full[name])
    loss_of(model, Turn(2, duo.rank, 0)).backward()
    optimizer.step()
    return full


@pytest.mark.parametrize(
    ("world_size", "stage", "places"),
    [(2, 0, (1,)), (2, 1, (1,)), (2, 2, (1,)), (2, 3, (1,)), (2, 3, (1, 2)), (3, 2, (2, 0, 1))],
    ids=str,
)
def test_an_exception_in_the_backward_leaves_each_unit_old_or_new(cluster, world_size, stage, places):
    first, *others = cluster.run(breaks_off, world_size, stage, places)
    for each in others:
        same_states("state", each, first)


def one_fails(group: Any, stage: int) -> None:
    """Body of a rank: rank 1 raises in its backward, and its process ends."""
    model = ShardLite(Trapped(), group=group, stage=stage)
    optimizer = AdamW(model.parameters(), in_backward=True)
    if group.rank() == 1:
        trap = model.module.traps[1]
        trap.error, trap.backwards = AnyError("on one rank"), True
    loss_of(model, Turn(0, group.rank(), 0)).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_an_exception_on_one_rank_is_an_error_on_all(doomed, stage, tmp_path):
    first, second = doomed.run(one_fails, 2, stage, directory=tmp_path)
    assert second.kind == "AnyError"
    assert first.kind in ("CommError", "DesyncError"), first.text


@pytest.mark.parametrize(("group", "stage"), [(1, 3), (2, 0), (3, 1), (2, 2), (3, 3)], indirect=["group"])
def test_not_a_number_on_one_rank_is_an_error_on_all(group: Any, stage: int) -> None:
    """The last rank's gradients are NaN. All raise at the step, which no rank may leave out alone."""
    model = wrapped(group, stage=stage)
    optimizer = AdamW(model.parameters(), in_backward=True)
    loss(model).backward()
    optimizer.step()
    factor = float("nan") if group.rank() == group.size() - 1 else 1.0
    (loss(model) * factor).backward()
    with pytest.raises(NonFiniteError, match="in a step that was taken in the backward"):
        optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_an_exception_while_gradients_are_accumulated(group: Any) -> None:
    """An exception in `no_sync()` has stepped nothing."""
    duo = Duo(lambda: LanguageModel(), group)
    duo.step(on_tokens)
    for side in duo.sides:
        handle = side.model.module.blocks[1].up.weight.register_hook(_fail)
        with pytest.raises(AnyError), side.model.no_sync():
            on_tokens(side.model, Turn(7, duo.rank, 0)).backward()
        handle.remove()
        side.model.zero_grad()
    duo.step(on_tokens, ("local", "step"))


def _fail(_: Tensor) -> None:
    raise AnyError("in a hook")
