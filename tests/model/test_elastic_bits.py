"""order="tree": a run has the same bits on any number of ranks, also if that changes on the way.

Each body trains on the ranks that it is given, and returns what rank 0 knows at the end. All that a part computes, its
batch and its dropout too, follows from the step and the part, so the runs of one, two and four ranks must be equal.

Legend: `W` ranks, `P` parts.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.optim import Optimizer

from shardlite import EMA, AdamW, LayoutError, NonFiniteWarning, PhaseError, Precision, Route, ShardLite, load, save
from shardlite.telemetry import Held
from tests.support.internals import flats
from tests.support.models.small import VOCABULARY, LanguageModel
from tests.support.patience import until
from tests.support.twins.sharded import local_parts, same_bits, same_states, slow, take_step

WORLDS = (1, 2, 4)
TREE = Route(order="tree", parts=8)
BF16 = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
SPLIT = Precision(compute=torch.bfloat16, master="split24")


class Branching(nn.Module):
    """A language model with dropout, a layer that few parts use, and one that none does."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.model = LanguageModel(dropout=0.2, reentrant=reentrant)
        self.some = nn.Linear(VOCABULARY, VOCABULARY)
        self.none = nn.Linear(3, 3)

    def forward(self, tokens: Tensor, part: int) -> Tensor:
        y = self.model(tokens)
        return self.some(y) if part in (1, 6) else y


def loss_of(model: Callable[..., Any], part: int) -> Tensor:
    """Return the loss of a part, whose batch is drawn from the generator that `parts()` has seeded."""
    tokens = torch.randint(0, VOCABULARY, (2, 8))
    logits = model(tokens[:, :-1], part)
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def ours(**options: Any) -> Callable[[Any], Optimizer]:
    return lambda params: AdamW(params, lr=0.02, weight_decay=0.1, **options)


@dataclass(frozen=True)
class Case:
    """How a model is trained."""

    optimizer: Callable[[Any], Optimizer] = field(default_factory=ours)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `ShardLite`."""

    route: Route = TREE
    clips: Sequence[tuple[float, float]] = ((0.02, 2.0), (0.002, inf), (0.01, 3.0), (0.02, 2.0))
    """For each step `(max_norm, norm_type)`: the norms are larger before."""

    by_torch: bool = False
    """Whether `torch.nn.utils` clips, which looks at the gradients themselves."""

    reentrant: bool | None = None


CASES = {
    "adamw": Case(),
    "sgd": Case(lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=False)),
    "sgd-foreach": Case(lambda params: optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)),
    "torch-adamw": Case(lambda params: optim.AdamW(params, lr=0.02, fused=True)),
    "bf16-moments": Case(ours(state="bf16")),
    "int8-moments-of-split-weights": Case(ours(state="int8"), {"precision": SPLIT}),
    "bf16-sums": Case(options={"precision": BF16}),
    "in-backward": Case(ours(in_backward=True), clips=[(0, 0)] * 4),
    "in-backward-bf16-sums": Case(ours(in_backward=True), {"precision": BF16}, clips=[(0, 0)] * 4),
    "by-torch": Case(by_torch=True),
    "checkpointed": Case(reentrant=True),
    "p2p": Case(route=replace(TREE, transport="p2p")),
    "collectives": Case(route=replace(TREE, transport="collectives")),
    "in-backward-collectives": Case(
        ours(in_backward=True), route=replace(TREE, transport="collectives"), clips=[(0, 0)] * 4
    ),
}


class Run:
    """A model in training."""

    def __init__(self, group: Any, name: str, stage: int = 3) -> None:
        self.case = CASES[name]
        torch.manual_seed(0)
        module = Branching(self.case.reentrant)
        options = {"route": self.case.route, "buffers": "own", **self.case.options}
        self.model = ShardLite(module, group=group, stage=stage, **options)
        self.optimizer = self.case.optimizer(self.model.parameters())
        self.norms: list[Tensor] = []

    def train(self, steps: range) -> None:
        for step in steps:
            for part in self.model.parts():
                loss_of(self.model, part).backward()
            self.clip(*self.case.clips[step])
            take_step(self.optimizer)

    def clip(self, max_norm: float, norm_type: float) -> None:
        if not max_norm:
            return
        if self.case.by_torch:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        else:
            norm = self.model.clip_grad_norm_(max_norm, norm_type)
        assert norm > max_norm, "there is something to clip"
        self.norms.append(norm)

    def result(self) -> dict[str, Tensor]:
        state = {name: value.float() for name, value in self.model.full_state_dict().items()}
        return {**state, **{f"norm of step {i}": norm for i, norm in enumerate(self.norms)}}


def trained(group: Any, names: Sequence[str], stage: int = 3, steps: int = 3) -> dict[str, Tensor]:
    """Body of a rank."""
    results = {}
    for name in names:
        run = Run(group, name, stage)
        run.train(range(steps))
        results |= {f"{name}, {key}": value for key, value in run.result().items()}
    return results


def assert_equal(what: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    same_states(f"{what}", got, expected)


def assert_alike(cluster: Any, body: Callable[..., dict[str, Tensor]], *args: Any) -> None:
    """Compare what a body returns on different numbers of ranks."""
    first, *others = (cluster.run(body, world_size, *args)[0] for world_size in WORLDS)
    for world_size, other in zip(WORLDS[1:], others, strict=True):
        assert_equal(f"{world_size} ranks", other, first)


@pytest.mark.stages(0, 3)
def test_any_number_of_ranks_has_the_same_bits(cluster, stage):
    assert_alike(cluster, trained, ["adamw", "sgd"], stage)


@pytest.mark.parametrize(
    "names",
    [
        ["sgd-foreach", "torch-adamw", "by-torch", "checkpointed"],
        ["bf16-moments", "int8-moments-of-split-weights", "bf16-sums"],
        ["in-backward", "in-backward-bf16-sums"],
        ["p2p", "collectives", "in-backward-collectives"],
    ],
    ids="-".join,
)
@pytest.mark.sample(4)
def test_optimizers_formats_and_transports(cluster, names):
    assert_alike(cluster, trained, names)


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.slow
def test_optimizers_formats_and_transports_at_every_stage(cluster, name, stage):
    assert_alike(cluster, trained, [name], stage)


def test_stages_have_the_same_bits(cluster):
    first, *others = (cluster.run(trained, 2, ["adamw"], stage)[0] for stage in (3, 0, 1))
    for other in others:
        assert_equal("another stage", other, first)


# ---- a number of ranks that changes ----------------------------------------------------------------------------------


def goes_on(group: Any, name: str, path: str, steps: range) -> dict[str, Tensor]:
    """Body of a rank: train from the newest checkpoint, if there is one, and save."""
    run = Run(group, name)
    if steps.start:
        load(path, run.model, run.optimizer)
    run.train(steps)
    save(path, run.model, run.optimizer)
    result = run.result()
    del run
    gc.collect()
    until(lambda: not Path(path, ".lease").exists())  # it ends with the model, and the next ranks are other processes
    return result


@pytest.mark.parametrize("name", [*map(slow, ["adamw", "sgd", "bf16-moments"]), "int8-moments-of-split-weights"])
def test_a_number_of_ranks_that_changes_on_the_way(cluster, tmp_path, name):
    for world_size, steps in ((2, range(1)), (4, range(1, 3)), (1, range(3, 4))):
        got = cluster.run(goes_on, world_size, name, str(tmp_path), steps)[0]
    straight = cluster.run(trained, 1, [name], 3, 4)[0]
    got["norm of step 3"] = got.pop("norm of step 0")
    assert_equal("the end", got, {key: straight[f"{name}, {key}"] for key in got})


# ---- the tree, written out -------------------------------------------------------------------------------------------


def tree_sum(summands: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    """Add as a balanced binary tree, in fp32; sums below the root are rounded to the dtype in which they are kept."""
    if len(summands) == 1:
        return summands[0].to(wire).float()
    half = len(summands) // 2
    first, second = (tree_sum(part, wire).to(wire).float() for part in (summands[:half], summands[half:]))
    return first + second


def gradients(module: nn.Module, parts: int, wire: torch.dtype) -> dict[str, Tensor]:
    """Return the mean gradients over all parts, each computed alone by the plain module."""
    each = []
    for part in range(parts):
        module.zero_grad()
        plain_loss(module, part).backward()
        each.append({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()})
    used = [name for name in each[0] if any(part[name].any() for part in each)]
    return {name: tree_sum([part[name] for part in each], wire) / parts for name in used}


def plain_loss(model: Callable[..., Any], part: int) -> Tensor:
    """Return the loss of a part that draws from no global generator."""
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(part))
    return functional.cross_entropy(model(tokens[:, :-1], part).flatten(0, 1), tokens[:, 1:].flatten())


def adds_a_tree(group: Any, parts: int, precision: Precision, stage: int) -> None:
    """Body of a rank: each shard has its part of the sum, and the norm is that of all of them."""
    module = Branching().eval()
    expected = gradients(module, parts, precision.reduce)
    module.zero_grad()
    model = ShardLite(module, group=group, stage=stage, route=Route(order="tree", parts=parts), precision=precision)
    for part in model.parts():
        plain_loss(model, part).backward()
    whole = torch.cat([grad.flatten() for grad in expected.values()]).double()
    for norm_type in (2.0, 1.0, inf):
        norm = model.clip_grad_norm_(inf, norm_type)
        torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(whole, norm_type), rtol=1e-5, atol=0)
    shares = expected if stage == 0 else local_parts(model, expected)
    for name, shard in model.named_parameters():
        assert (shard.grad is None) == (name not in expected), name
        if name in expected:
            same_bits(name, shard.grad.flatten(), shares[name].flatten())


@pytest.mark.parametrize(("world_size", "parts"), [(1, 1), (1, 2), (1, 8), (2, 2), (2, 8), (4, 4), (4, 8)])
@pytest.mark.sample(2)
def test_gradients_are_those_of_the_tree_written_out(cluster, world_size, parts):
    for reduce in (torch.float32, torch.bfloat16):
        cluster.check(adds_a_tree, world_size, parts, Precision(reduce=reduce), 3)
    cluster.check(adds_a_tree, world_size, parts, Precision(), 0)


# ---- beside it -------------------------------------------------------------------------------------------------------


def scaled_and_averaged(group: Any) -> dict[str, Tensor]:
    """A gradient scaler, one step of whose gradients overflow, and an average of the weights."""
    run = Run(group, "sgd")
    average, scaler = EMA(run.model, 0.5), torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1)
    for step in range(3):
        for part in run.model.parts():
            factor = 1e38 if (step, part) == (1, 5) else 1.0
            scaler.scale(loss_of(run.model, part) * factor).backward()
        scaler.unscale_(run.optimizer)
        run.norms.append(run.model.clip_grad_norm_(0.02) if step != 1 else torch.tensor(scaler.get_scale()))
        scaler.step(run.optimizer)
        scaler.update()
        average.update()
        run.optimizer.zero_grad()
    assert scaler.get_scale() < 2.0**22, "the second step was left out"
    with average.swapped():
        averaged = {f"average of {name}": value for name, value in run.model.full_state_dict().items()}
    return {**run.result(), **averaged}


@pytest.mark.ranks(1, 2)
def test_a_nan_in_any_part_leaves_the_step_out(group: Any) -> None:
    """One part has a NaN."""
    run = Run(group, "adamw")
    before = run.model.full_state_dict()
    for part in run.model.parts():
        (loss_of(run.model, part) * (float("nan") if part == 2 else 1.0)).backward()
    with pytest.warns(NonFiniteWarning, match="was skipped on all ranks"):
        run.optimizer.step()
    assert run.model.skipped_steps == 1
    assert_equal("a step that was left out", run.model.full_state_dict(), before)


def run_parts(model: ShardLite, run: Callable[[int], object]) -> None:
    for part in model.parts():
        run(part)


@pytest.mark.parametrize(("group", "bad"), [(1, 0), (1, 3), (2, 1)], indirect=["group"])
def test_what_is_not_finite_is_named(group: Any, bad: int) -> None:
    """The gradient that is not finite is named, in whichever part it came."""
    model = ShardLite(
        nn.Linear(4, 4), group=group, route=Route(order="tree", parts=4), precision=Precision(diagnose=True)
    )
    rank = bad // (4 // dist.get_world_size(group))
    with pytest.warns(NonFiniteWarning, match=rf"not finite: of 'weight' on rank {rank}\."):
        run_parts(model, lambda part: (model(torch.ones(2, 4)).sum() * (inf if part == bad else 1.0)).backward())


def freezes(group: Any) -> dict[str, Tensor]:
    """Body of a rank: other parameters are trained after the first step."""
    run = Run(group, "adamw")
    run.case = replace(run.case, clips=[(0.02, 2.0)] * 3)  # norms from what reductions have measured
    run.train(range(1))
    run.model.module.model.blocks[0].qkv.weight.requires_grad_(False)
    run.model.module.model.embed.weight.requires_grad_(False)
    run.train(range(1, 3))
    return run.result()


@pytest.mark.parametrize("body", [scaled_and_averaged, freezes])
def test_what_else_a_program_does(cluster, body):
    assert_alike(cluster, body)


def held(model: ShardLite) -> Held:
    return model.memory().get("gradient buckets", Held(0, 0))


@pytest.mark.parametrize(("group", "most"), [(1, 5), (2, 4), (4, 3)], indirect=["group"])
def test_sums_are_kept_as_a_binary_counter_keeps_digits(group: Any, most: int) -> None:
    """Before the backward of a part there are as many sums as its number has ones."""
    model = ShardLite(nn.Linear(64, 64), group=group, route=Route(order="tree", parts=16))
    nbytes = sum(flat.gradients.full_numel * 4 for flat in flats(model))
    first = next(iter(model.parts()))
    for part in model.parts():
        assert held(model).now == nbytes * (part - first).bit_count()
        model(torch.ones(2, 64)).sum().backward()
    assert nbytes * (most - 1) < held(model).peak <= nbytes * most


def draws_by_part(group: Any) -> list[tuple[int, float, float]]:
    """Body of a rank: return what each part draws in two steps, and check the generator outside."""
    model = tiny(group)
    torch.manual_seed(7)
    drawn = []
    for step in range(2):
        for part in model.parts(seed=3):
            drawn.append((step, part, torch.rand(()).item()))
            backward(model)
        model.zero_grad()
    after = torch.rand(())
    torch.manual_seed(7)
    assert after == torch.rand(()), "the program's own numbers are as without the loops"
    for part in model.parts(0, seed=3):
        assert (0, part, torch.rand(()).item()) in drawn
        backward(model)
    return drawn


def test_random_numbers_follow_from_seed_step_and_part(cluster):
    (alone,), (first, second) = (cluster.run(draws_by_part, world_size) for world_size in (1, 2))
    assert sorted(alone) == sorted([*first, *second])
    assert len({number for *_, number in alone}) == 8


# ---- misuse ----------------------------------------------------------------------------------------------------------


def tiny(group: Any, **options: Any) -> ShardLite:
    return ShardLite(nn.Linear(4, 4), group=group, route=Route(**{"order": "tree", "parts": 4, **options}))


def backward(model: ShardLite) -> None:
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.ranks(1, 2)
def test_misuse_is_named(group: Any) -> None:
    """Misuse is named on every rank, and the model is of use afterwards."""
    model = tiny(group)
    optimizer = AdamW(model.parameters())
    with pytest.raises(PhaseError, match="is outside of all parts: run forward and backward in a loop"):
        backward(model)
    with pytest.raises(LayoutError, match=r"no_sync\(\): order='tree' adds by parts"):
        model.no_sync()
    with pytest.raises(LayoutError, match=r"no_sync\(\): order='tree'"):
        model.require_backward_grad_sync = False
    assert model.require_backward_grad_sync
    with pytest.raises(LayoutError, match=r"join\(\): order='tree'"):
        model.join([])
    with pytest.raises(PhaseError, match="had no backward"):
        run_parts(model, lambda _: None)
    with pytest.raises(PhaseError, match="has already run its backward"):
        run_parts(model, lambda _: (backward(model), backward(model)))
    for _ in model.parts():
        backward(model)
        break
    with pytest.raises(PhaseError, match=r"finish a loop over parts\(\)"):
        optimizer.step()
    running = model.parts()
    next(running)
    with pytest.raises(PhaseError, match=r"is running, in part .: finish it before the next loop"):
        next(model.parts())
    running.close()
    with pytest.raises(PhaseError, match="were dropped"):
        run_parts(model, lambda _: (model.zero_grad(), backward(model)))
    run_parts(model, lambda _: backward(model))
    optimizer.step()


def test_options_that_do_not_go_with_it(group: Any) -> None:
    """What has no tree is refused before the module is changed."""
    with pytest.raises(LayoutError, match="at least as many parts as ranks, 2; got parts=1"):
        tiny(group, parts=1)
    quantized = Precision(quantized_gather=True)
    with pytest.raises(LayoutError, match="quantized_gather does not"):
        ShardLite(nn.Linear(4, 4), group=group, precision=quantized, route=Route(order="tree", parts=4))
    with pytest.raises(LayoutError, match="has replicas"):
        tiny(DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard")))
    for options, message in (
        ({"parts": None}, "requires parts=P"),
        ({"parts": 6}, "a power of two; got parts=6"),
        ({"parts": True}, "got parts=True"),
        ({"order": "ring"}, "parts=4 requires order='tree'"),
        ({"order": "bush"}, "order must be one of 'ring', 'tree'; got 'bush'"),
        ({"algorithm": "direct"}, "algorithm='direct' adds in a different order"),
        ({"reduce": "fast", "transport": "collectives"}, "reduce='fast'"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny(group, **options)
    with pytest.raises(LayoutError, match=r"parts\(\): this model adds in the order of the ring"):
        ShardLite(nn.Linear(4, 4), group=group).parts()
    with suppress(LayoutError):
        tiny(group, parts=4 if dist.get_rank(group) else 8)
        pytest.fail("ranks that have different parts were accepted")
    assert "order=tree, parts=4" in repr(tiny(group))


@pytest.mark.ranks(3)
def test_ranks_must_be_a_power_of_two(group: Any) -> None:
    with pytest.raises(LayoutError, match="order='tree' requires that the number of ranks is a power of two, got 3"):
        tiny(group)
    with pytest.raises(LayoutError, match="algorithm='halving' requires a power of two of ranks, got 3"):
        tiny(group, order="ring", parts=None, algorithm="halving")
