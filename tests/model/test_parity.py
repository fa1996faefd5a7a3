"""Sharded training gives the bits of plain data parallel: losses, gradients, norms and weights, step after step.

A plain twin (see `plain.py`) is trained once on the batches of all ranks, in one process. Then every rank trains a
sharded model on its own batches, at every stage, and compares it with what the twin was at each step.

Legend: `W` ranks.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from shardlite import ShardLite
from shardlite.wrapping.partition import UnitPolicy
from tests.support.models.small import (
    MLP,
    VOCABULARY,
    Branches,
    Branching,
    Context,
    LanguageModel,
    MixedDtypes,
    Scale,
    compiled,
    frozen,
    with_lora,
)
from tests.support.ranks.cluster import Cluster
from tests.support.twins.plain import RECIPES, Mean, Recipe, Twin, ring_mean, simple_mean
from tests.support.twins.sharded import Loss, Turn, same_bits, same_states, slow

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 3, 4)


def on_tokens(model: nn.Module, turn: Turn) -> Tensor:
    """Predict the next token. The seed is for dropout."""
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=turn.generator())
    torch.manual_seed(turn.generator().initial_seed())
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def on_rows(width: int, numel: int = 5) -> Loss:
    """Fit random rows of this width."""

    def loss(model: nn.Module, turn: Turn) -> Tensor:
        y = model(torch.randn(numel, width, generator=turn.generator()))
        return functional.mse_loss(y, torch.randn(y.shape, generator=turn.generator()))

    return loss


def on_branches(model: nn.Module, turn: Turn) -> Tensor:
    """Branch 0 is used by the last rank only, branch 1 by the others and not at every step, branch 2 by none."""
    x = torch.randn(5, 6, generator=turn.generator())
    others = 1 if turn.step % 2 == 0 else None
    return model(x, 0 if turn.rank == 1 else others).square().mean()


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    make: Callable[[], nn.Module]
    loss: Loss
    units: UnitPolicy = None
    steps: int = 3
    micros: int = 1
    """Backwards that are reduced together: all but the last run under `no_sync()`."""

    rounds: int = 1
    """How often that happens before a step."""

    worlds: Sequence[int] = WORLDS
    options: dict[str, Any] = field(default_factory=dict)
    """Of `ShardLite`."""

    disturb: Callable[[nn.Module, int], None] | None = None
    """Does something to the sharded model of a rank, not to the twin."""

    compiled: bool = False


def sleepy(module: nn.Module, rank: int) -> None:
    """Let each rank be late at other modules, in forward and in backward."""

    def sleep(place: int) -> None:
        time.sleep(0.03 * ((5 * place + 3 * rank) % 4))

    for place, each in enumerate(module.children()):

        def late(_: nn.Module, __: Any, y: Tensor, place: int = place) -> None:
            sleep(place)
            if y.requires_grad:
                y.register_hook(lambda _: sleep(place + 1))

        each.register_forward_hook(late)


def language_model(**options: Any) -> Callable[[], nn.Module]:
    return partial(LanguageModel, **{"blocks": 3, **options})


def lora(**options: Any) -> Callable[[], nn.Module]:
    return lambda: with_lora(LanguageModel(**{"blocks": 3, "tied": False, **options}))


def compiled_blocks(**options: Any) -> Callable[[], nn.Module]:
    return lambda: compiled(LanguageModel(blocks=2), **options)


CASES = {
    "tied": Case(language_model(), on_tokens),
    "untied": Case(language_model(tied=False), on_tokens),
    "frozen": Case(
        lambda: frozen(LanguageModel(blocks=3), lambda name: "qkv" in name or "blocks.1" in name), on_tokens
    ),
    "lora": Case(lora(), on_tokens),
    **{
        f"{name}-{'reentrant' if reentrant else 'nonreentrant'}-{span}": Case(
            make(blocks=4, dropout=0.1, reentrant=reentrant, span=span),
            on_tokens,
            worlds=(2, 3),
            options={"prefetch": 2 - span},  # fewer buffers than a span has blocks
        )
        for name, make in (("tied", language_model), ("lora", lora))
        for reentrant in (True, False)
        for span in (1, 2)
    },
    "mixed-dtypes": Case(MixedDtypes, on_rows(7)),
    "mixed-dtypes-one-unit": Case(MixedDtypes, on_rows(7), units=lambda name, module: False),
    "below-world-size": Case(
        lambda: nn.Sequential(Scale(False), Scale(True), Scale(True), nn.Linear(2, 1)), on_rows(2), units=Scale
    ),
    "called-twice-or-never": Case(Context, on_rows(6)),
    "called-twice-reentrant": Case(lambda: Context(reentrant=True), on_rows(6), worlds=(2, 3)),
    "called-twice-nonreentrant": Case(lambda: Context(reentrant=False), on_rows(6), worlds=(2, 3)),
    "used-on-one-rank": Case(Branching, on_branches, units=Branches, steps=4),
    "no-sync": Case(language_model(), on_tokens, micros=3),
    "no-sync-checkpointed": Case(language_model(reentrant=True, span=2), on_tokens, micros=2),
    "no-sync-branches": Case(Branching, on_branches, units=Branches, micros=2),
    "two-backwards": Case(language_model(), on_tokens, rounds=2),
    "two-backwards-no-sync": Case(MixedDtypes, on_rows(7), micros=2, rounds=2),
    "compiled": Case(compiled_blocks(in_place=True, backend="aot_eager"), on_tokens, worlds=(2,), compiled=True),
    "compiled-children": Case(
        compiled_blocks(in_place=False, backend="aot_eager"), on_tokens, worlds=(2,), compiled=True
    ),
    "inductor": Case(lambda: compiled(Context(), in_place=True), on_rows(6), worlds=(2,), compiled=True),
    "large-and-late": Case(
        lambda: MLP([1024, 2560, 1024]), on_rows(1024), units=nn.Linear, steps=2, worlds=(2, 3), disturb=sleepy
    ),
    "no-prefetch": Case(language_model(), on_tokens, worlds=(3,), options={"prefetch": 0}),
    "prefetch-all": Case(language_model(), on_tokens, worlds=(2,), options={"prefetch": 5}),
}


CLIPPING = {1: (0.02, 2.0), 2: (0.002, float("inf"))}
"""At which steps gradients are clipped: `(max_norm, norm_type)`. The norms of all cases are larger before."""


@dataclass(frozen=True)
class Step:
    """What one step of the twin was: losses by rank, the norm if it was clipped, gradients, and weights after it."""

    losses: list[list[Tensor]]
    norm: Tensor | None
    grads: dict[str, Tensor | None]
    weights: dict[str, Tensor]


Part = Callable[[str, Tensor, int], Tensor]
"""From the name of a parameter, a tensor like the whole of it, and a rank to what that rank's shard has of it."""


class Training:
    """A model with its optimizer; `schedule` is stepped with it."""

    def __init__(self, params: Iterable[nn.Parameter], recipe: Recipe, make: Callable[..., Optimizer]):
        self.optimizer = make(recipe.groups(params))
        self.schedule = recipe.schedule(self.optimizer) if recipe.schedule else None

    def step(self) -> None:
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()


def backwards(case: Case, model: nn.Module, step: int, round_: int, rank: int) -> list[Tensor]:
    """Run the micro-batches of one rank that are reduced together, and return their losses."""
    losses = []
    for micro in range(case.micros):
        more = micro < case.micros - 1 and isinstance(model, ShardLite)
        with model.no_sync() if more else nullcontext():
            loss = case.loss(model, Turn(step, rank, 10 * round_ + micro))
            loss.backward()
        losses.append(loss.detach())
    return losses


def train_twin(twin: Twin, case: Case, recipe: Recipe) -> list[Step]:
    training = Training(twin.masters.values(), recipe, recipe.twin or recipe.make)
    steps = []
    for step in range(case.steps):
        losses: list[list[Tensor]] = [[] for _ in range(twin.world_size)]
        for round_ in range(case.rounds):
            results = twin.backward(lambda model, rank, s=step, r=round_: backwards(case, model, s, r, rank))
            losses = [before + new for before, new in zip(losses, results, strict=True)]
        norm = twin.clip_grad_norm(*CLIPPING[step]) if step in CLIPPING else None
        grads = {name: copied(param.grad) for name, param in twin.masters.items()}
        training.step()
        training.optimizer.zero_grad()
        weights = {name: param.detach().clone() for name, param in twin.masters.items()}
        steps.append(Step(losses, norm, grads, weights))
    return steps


def train_sharded(model: ShardLite, case: Case, recipe: Recipe, part: Part, steps: Sequence[Step], rank: int) -> None:
    """Train like the twin, and compare all along what this rank has: nothing is gathered for the comparison."""

    def check(what: str, name: str, got: Tensor, whole: Tensor) -> None:
        expected = whole.reshape(-1) if model.stage == 0 else part(name, whole, rank)
        same_bits(f"stage {model.stage}, step {step}: {what} of {name!r}", got.reshape(-1), expected)

    training = Training(model.parameters(), recipe, recipe.make)
    for step, expected in enumerate(steps):
        losses = [each for r in range(case.rounds) for each in backwards(case, model, step, r, rank)]
        for got, loss in zip(losses, expected.losses[rank], strict=True):
            same_bits(f"stage {model.stage}, step {step}: the loss", got, loss)
        if expected.norm is not None:
            norm = model.clip_grad_norm_(*CLIPPING[step])
            same_bits(f"stage {model.stage}, step {step}: the norm", norm, expected.norm)
        for name, shard in model.named_parameters():
            grad = expected.grads[name]
            assert (shard.grad is None) == (grad is None), f"step {step}: {name!r}: {shard.grad=}, the twin has {grad}"
            if grad is not None:
                check("gradient", name, shard.grad, grad)
        training.step()
        training.optimizer.zero_grad()
        for name, shard in model.named_parameters():
            check("weight", name, shard, expected.weights[name])


def copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def check_twin(steps: Sequence[Step], start: dict[str, Tensor]) -> None:
    """Make sure that the comparison means something: what had a gradient has moved, the rest not; norms are norms."""
    for name, first in start.items():
        trained = any(step.grads[name] is not None for step in steps) and first.numel() > 0
        moved = not torch.equal(first, steps[-1].weights[name])
        assert moved == trained, f"{name}: the twin has {'changed' if moved else 'not changed'} it"
    for i, step in enumerate(steps):
        if i in CLIPPING:
            check_norm(step, *CLIPPING[i])


def check_norm(step: Step, max_norm: float, norm_type: float) -> None:
    """The clipped gradients have the norm that was asked for.

    The bound: `n` additions of fp32 numbers.
    """
    grads = [grad.reshape(-1) for grad in step.grads.values() if grad is not None]
    rtol = sum(grad.numel() for grad in grads) * 2**-24
    clipped = torch.linalg.vector_norm(torch.cat([grad.double() for grad in grads]), norm_type)
    assert step.norm > max_norm, f"nothing to clip, the norm is {step.norm}"
    torch.testing.assert_close(clipped.item(), max_norm / (1 + 1e-6 / step.norm.item()), rtol=rtol, atol=0)


@dataclass(frozen=True)
class Trajectory:
    """What a twin was at each step, and at the end."""

    steps: list[Step]
    state: dict[str, Tensor]


def trained_twin(name: str, recipe_name: str, world_size: int, mean: Mean = ring_mean) -> Trajectory:
    """Train a twin, in this process."""
    case, recipe = CASES[name], RECIPES[recipe_name]
    twin = Twin(made(case, seed=0), world_size, case.units, mean=mean)
    start = {name: param.detach().clone() for name, param in twin.masters.items()}
    steps = train_twin(twin, case, recipe)
    check_twin(steps, start)
    check_compiled(case)
    return Trajectory(steps, twin.state_dict())


def follows(group: Any, name: str, recipe_name: str, expected: Trajectory, stages: Sequence[int] = STAGES) -> None:
    """Body of a rank: train the sharded model at each of these stages."""
    case, recipe = CASES[name], RECIPES[recipe_name]
    rank, world_size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    parts = Twin(made(case, seed=0), world_size, case.units).part
    for stage in stages:
        module = made(case, seed=rank)  # only rank 0's values count
        if case.disturb is not None:
            case.disturb(module, rank)
        model = ShardLite(module, stage=stage, units=case.units, group=group, **case.options)
        train_sharded(model, case, recipe, parts, expected.steps, rank)
        check_compiled(case)
        full = model.full_state_dict()
        assert full.keys() == expected.state.keys()
        same_states(f"stage {stage}, full_state_dict()", full, expected.state)


def check_compiled(case: Case) -> None:
    """Dynamo skips in silence what it does not like."""
    assert not case.compiled or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


def made(case: Case, seed: int) -> nn.Module:
    if case.compiled:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
    torch.manual_seed(seed)
    return case.make()


@contextmanager
def dynamo_may_warn(name: str) -> Iterator[None]:
    """Dynamo looks at the `grad` of a block's input, and Inductor imports what is deprecated."""
    with warnings.catch_warnings():
        if CASES[name].compiled:
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf Tensor")
            warnings.filterwarnings("ignore", message="`torch.jit")
        yield


def all_follow(group: Any, name: str, expected: Mapping[str, Trajectory], stages: Sequence[int]) -> None:
    """Body of a rank: one recipe after another, so that the ranks are called only once."""
    for recipe, trajectory in expected.items():
        try:
            with dynamo_may_warn(name):
                follows(group, name, recipe, trajectory, stages)
        except AssertionError as error:
            raise AssertionError(f"{recipe}: {error}") from error


def check_parity(
    cluster: Cluster,
    name: str,
    world_size: int,
    recipes: Sequence[str],
    stages: Sequence[int] = STAGES,
    mean: Mean = ring_mean,
) -> None:
    """Compare what ranks train with a twin that is trained here, once for all of them and for all stages."""
    with dynamo_may_warn(name):
        expected = {recipe: trained_twin(name, recipe, world_size, mean) for recipe in recipes}
    cluster.check(all_follow, world_size, name, expected, stages)


SLOW = {"compiled", "compiled-children", "inductor", "large-and-late"}
"""Compilation takes long, and large tensors do. `test_compile.py` and `test_races.py` have fast tests of both."""


def by_turns() -> Iterator[Any]:
    """Yield all cases at all of their world sizes, by turns with SGD, as Adam hides a wrong scale, and with AdamW.

    The fast tests take every other world size: of four sizes 1 and 3, or 2 and 4, by turns.
    """
    for i, (name, case) in enumerate(CASES.items()):
        for world_size in case.worlds:
            turn = (i + world_size) % 2
            left_out = name in SLOW or (len(case.worlds) > 1 and (i // 2 + world_size) % 2 == 1)
            yield (slow if left_out else pytest.param)(name, world_size, ("sgd", "adamw")[turn])


@pytest.mark.parametrize(("name", "world_size", "recipe"), [*by_turns()])
def test_training_gives_the_bits_of_its_twin(cluster, name, world_size, recipe):
    """Stages 1 and 2, which differ in little, by turns."""
    check_parity(cluster, name, world_size, [recipe], stages=(0, 1 + world_size % 2, 3))


@pytest.mark.parametrize(("name", "world_size"), [slow("tied", 3), ("mixed-dtypes", 2), slow("used-on-one-rank", 3)])
def test_elementwise_optimizers_train_shards_like_full_parameters(cluster, name, world_size):
    check_parity(cluster, name, world_size, list(RECIPES), stages=(3,))


@pytest.mark.parametrize("name", [slow("tied"), slow("mixed-dtypes"), "no-sync"])
def test_two_ranks_give_the_bits_of_the_simplest_average(cluster, name):
    check_parity(cluster, name, 2, ["adamw"], mean=simple_mean)
