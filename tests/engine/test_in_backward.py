"""`AdamW(in_backward=True)` has the bits of the ordinary step and keeps no gradient.

Legend: `W` ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

from shardlite import EMA, Precision, ShardLite
from shardlite.comm.traffic import Sent
from tests.support.internals import units
from tests.support.models.branching import Branching, layer_drop, loss_on, one_rank_alone, other_orders
from tests.support.models.experts import Model as Experts
from tests.support.models.experts import loss as on_routes
from tests.support.models.losses import MODELS, on_rows, on_tokens
from tests.support.models.residual import Nested
from tests.support.models.residual import on_rows as on_residual_rows
from tests.support.models.small import MLP, LanguageModel, Residual, frozen, with_lora
from tests.support.models.small import Context as CalledTwice
from tests.support.transports.pressure import WIDTH, under_pressure
from tests.support.transports.pressure import on_rows as on_wide_rows
from tests.support.twins.duos import Duo, alike
from tests.support.twins.plain import decayed_by_ndim
from tests.support.twins.sharded import Turn, same_bits, same_states, slow, some_stages

SPLIT = Precision(compute=torch.bfloat16, master="split24")
BF16 = Precision(compute=torch.bfloat16)
BF16_WIRE = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)


def lora() -> nn.Module:
    return with_lora(LanguageModel())


def twice(model: Callable[..., Any], turn: Turn) -> Tensor:
    return model(torch.randn(4, 6, generator=turn.generator())).float().square().mean()


def three_groups(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices, vectors without weight decay, and some with other hyper-parameters altogether."""
    first, second = decayed_by_ndim(params)
    other = {"params": first["params"][1::3], "lr": 0.003, "betas": (0.8, 0.95), "eps": 1e-6, "max_update": 0.5}
    kept = {id(param) for param in other["params"]}
    return [{**first, "params": [p for p in first["params"] if id(p) not in kept]}, second, other]


MODELS_HERE: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    **MODELS,
    "called-twice-checkpointed": (lambda: CalledTwice(reentrant=False), twice),
    "called-twice-reentrant": (lambda: CalledTwice(reentrant=True), twice),
    "nested": (Nested, on_residual_rows),
    "lora": (lora, on_tokens),
    "experts": (Experts, on_routes),
    "dropout": (lambda: LanguageModel(dropout=0.2), on_tokens),
}


# ---- the same bits --------------------------------------------------------------------------------------------------


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("plain", 1, {}),
    ("plain", 2, {}),
    ("plain", 3, {"optimizer": {"groups": three_groups, "schedule": lambda o: StepLR(o, 2)}}),
    ("plain", 3, {"precision": BF16_WIRE}),
    ("plain", 4, {"precision": SPLIT, "optimizer": {"state": "int8", "schedule": lambda o: CosineAnnealingLR(o, 5)}}),
    ("plain", 1, {"precision": SPLIT, "optimizer": {"state": "int8"}}),
    ("plain", 2, {"precision": SPLIT, "optimizer": {"groups": decayed_by_ndim, "state": "bf16", "max_update": 1.0}}),
    (
        "plain",
        2,
        {"optimizer": {"lr": lambda: torch.tensor(0.02), "schedule": lambda o: LambdaLR(o, lambda t: 0.5**t)}},
    ),
    ("checkpointed", 3, {"precision": SPLIT}),
    ("called-twice-checkpointed", 3, {"units": Residual, "precision": SPLIT}),
    ("called-twice-reentrant", 2, {"units": Residual}),
    ("nested", 2, {}),
    ("frozen", 2, {}),
    ("lora", 2, {"precision": BF16}),
    ("bf16", 2, {"precision": BF16}),
    ("mixed", 3, {"precision": Precision(reduce=torch.bfloat16)}),
    ("mixed", 1, {}),
    ("experts", 2, {}),
    ("experts", 1, {}),
    ("dropout", 2, {}),
]


def by_size() -> Iterator[Any]:
    """Yield the numbers of all cases. Those on one rank, but for one, and on four are slow."""
    for number, (name, world_size, _) in enumerate(CASES):
        slow = world_size in (1, 4) and name != "mixed"
        yield pytest.param(number, id=f"{name}-{world_size}", marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize("number", [*by_size()])
@pytest.mark.sample(2)
def test_it_has_the_bits_of_the_ordinary_step(cluster, number):
    cluster.check(named_case, CASES[number][1], number)


def named_case(group: Any, number: int) -> None:
    """Options may hold functions, which cannot be sent."""
    name, _, options = CASES[number]
    steps = 8 if name == "experts" else 3
    modes = [("local", "local", "step") if step % 3 == 1 else ("step",) for step in range(steps)]
    alike(*MODELS_HERE[name], group, stages=some_stages(1, 3), modes=modes, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "far-prefetch": {"prefetch": 3},
    "no-prefetch": {"prefetch": 0},
    "kept-until-backward": {"reshard_after_forward": False},
    "quantized": {"precision": Precision(quantized_gather=True)},
    "quantized-split": {"precision": replace(SPLIT, quantized_gather=True)},
}


SLOW = {"far-prefetch", "no-prefetch", "quantized"}  # the last is like "quantized-split"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in OPTIONS])
def test_with_options_of_stage_3(group: Any, name: str) -> None:
    alike(LanguageModel, on_tokens, group, stages=(3,), **OPTIONS[name])
    alike(Branching, loss_on(other_orders), group, stages=(3,), modes=[("step",)] * 4, **OPTIONS[name])


@pytest.mark.ranks(3)
@pytest.mark.slow
@pytest.mark.parametrize("route", [layer_drop, other_orders, one_rank_alone])
def test_ranks_may_take_different_branches(group: Any, route: Any) -> None:
    """Ranks skip units, call them in other orders, or do nothing but the head."""
    modes = [("step",), ("step",), ("local", "step"), ("step",)]
    alike(Branching, loss_on(route), group, modes=modes)
    alike(lambda: Branching(reentrant=False), loss_on(route), group, stages=(3,), modes=modes, precision=SPLIT)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), *(slow(s) for s in ((4, 1), (1, 4)))])
def test_in_a_hybrid(group: Any, shape: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", shape)
    alike(LanguageModel, on_tokens, mesh, stages=(1,))
    alike(LanguageModel, on_tokens, mesh, stages=(3,), precision=SPLIT)
    alike(Experts, on_routes, mesh, stages=(0, 2), modes=[("step",)] * 4)


@pytest.mark.parametrize(
    ("stage", "group", "precision", "state"),
    [slow(1, 3, SPLIT, "int8"), (3, 2, SPLIT, "fp32")],
    ids=str,
    indirect=["group"],
)
def test_large_units_survive_late_messages(group: Any, stage: int, precision: Precision, state: str) -> None:
    """Large units, late messages, and an allocator that hands out used memory."""

    def make(module: Callable[[], nn.Module]) -> Duo:
        return Duo(module, group, stage=stage, units=Residual, precision=precision, optimizer={"state": state})

    with under_pressure(make, torch.distributed.get_world_size(group), seed=stage, hidden=2 * WIDTH) as duo:
        duo.step(on_wide_rows)
        duo.step(on_wide_rows, ("local", "step"))
        with torch.no_grad():
            duo.inside.model(torch.randn(1, WIDTH))
        duo.step(on_wide_rows)


# ---- what changes from step to step ---------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, slow(3))
def test_freezing_between_steps(group: Any) -> None:
    """Other parameters are frozen in each step."""
    kept = [
        lambda n: False,
        lambda n: "qkv" in n,
        lambda n: "blocks.1" in n,
        lambda n: "bias" not in n,
        lambda n: False,
    ]
    for stage in (0, 2, 3):
        duo = Duo(lambda: LanguageModel(tied=False), group, stage=stage, units=None)
        for which in kept:
            for side in duo.sides:
                frozen(side.model.module, which)
            duo.step(on_tokens, ("local", "step"))


@pytest.mark.ranks(3)
@pytest.mark.stages(1, 3)
def test_uneven_batches(group: Any, stage: int) -> None:
    """Batches are uneven, and a mean is that of the ranks that have one."""
    duo = Duo(lambda: MLP([7, 33, 5]), group, stage=stage, units=nn.Linear)
    batches = [torch.randn(4, 7, generator=Turn(i, duo.rank, 0).generator()) for i in range([3, 1, 2][duo.rank])]
    for side in duo.sides:
        for x in side.model.join(batches):
            side.model(x).square().mean().backward()
            side.finish()
    duo.compare()


@pytest.mark.ranks(1, 2)
def test_ignored_parameters_are_stepped_and_accumulated_too(group: Any) -> None:
    """One optimizer steps shards, and what each rank trains for itself."""
    for stage in (0, 3):
        duo = Duo(lambda: MLP([7, 33, 9, 5]), group, stage=stage, ignored=lambda module: [module[2]])
        for modes in [("step",), ("local", "local", "step"), ("step",)]:
            duo.step(on_rows, modes)


# ---- what is there, and when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [Precision(), SPLIT], ids=["fp32", "split24"])
@pytest.mark.stages(1, 3)
def test_the_same_reductions_are_made_and_no_gradient_is_kept(group: Any, stage: int, precision: Precision) -> None:
    duo = Duo(LanguageModel, group, stage=stage, precision=precision)
    duo.step(on_tokens)
    model = duo.inside.model
    model.trace.take(), duo.ordinary.model.trace.take()
    before = [_sent(side.model) for side in duo.sides]
    duo.step(on_tokens, ("local", "step"))
    reduced = [[event for event in side.model.trace.take() if event.startswith("reduce ")] for side in duo.sides]
    assert reduced[0] == reduced[1] != []
    for unit in model.unit_names:
        ordinary, inside = (_since(side.model, earlier, unit) for side, earlier in zip(duo.sides, before, strict=True))
        assert inside["reduce"] == ordinary["reduce"]
        assert inside["used"][0] == sum(len(each.trainable) for each in units(model) if each.name == unit)
        assert "used" not in ordinary
    held = model.memory().get("gradients")
    assert held is None or held.now == 0
    if stage > 0:
        assert held is None or held.peak == 0
        model.ledger.reset_peak()


def _sent(model: ShardLite) -> dict[str, dict[str, Sent]]:
    return {unit: dict(sent) for unit, sent in model.traffic().items()}


def _since(model: ShardLite, before: dict[str, dict[str, Sent]], unit: str) -> dict[str, list[int]]:
    """Return calls, messages and bytes of a unit since `before`, by purpose."""
    nothing = Sent(0, 0, 0, 0.0, 0.0)
    return {
        purpose: [
            a - b for a, b in zip(astuple(each)[:3], astuple(before[unit].get(purpose, nothing))[:3], strict=True)
        ]
        for purpose, each in model.traffic()[unit].items()
    }


@pytest.mark.stages(1, 3)
@pytest.mark.ranks(1, 2)
def test_the_backward_leaves_new_weights(group: Any, stage: int) -> None:
    """Between the backward and `step()` everything has the new weights already."""
    duo = Duo(LanguageModel, group, stage=stage)
    ema = [EMA(side.model, 0.5) for side in duo.sides]
    tokens = torch.arange(6).view(1, 6)
    for _ in range(3):
        duo.backward(on_tokens)
        duo.ordinary.optimizer.step()
        full = [side.model.full_state_dict() for side in duo.sides]
        same_states("state", full[1], full[0])
        with torch.no_grad():
            same_bits("logits", *(side.model(tokens) for side in reversed(duo.sides)))
        duo.inside.optimizer.step()
        for each in ema:
            each.update()
        averaged = [each.full_state_dict() for each in ema]
        same_states("average", averaged[1], averaged[0])
        for side in duo.sides:
            side.model.zero_grad()
        duo.compare()
        duo.steps += 1
