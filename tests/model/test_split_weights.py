"""`Precision(master="split24")`: weights kept as bf16 and 8 bits more have the bits of a twin in fp32, cut to 24.

Legend: `W` ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from shardlite import AdamW, LayoutError, ShardLite
from shardlite.params.layout import ARENA_ALIGN, round_up
from tests.support.internals import flats
from tests.support.models.losses import on_rows, on_tokens
from tests.support.models.small import MLP, LanguageModel, MixedDtypes, frozen
from tests.support.twins.sharded import Turn, _seeded, same_bits, same_states, slow, some_stages, without_warnings
from tests.support.twins.split import SPLIT, SplitPair, cut, trained

# ---- training -------------------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "plain": (LanguageModel, on_tokens),
    "checkpointed": (lambda: LanguageModel(blocks=3, reentrant=False, span=2), on_tokens),
    "reentrant": (lambda: LanguageModel(reentrant=True), on_tokens),
    "frozen": (lambda: frozen(LanguageModel(), lambda name: "qkv" in name or "blocks.1" in name), on_tokens),
    "mlp": (lambda: MLP([7, 33, 5]), on_rows),
}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        *(("plain", 1), ("plain", 2), ("checkpointed", 2), ("reentrant", 2), ("frozen", 2), ("mlp", 3)),
        *(slow(*case) for case in (("plain", 4), ("reentrant", 3), ("mlp", 4))),
    ],
    indirect=["group"],
)
@pytest.mark.sample(2)
def test_training_follows_a_twin_in_24_bits(group: Any, name: str) -> None:
    """With clipping and both kinds of accumulation."""
    make, loss = MODELS[name]
    for stage in some_stages(1, 3):
        pair = SplitPair(make, group, stage=stage)
        pair.step(loss)
        pair.step(loss, ("local", "local", "step"), clip=0.01)
        pair.step(loss, ("local", "sharded", "step"), clip=0.01)
        if name != "reentrant":  # which warns where there is no gradient
            pair.evaluate(loss)


def whole_state(group: Any, state: str, in_backward: bool, stage: int, one_unit: bool = False) -> dict[str, Tensor]:
    """Weights, lower parts and the states of the optimizer of this rank after some steps, flat, by name."""
    options = {"state": state, "in_backward": in_backward}
    units = {"units": lambda *_: False} if one_unit else {}
    model, optimizer = trained(group, steps=5, same_batch=True, stage=stage, options=options, **units)
    found = {}
    for flat in flats(model):
        assert flat.low is not None
        for slot, shard, low in zip(flat.layout.slots, flat.shards, flat.shard_views(flat.low), strict=True):
            entries = {"high": shard.detach(), "low": low, **optimizer.state[shard]}
            found.update({f"{key} of {slot.name}": value.reshape(-1) for key, value in entries.items()})
    return found


@pytest.mark.parametrize(
    ("state", "in_backward"),
    [
        ("bf16", True),
        *(slow(state, False) for state in ("fp32", "bf16", "int8")),
        *(slow(state, True) for state in ("fp32", "int8")),
    ],
)
def test_states_depend_on_no_number_of_ranks(cluster, state, in_backward):
    """All ranks have one batch, and 2 and 4 divide a sum of equal numbers exactly."""
    (expected,) = cluster.run(whole_state, 1, state, in_backward, 3)
    for world_size, stage in ((2, 3), (4, 3), (2, 1), (4, 0)):
        ranks = cluster.run(whole_state, world_size, state, in_backward, stage)
        for name, value in expected.items():
            whole = ranks[0][name] if stage == 0 or name.startswith("step") else torch.cat([r[name] for r in ranks])
            assert whole.dtype == value.dtype
            assert torch.equal(whole, value), f"{name}, {world_size} ranks, stage {stage}"


def test_states_depend_on_no_units(cluster):
    """Random numbers follow from where an element lies in its parameter, wherever that lies."""
    by_block, as_one = (cluster.run(whole_state, 2, "bf16", False, 3, one_unit) for one_unit in (False, True))
    for name in by_block[0]:
        if not name.startswith("step"):
            first, second = (torch.cat([rank[name] for rank in ranks]) for ranks in (by_block, as_one))
            assert torch.equal(first, second), name


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.stages(0, 3)
def test_weights_take_three_bytes_and_with_a_narrow_state_five(group: Any, stage: int) -> None:
    """The widths are such that only arenas are padded."""
    model = ShardLite(MLP([64, 128, 64]), group=group, stage=stage, units=nn.Linear, precision=SPLIT)
    optimizer = AdamW(model.parameters(), state="int8", in_backward=True)
    model(torch.ones(1, 64)).float().sum().backward()
    optimizer.step()
    kept = 2 * 64 * 128 + 64 + 128
    mine = kept if stage == 0 else kept // group.size()
    held = model.memory()
    own, all_ = (round_up(numel, ARENA_ALIGN) for numel in (mine, kept))
    assert held["parameters"].now == (3 * own if stage in (0, 3) else 2 * all_ + own)
    assert "gradients" not in held or held["gradients"].now == 0
    assert stage == 0 or "gradients" not in held or held["gradients"].peak == 0
    counts = 4 * len(list(model.parameters()))
    rows = mine / 16  # which parameter each 32 elements belong to
    assert held["optimizer state"].now == mine * (2 + 2 / 32) + rows + counts


# ---- steps that are scaled, clipped, left out ------------------------------------------------------------------------


@pytest.mark.stages(2, 3)
@without_warnings
def test_gradient_scalers_and_steps_that_are_left_out(group: Any, stage: int) -> None:
    """A gradient scaler by a power of two changes no bit, and leaves out what overflows."""
    model = ShardLite(_seeded(LanguageModel), group=group, stage=stage, precision=SPLIT)
    twin = ShardLite(_seeded(LanguageModel), group=group, stage=stage, precision=SPLIT)
    optimizers = [AdamW(each.parameters(), lr=0.01) for each in (model, twin)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
    for step in range(4):
        turn = Turn(step, torch.distributed.get_rank(), 0)
        bad = float("inf") if step == 2 and group.rank() == 0 else 1.0
        scaler.scale(on_tokens(model, turn) * bad).backward()
        (on_tokens(twin, turn) * bad).backward()
        if step == 1:
            scaler.unscale_(optimizers[0])
            for shard in twin.parameters():  # written, too: both norms are made of what is in the gradients
                shard.grad.mul_(1)
            for each in (model, twin):
                nn.utils.clip_grad_norm_(each.parameters(), 0.01)
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
        for each in optimizers:
            each.zero_grad()
        same_states(f"step {step}", model.full_state_dict(), twin.full_state_dict())
    assert twin.skipped_steps == 1
    assert scaler.get_scale() == 2.0**7


# ---- what it does not go with ---------------------------------------------------------------------------------------


@pytest.mark.stages(0, 3)
@pytest.mark.ranks(1, 2)
def test_optimizers_that_know_nothing_of_it_are_refused(group: Any, stage: int) -> None:
    model = ShardLite(_seeded(lambda: MLP([7, 33, 5])), group=group, stage=stage, precision=SPLIT)
    for make in (optim.AdamW, optim.SGD):
        optimizer = make(model.parameters(), lr=0.1)
        before = model.full_state_dict()
        on_rows(model, Turn(0, 0, 0)).backward()
        with pytest.raises(LayoutError, match=rf"{make.__name__} would step only the upper half of split weights"):
            optimizer.step()
        model.zero_grad()
        same_states("state", model.full_state_dict(), before)
    with pytest.raises(LayoutError, match=r"parameter '0\.0\.wide' is torch\.float64"):
        ShardLite(MixedDtypes(), group=group, stage=stage, precision=SPLIT)


def test_an_optimizer_that_was_built_before_wrapping(group: Any) -> None:
    """An optimizer that has stepped the module before goes on with the shards, cut like weights."""
    results = []
    for early in (False, True):
        module = _seeded(lambda: MLP([7, 33, 5]))
        optimizer = AdamW(module.parameters(), lr=0.1, state="int8") if early else None
        model = ShardLite(module, group=group, precision=SPLIT)
        optimizer = optimizer or AdamW(model.parameters(), lr=0.1, state="int8")
        on_rows(model, Turn(0, 0, 0)).backward()
        optimizer.step()
        results.append(model.full_state_dict())
    same_states("state", results[1], results[0])


def test_quantized_gathers(group: Any) -> None:
    """Codes are of the upper part, and weights keep all 24 bits."""
    model, _ = trained(group, precision=replace(SPLIT, quantized_gather=True))
    for value in model.full_state_dict().values():
        same_bits("24 bits", value, cut(value))
    assert any((value != value.bfloat16()).any() for value in model.full_state_dict().values())
