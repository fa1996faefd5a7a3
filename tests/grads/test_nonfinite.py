"""If any rank has a NaN or an infinity, all ranks skip the step, and only the count of skipped steps changes."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from shardlite import AdamW, NonFiniteError, NonFiniteWarning, Precision, ShardLite
from shardlite.grads.skip_step import LIMIT
from tests.support.twins.sharded import WIDE, accumulating, same_states, slow, some_stages, take_step, without_warnings

WORLDS = (1, 2, WIDE)
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "ours": lambda params: AdamW(params, lr=0.02, weight_decay=0.1),
    "foreach": lambda params: optim.AdamW(params, lr=0.02, weight_decay=0.1, foreach=True),
    "fused": lambda params: optim.AdamW(params, lr=0.02, weight_decay=0.1, fused=True),
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
}


@dataclass(frozen=True)
class Poison:
    """What is wrong with a backward on rank `rank`: the loss, or an element of the gradient of `parameter`."""

    value: float
    rank: int
    parameter: str | None = None


POISONS = (
    Poison(math.nan, rank=-1),
    Poison(math.inf, rank=0),
    Poison(math.inf, rank=0, parameter="4.bias"),
    Poison(-math.inf, rank=-1, parameter="4.weight"),
)


def net() -> nn.Sequential:
    """Three units whose parameters are cut within."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 5))


def tiny() -> nn.Sequential:
    """Two slots of 32 elements: of four ranks two have nothing. Indices as in `net`."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity(), nn.Identity(), nn.Linear(7, 2))


def wrap(module: nn.Module, group: Any, **options: Any) -> ShardLite:
    return ShardLite(module, group=group, units=nn.Linear, **options)


def backward(model: ShardLite, group: Any, seed: int, poison: Poison | None = None) -> None:
    """Run a backward on a batch of this rank."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    here = poison is not None and poison.rank % world_size == rank
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(100 * seed + rank))
    with poisoned(model, poison) if here and poison.parameter else nullcontext():
        loss = model(x).square().mean()
        (loss * poison.value if here and poison.parameter is None else loss).backward()


def stepped(
    model: ShardLite, optimizer: optim.Optimizer, group: Any, poison: Poison | None = None, seed: int = 0
) -> None:
    backward(model, group, seed, poison)
    take_step(optimizer)


@contextmanager
def poisoned(model: ShardLite, poison: Poison) -> Iterator[None]:
    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = poison.value
        return grad

    hook = model.module.get_parameter(poison.parameter).register_hook(spoil)
    yield
    hook.remove()


def bad_here(model: ShardLite) -> bool:
    return any(not shard.grad.isfinite().all() for shard in model.parameters())


def state_of(model: ShardLite, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Copies of the shards and of all that the optimizer keeps of them."""
    state = {name: shard.detach().clone() for name, shard in model.named_parameters()}
    for name, shard in model.named_parameters():
        for key, value in optimizer.state[shard].items():
            if isinstance(value, Tensor):  # SGD has no momentum before its first step
                state[f"{key} of {name}"] = value.clone()
    return state


@without_warnings
def skips_body(group: Any, stages: Sequence[int], make: Callable[[], nn.Module]) -> list[int]:
    """Return how often the steps of each optimizer and stage say that they were made on this rank."""
    steps = []
    for stage in stages:
        for i, (kind, optimizer_of) in enumerate(OPTIMIZERS.items()):
            what = f"stage {stage}, {kind}"
            model, clean = (wrap(make(), group, stage=stage) for _ in range(2))
            optimizers = [optimizer_of(each.parameters()) for each in (model, clean)]
            set_to_none = (i + stage) % 2 == 0
            for seed, poison in ((0, None), (1, POISONS[(i + stage) % len(POISONS)]), (2, None)):
                before = state_of(model, optimizers[0])
                backward(model, group, seed, poison)
                optimizers[0].step()
                if poison is None:
                    backward(clean, group, seed)
                    optimizers[1].step()
                    same_states(f"{what}, step {seed}", state_of(model, optimizers[0]), state_of(clean, optimizers[1]))
                else:
                    same_states(f"{what}, left out", state_of(model, optimizers[0]), before)
                    everywhere: list[bool] = [False] * dist.get_world_size(group)
                    dist.all_gather_object(everywhere, bad_here(model), group=group)
                    assert any(everywhere), "gradients are gone or not as they were"
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=set_to_none)
                for shard in model.parameters():
                    assert (shard.grad is None) is set_to_none
            assert (model.skipped_steps, clean.skipped_steps) == (1, 0), what
            steps += [int(each["step"]) for each in optimizers[0].state.values() if "step" in each]
    return steps


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_bad_step_is_left_out_on_all_ranks_and_leaves_no_trace(cluster, world_size):
    stages = some_stages(0, 3)
    for steps in cluster.run(skips_body, world_size, stages, net):
        assert set(steps) == {2}


def test_a_rank_with_nothing_skips_like_the_others(cluster):
    tables = cluster.run(skips_body, 4, (1, 3), tiny)
    assert all(set(steps) == {2} and len(steps) == 2 * 3 * 2 for steps in tables)


@pytest.mark.ranks(4)
@without_warnings
def test_all_replicas_skip(group: Any) -> None:
    """Bad on one rank of one of the two groups that have a model each."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for poison in POISONS:
        model = wrap(net(), mesh)
        optimizer = OPTIMIZERS["ours"](model.parameters())
        for seed, bad in ((0, None), (1, poison)):
            before = state_of(model, optimizer)
            stepped(model, optimizer, group, bad, seed)
        same_states(f"{poison}", state_of(model, optimizer), before)
        assert model.skipped_steps == 1


# ---- accumulation ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks(*WORLDS)
@without_warnings
def test_what_was_accumulated_counts(group: Any) -> None:
    """A NaN that came in an earlier micro-batch is in the sum."""
    for stage in some_stages(1, 3):
        for mode, poison in zip(("local", "sharded", "step"), POISONS, strict=False):
            model, clean = (wrap(net(), group, stage=stage) for _ in range(2))
            optimizers = [OPTIMIZERS["ours"](each.parameters()) for each in (model, clean)]
            before = state_of(model, optimizers[0])
            for step, bad in enumerate((poison, None)):
                for each, optimizer in list(zip((model, clean), optimizers, strict=True))[: 2 if bad is None else 1]:
                    with accumulating(each, mode):
                        backward(each, group, 2 * step, bad)
                    stepped(each, optimizer, group, seed=2 * step + 1)
                if bad is not None:
                    same_states(f"stage {stage}, {mode}", state_of(model, optimizers[0]), before)
            same_states(f"stage {stage}, {mode}", *map(state_of, (model, clean), optimizers))
            assert model.skipped_steps == 1


# ---- counting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "stage"), [(1, 3), (2, 0), (4, 3)], indirect=["group"])
@without_warnings
def test_too_many_in_a_row_are_an_error_on_all_ranks(group: Any, stage: int) -> None:
    model = wrap(tiny(), group, stage=stage)
    optimizer = OPTIMIZERS["ours"](model.parameters())
    step = partial(stepped, model, optimizer, group)
    for _ in range(2):
        for _ in range(LIMIT - 1):
            step(POISONS[0])
        step()
    for _ in range(LIMIT - 1):
        step(POISONS[1])
    before = state_of(model, optimizer)
    with pytest.raises(NonFiniteError, match="20 steps in a row were skipped"):
        step(POISONS[1])
    same_states("after the error", state_of(model, optimizer), before)
    assert model.skipped_steps == 3 * (LIMIT - 1) + 1
    optimizer.zero_grad()
    step()
    assert all(int(each["step"]) == 3 for each in optimizer.state.values())


@pytest.mark.ranks(*WORLDS)
@without_warnings
def test_two_optimizers_leave_out_one_step_together(group: Any) -> None:
    """Each drops its gradients before the other's step."""
    model = wrap(net(), group)
    params = dict(model.named_parameters())
    weights, biases = ([p for name, p in params.items() if name.endswith(kind)] for kind in ("weight", "bias"))
    optimizers = OPTIMIZERS["ours"](weights), OPTIMIZERS["sgd"](biases)
    for seed in range(3):
        before = {name: param.detach().clone() for name, param in params.items()}
        backward(model, group, seed, Poison(math.nan, rank=0, parameter="4.weight") if seed else None)
        for optimizer in optimizers:
            take_step(optimizer)
        after = {name: param.detach() for name, param in params.items()}
        if seed:
            same_states("left out", after, before)
        else:
            assert all(p.numel() == 0 or not torch.equal(before[name], p) for name, p in after.items())
        assert model.skipped_steps == seed


@without_warnings
def test_parameters_outside_the_model_are_left_alone_too(group: Any) -> None:
    """An optimizer makes a step or does not, whatever else it holds."""
    model, other = wrap(net(), group), nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS["ours"]([*model.parameters(), other])
    for poison in (POISONS[0], None):
        backward(model, group, 0, poison)
        other.square().sum().backward()
        optimizer.step()
        assert torch.equal(other, torch.ones(3)) is (poison is not None)
        optimizer.zero_grad()


# ---- steps that end otherwise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "stage"), [(1, 3), (2, 3), (2, 0)], indirect=["group"])
@without_warnings
def test_steps_with_a_closure(group: Any, stage: int) -> None:
    """A step that computes its gradients itself is judged by those."""
    for kind, optimizer_of in OPTIMIZERS.items():
        model, clean = (wrap(net(), group, stage=stage) for _ in range(2))
        optimizers = [optimizer_of(each.parameters()) for each in (model, clean)]

        def step(which: int, seed: int, poison: Poison | None = None) -> None:
            def closure() -> float:
                optimizers[which].zero_grad()  # noqa: B023 (called at once)
                backward((model, clean)[which], group, seed, poison)  # noqa: B023
                return 7.0

            as_keyword = {"closure": closure} if seed % 2 else {}
            assert optimizers[which].step(*[] if as_keyword else [closure], **as_keyword) == 7.0  # noqa: B023

        for seed, poison in enumerate((None, POISONS[0], POISONS[3], None)):
            before = state_of(model, optimizers[0])
            step(0, seed, poison)
            if poison is None:
                step(1, seed)
            else:
                same_states(f"{kind}: left out", state_of(model, optimizers[0]), before)
        same_states(kind, *map(state_of, (model, clean), optimizers))
        assert model.skipped_steps == 2


@without_warnings
def test_a_step_that_fails_while_it_is_left_out(group: Any) -> None:
    """Gradients that were put aside for a step that then failed do not come back later."""
    model, clean = (wrap(net(), group) for _ in range(2))
    optimizers = [OPTIMIZERS["ours"](each.parameters()) for each in (model, clean)]
    backward(model, group, 0, POISONS[0])
    hook = optimizers[0].register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizers[0].step()
    hook.remove()
    optimizers[0].zero_grad()
    for each, optimizer in zip((model, clean), optimizers, strict=True):
        backward(each, group, 1)
        optimizer.step()
    same_states("the next step", *map(state_of, (model, clean), optimizers))


# ---- one rank, where nothing is reduced -----------------------------------------------------------------------------


@pytest.mark.ranks(1)
@without_warnings
def test_sparse_gradients_of_a_single_rank(group: Any) -> None:
    model = ShardLite(nn.Embedding(5, 3, sparse=True), group=group)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for value, changes in ((math.nan, False), (1.0, True)):
        before = state_of(model, optimizer)["weight"]
        take_step(optimizer, model(torch.tensor([1, 3])).sum() * value)
        assert torch.equal(state_of(model, optimizer)["weight"], before) is not changes


@pytest.mark.ranks(1, 2)
@without_warnings
def test_a_gradient_of_a_parameter_that_was_unfrozen(group: Any) -> None:
    """A parameter that is trainable later is looked at too, even if no other one is."""
    module = net()
    module[4].requires_grad_(False)
    model = wrap(module, group)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for seed, poison in enumerate((None, POISONS[2], None, POISONS[2])):
        stepped(model, optimizer, group, poison, seed)
        model.requires_grad_(False)
        module[4].requires_grad_()
    assert model.skipped_steps == 2


# ---- the warning of the first ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "stage"), [(1, 3), (2, 0), slow(4, 1)], indirect=["group"])
def test_the_first_step_that_is_left_out_is_warned_of(group: Any, stage: int) -> None:
    """Each rank hears of the first step that was left out, and of no later one."""
    model = wrap(net(), group, stage=stage)
    step = partial(stepped, model, OPTIMIZERS["ours"](model.parameters()), group)
    assert warned(step) == []
    (message,) = warned(lambda: step(POISONS[0]))
    assert message.startswith(f"rank {dist.get_rank(group)}: step 2 since the model was wrapped was skipped")
    assert "diagnose=True" in message
    assert "skipped_steps" in message
    assert warned(lambda: step(POISONS[0])) == []


def test_the_warning_may_be_an_error(group: Any) -> None:
    """A warning that is an error leaves the gradients where they are, and the step out."""
    model = wrap(net(), group)
    optimizer = OPTIMIZERS["ours"](model.parameters())
    before = state_of(model, optimizer)
    backward(model, group, 0, POISONS[0])
    with pytest.raises(NonFiniteWarning, match="step 1 "):
        optimizer.step()
    same_states("after the error", state_of(model, optimizer), before)
    assert all(shard.grad is not None for shard in model.parameters())


# ---- diagnosis ------------------------------------------------------------------------------------------------------


def warned(run: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(warning.category is NonFiniteWarning for warning in caught), caught
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("group", "stage"), [(1, 3), (2, 0), (2, 2), (4, 3)], indirect=["group"])
def test_on_request_the_first_bad_gradient_of_each_rank_is_named(group: Any, stage: int) -> None:
    """Whether it warns in the backward or at the step, it does so once."""
    last = dist.get_world_size(group) - 1
    wheres = {
        Poison(math.nan, rank=-1, parameter="2.weight"): f"of '2.weight' on rank {last}",
        Poison(math.inf, rank=0, parameter="4.bias"): "of '4.bias' on rank 0",
        Poison(-math.inf, rank=0, parameter="0.bias"): "of '0.bias' on rank 0",
    }
    model, silent = wrap(net(), group, stage=stage, precision=Precision(diagnose=True)), wrap(net(), group, stage=stage)
    for each in (model, silent):
        step = partial(stepped, each, OPTIMIZERS["ours"](each.parameters()), group)
        for poison, where in wheres.items():
            words = [f"gradients are not finite: {where}. The step is skipped"] if each is model else []
            heard = warned(partial(step, poison))
            assert [each for each in heard if not each.startswith("rank")] == words
            assert warned(step) == []


def test_all_ranks_hear_of_all(group: Any) -> None:
    """Every rank has another bad gradient."""
    model = wrap(net(), group, precision=Precision(diagnose=True))
    rank = dist.get_rank(group)
    words = "gradients are not finite: of '0.weight' on rank 0, of '2.bias' on rank 1. The step is skipped"
    poison = Poison(math.nan, rank, ("0.weight", "2.bias")[rank])
    assert warned(lambda: backward(model, group, 0, poison)) == [words]


@without_warnings
def test_a_bad_sum_of_good_gradients_has_no_culprit(group: Any) -> None:
    """The step is left out like others."""
    model = wrap(nn.Sequential(nn.Linear(4, 4)), group, precision=Precision(diagnose=True))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    before = state_of(model, optimizer)
    messages = warned(lambda: (model(torch.ones(1, 4)).sum() * 3e38).backward())
    later = warned(lambda: model(torch.ones(1, 4)).sum().backward())  # added to what is there
    optimizer.step()
    same_states("an overflow", state_of(model, optimizer), before)
    words = "gradients are not finite: only in sums and accumulated gradients. The step is skipped"
    assert later == messages == [words]


# ---- sums, and what was left over ------------------------------------------------------------------------------------


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def finite_after_step(model: ShardLite) -> tuple[bool, int]:
    """Step, and return whether all weights are still finite, and how many steps were skipped."""
    optim.SGD(model.parameters(), lr=0.1).step()
    return all(bool(shard.isfinite().all()) for shard in model.parameters()), model.skipped_steps


@pytest.mark.ranks(1, 2)
@without_warnings
def test_finite_gradients_whose_sum_overflows(group):
    found = []
    for stage in (0, 1, 2, 3):
        for sharded in (False, True):
            model = ShardLite(nn.Linear(4, 4), group=group, stage=stage)
            for _ in range(2):
                with model.no_sync(sharded=sharded):
                    (model(torch.ones(1, 4)).sum() * 1.5e38).backward()
            (model(torch.ones(1, 4)).sum() * 1.5e38).backward()
            found.append(finite_after_step(model))
    assert found == [(True, 1)] * 8


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("partly", [False, True])
@without_warnings
def test_a_gradient_that_the_backward_does_not_touch(group, partly):
    """Freeze a unit, or a part of one, that has a NaN in its gradient; the next backward is a good one."""
    module = two_layers()
    model = ShardLite(module, group=group, units=nn.Linear)
    (model(torch.ones(1, 4)).sum() * math.nan).backward()
    for name, param in module.named_parameters():
        param.requires_grad_(not name.startswith("0.weight" if partly else "0."))
    for name, shard in model.named_parameters():
        if not name.startswith("0."):
            shard.grad = None
    model(torch.ones(1, 4)).sum().backward()
    assert finite_after_step(model) == (True, 1)


@without_warnings
def test_a_sum_of_what_another_rank_has_used(group):
    """Only rank 1 uses the second layer, whose accumulated gradient overflows; its shard may be on rank 0."""
    module = two_layers()
    model = ShardLite(module, group=group, units=lambda name, _: False)
    for _ in range(3):
        with model.gathered():
            y = module[0](torch.ones(1, 4))
            (module[1](y).sum() * 3e38 if group.rank() == 1 else y.sum()).backward()
    assert finite_after_step(model) == (True, 1)
