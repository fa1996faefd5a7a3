"""Gradient accumulation: `no_sync()`, `no_sync(sharded=True)` and both in turns, at every stage.

Legend: `W` ranks, `S` elements per shard of a unit.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardlite import ShardLite
from tests.support.internals import context, units
from tests.support.models.residual import net, square
from tests.support.models.small import WIDTH, Branches, Branching, LanguageModel, Residual
from tests.support.twins.sharded import Pair, Turn, accumulating, local_parts

STAGES = (0, 1, 2, 3)

MIXTURES = [(*before, "step") for count in (1, 2) for before in product(("local", "sharded"), repeat=count)]
"""All ways to accumulate up to two micro-batches before a last one."""


def on_tokens(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Fit nothing in particular; the tokens are below the size of the smallest vocabulary."""
    return model(torch.randint(0, 37, (2, 8), generator=turn.generator())).square().mean()


def on_branches(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Micro-batches of a rank use other branches, and some none."""
    x = torch.randn(5, 6, generator=turn.generator())
    return model(x, (None, 0, 1)[(turn.micro + turn.rank) % 3]).square().mean()


CASES = {
    "language": (LanguageModel, on_tokens, None),
    "recomputed": (lambda: LanguageModel(blocks=3, reentrant=True, span=2), on_tokens, None),
    "branches": (Branching, on_branches, Branches),
}


@pytest.mark.parametrize(("name", "group"), [("language", 2), ("recomputed", 3), ("branches", 3)], indirect=["group"])
@pytest.mark.stages(1, 3)
@pytest.mark.sample(2)
def test_any_mixture_gives_the_bits_of_its_twin(group: Any, name: str, stage: int) -> None:
    """A step of each mixture, clipped."""
    make, loss, units = CASES[name]
    pair = Pair(make, group, stage=stage, units=units)
    for modes in MIXTURES:
        pair.step(loss, modes, clip=0.01)


@pytest.mark.stages(1, 3)
def test_what_was_accumulated_can_be_dropped(group: Any, stage: int) -> None:
    """`zero_grad()` drops what was accumulated in either way, and an exception ends a context."""
    pair = Pair(net, group, stage=stage)
    pair.step(lambda model, turn: model(torch.randn(2, 16, generator=turn.generator())).square().mean())
    for mode in ("local", "sharded"):
        with accumulating(pair.model, mode):
            square(pair.model).backward()
        pair.model.zero_grad()
        with pytest.raises(KeyError), accumulating(pair.model, mode):
            raise KeyError
        pair.step(lambda model, turn: model(torch.randn(2, 16, generator=turn.generator())).square().mean())


# ---- against one large batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [("local", "local", "step"), ("sharded", "local", "sharded", "step")])
@pytest.mark.parametrize(("stage", "group"), [(0, 3), (1, 2), (2, 4), (3, 3)], indirect=["group"])
@pytest.mark.sample(2)
def test_micro_batches_add_up_to_one_large_batch(group: Any, stage: int, modes: tuple[str, ...]) -> None:
    """In fp64, accumulated gradients are those of one batch of all rows of all ranks.

    The model is linear and so is the loss, `sum(y * t) / n` over `n` rows. Each element of a gradient is a sum of `n`
    products, in either way of computing. A product meets at most 2 roundings in scaling `t` by `1/n`, 1 of its own and
    one per addition. Accumulated it is added to other rows, micro-batches and ranks, and divided by `W`; in one batch
    to other rows only. So the two are each at most `k*u/(1 - k*u)` times the sum of absolute values off the exact sum,
    with `u = 2**-53` (Higham 2002, Accuracy and Stability of Numerical Algorithms, 3.1 and 4.2).
    """
    rank, world_size, micros = torch.distributed.get_rank(group), torch.distributed.get_world_size(group), len(modes)
    rows = 4
    x = torch.randn(world_size, micros, rows, 7, dtype=torch.float64)
    t = torch.randn(world_size, micros, rows, 5, dtype=torch.float64)
    count = world_size * micros * rows
    accumulated, at_once = 2 + 1 + rows + micros + world_size + 1, 2 + 1 + count
    module = nn.Linear(7, 5).double()
    expected = gradients(module, x, t, count)
    sizes = gradients(module, x.abs(), t.abs(), count)
    model = ShardLite(module, stage=stage, group=group)
    for micro, mode in enumerate(modes):
        with accumulating(model, mode):
            ((model(x[rank, micro]) * t[rank, micro]).sum() / (micros * rows)).backward()
    parts, bounds = local_parts(model, expected), local_parts(model, sizes)
    for name, shard in model.named_parameters():
        unit = 2.0**-53
        bound = bounds[name] * sum(k * unit / (1 - k * unit) for k in (accumulated, at_once))
        error = (shard.grad - parts[name]).abs()
        assert (error <= bound).all(), f"{name!r} is off by {(error / bound).max()} of the bound"


def gradients(module: nn.Module, x: Tensor, t: Tensor, count: int) -> dict[str, Tensor]:
    """Return the gradients of `sum(y * t) / count`, all rows at once, and leave none behind."""
    loss = (module(x.flatten(0, 2)) * t.flatten(0, 2)).sum() / count
    names, params = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, params), strict=True))


# ---- what it costs --------------------------------------------------------------------------------------------------


def sent(model: ShardLite, purpose: str) -> dict[str, int]:
    """Return how many bytes this rank has sent so far, by unit."""
    tallies = context(model).traffic.by_unit()
    return {unit: tallies[unit][purpose].nbytes if purpose in tallies.get(unit, {}) else 0 for unit in model.unit_names}


@pytest.mark.ranks(2, 3)
@pytest.mark.stages(1, 3)
def test_only_a_reduction_sends_gradients(group: Any, stage: int) -> None:
    """A reduction sends `(W-1)*S` elements, at stage 0 twice; local accumulation sends none."""
    model = ShardLite(net(), stage=stage, group=group)
    world_size = torch.distributed.get_world_size(group)
    padded = -(-(256 + 32) // (32 * world_size)) * 32  # a unit has a weight of 256 elements and a bias of 16
    once = 4 * (world_size - 1) * padded * (2 if stage == 0 else 1)
    reductions, before = 0, sent(model, "gather")
    assert set(sent(model, "reduce").values()) == {0}
    for mode in ("local", "sharded", "local", "local", "step", "step", "sharded", "sharded", "step"):
        with accumulating(model, mode):
            square(model).backward()
        reductions += mode != "local"
        assert sent(model, "reduce") == dict.fromkeys(model.unit_names, reductions * once), mode
        if 0 < stage < 3 and before is not None:  # weights stay, for there was no step
            assert sent(model, "gather") == dict.fromkeys(model.unit_names, 4 * (world_size - 1) * padded)


@pytest.mark.stages(0, 3)
def test_sharded_accumulation_needs_few_buckets(group: Any, stage: int) -> None:
    module = nn.Sequential(*(Residual(WIDTH, 64) for _ in range(12)))
    model = ShardLite(module, stage=stage, units=Residual, group=group)
    block = 4 * units(model)[0].flats[0].layout.full_numel
    peaks = {}
    for mode in ("local", "sharded"):
        model.ledger.reset_peak()
        for _ in range(3):
            with accumulating(model, mode):
                model(torch.randn(3, WIDTH)).square().mean().backward()
        peaks[mode] = model.ledger.peak()["gradient buckets"] / block
        model.zero_grad()
    assert peaks["local"] == 12  # the whole model's gradients
    # One is filled and two are on their way at most, and at stages 0 and 1 no copy is made of a bucket: it becomes
    # the gradients.
    assert peaks["sharded"] <= 3
