"""Quantized gathers: ranks compute with decoded weights, and train the weights that were encoded.

Legend: `W` ranks, `S` elements per shard, `R` bytes per row of a wire.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from shardlite_kernels.quantize import dequantize_reference, quantize_reference
from shardlite_kernels.split import split_reference
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from bench.formats.quantized import RUNS, Task, measure
from shardlite import EMA, AdamW, LayoutError, Precision, ShardLite
from shardlite.lab.train.settings import GPTConfig
from shardlite.lab.train.text import read_corpus
from tests.support.internals import flats, units
from tests.support.models.branching import WIDTH, Branching, layer_drop, loss_on, other_orders
from tests.support.models.losses import on_rows
from tests.support.models.small import VOCABULARY, LanguageModel, MixedDtypes, frozen, with_lora
from tests.support.twins.sharded import WIDE, Pair, Turn, same_bits, same_states, slow, take_step

BF16 = Precision(compute=torch.bfloat16)
SPLIT = Precision(compute=torch.bfloat16, master="split24")
PRECISIONS = pytest.mark.parametrize("precision", [Precision(), BF16, SPLIT], ids=["fp32", "bf16", "split"])


def on_tokens(model: Callable[..., Any], turn: Turn) -> Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=turn.generator())
    torch.manual_seed(turn.generator().initial_seed())  # of dropout
    return functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def read_back(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return what the codes of a whole parameter mean. In a flat it is followed by zeros up to a multiple of 32."""
    source = functional.pad(weight.detach().reshape(-1), (0, -weight.numel() % 32))
    codes, scales = source.new_empty(len(source), dtype=torch.int8), source.new_empty(len(source) // 32).to(torch.uint8)
    quantize_reference(codes, scales, source)
    out = source.new_empty(len(source), dtype=dtype or weight.dtype)
    dequantize_reference(out, codes, scales)
    return out[: weight.numel()].view(weight.shape)


def as_sent(kept: Tensor, precision: Precision) -> Tensor:
    """Return what codes are made of: weights as they are kept, or the upper part of those that are split."""
    if precision.master != "split24":
        return kept
    high, low = torch.empty(kept.numel(), dtype=torch.bfloat16), torch.empty(kept.numel(), dtype=torch.int8)
    split_reference(high, low, kept.reshape(-1))
    return high.view(kept.shape)


class QuantizedPair(Pair):
    """A pair whose twin computes with quantized weights, where `chosen` says so of a parameter's name."""

    def __init__(
        self, make: Callable[[], nn.Module], group: Any, *, chosen=lambda name: True, rule: Any = True, **options: Any
    ) -> None:
        precision = replace(options.pop("precision", Precision()), quantized_gather=rule)
        super().__init__(make, group, precision=precision, **options)
        self._chosen = chosen
        self.twin.refresh = self._refresh

    @torch.no_grad()
    def _refresh(self) -> None:
        for name, param in self.twin.module.named_parameters():
            master = self.twin.masters[name]
            coded = master.dtype in (torch.float32, torch.bfloat16, torch.float16) and self._chosen(name)
            param.copy_(read_back(master, param.dtype) if coded else master)


# ---- what is computed with ------------------------------------------------------------------------------------------


class Noting(torch.autograd.Function):
    """x @ w.T, and a note of `w` in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, notes: list[Tensor]) -> Tensor:
        ctx.notes = notes
        ctx.save_for_backward(x, w)
        notes.append(w.detach().clone())
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        ctx.notes.append(w.detach().clone())
        return grad @ w, grad.t() @ x, None


class NotingLayer(nn.Linear):
    """A linear layer by that function."""

    def __init__(self) -> None:
        super().__init__(29, 29, bias=False)
        self.notes: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Noting.apply(x, self.weight, self.notes))


def seen_body(group: Any, precision: Precision) -> list[Tensor]:
    """Return the weights that forward and backward of this rank had, when they were what they should be."""
    world_size = torch.distributed.get_world_size(group)
    torch.manual_seed(group.rank())  # only rank 0's values count
    layers = nn.Sequential(*(NotingLayer() for _ in range(4)))
    model = ShardLite(layers, group=group, precision=replace(precision, quantized_gather=True), prefetch=0)
    model(torch.randn(2, 29)).square().mean().backward()
    assert world_size == 1 or model.traffic()["1"]["gather"].calls == 2
    for layer, (name, kept) in zip(layers, model.full_state_dict().items(), strict=True):
        sent = as_sent(kept, precision)
        right = read_back(sent, precision.compute) if world_size > 1 else sent.to(precision.compute or sent.dtype)
        assert world_size == 1 or not torch.equal(right.float(), kept), "it was to be quantized"
        assert len(layer.notes) == 2
        for when, seen in zip(("forward", "backward"), layer.notes, strict=True):
            same_bits(f"{name} in {when}", seen, right)
    return [seen for layer in layers for seen in layer.notes]


@PRECISIONS
@pytest.mark.parametrize("world_size", [1, 2, WIDE])
def test_all_ranks_compute_with_what_the_codes_mean(cluster, world_size, precision):
    """Forward and backward, though each gathers anew. One rank gathers nothing, so it computes with its own weights."""
    first, *others = cluster.run(seen_body, world_size, precision)
    for other in others:
        for i, (got, expected) in enumerate(zip(other, first, strict=True)):
            same_bits(f"weight {i}", got, expected)


def test_an_infinite_weight_shows_in_its_block_alone_and_spoils_no_neighbour_for_good(group: Any) -> None:
    model = ShardLite(
        nn.Sequential(nn.Linear(64, 64, bias=False)), group=group, precision=Precision(quantized_gather=True)
    )
    state = model.full_state_dict()
    state["0.weight"][1, 3] = float("inf")
    model.load_full_state_dict(state)
    with model.gathered():
        seen = int(model.module[0].weight.isnan().sum())
    assert (seen, int((~model.full_state_dict()["0.weight"].isfinite()).sum())) == (32, 1)


# ---- training -------------------------------------------------------------------------------------------------------


def lora() -> nn.Module:
    return with_lora(LanguageModel(tied=False))


TRAINED = {
    "fp32": (LanguageModel, {}),
    "bf16": (LanguageModel, {"precision": BF16}),
    "sgd": (LanguageModel, {"recipe": "sgd"}),
    "no-prefetch": (LanguageModel, {"prefetch": 0}),
    "kept-until-backward": (LanguageModel, {"reshard_after_forward": False}),
    "lora": (lora, {}),
    "lora-bf16": (lora, {"precision": BF16}),
    "frozen": (lambda: frozen(LanguageModel(), lambda name: "qkv" in name or "blocks.1" in name), {}),
    "checkpointed": (lambda: LanguageModel(dropout=0.1, reentrant=False), {}),
    "checkpointed-reentrant": (lambda: LanguageModel(blocks=3, dropout=0.1, reentrant=True, span=2), {}),
}
LIKE_OTHERS = {"no-prefetch", "lora", "frozen", "checkpointed"}


@pytest.mark.parametrize(
    ("name", "group"),
    [*(slow(n, 2) if n in LIKE_OTHERS else (n, 2) for n in TRAINED), ("fp32", 4), slow("bf16", 4)],
    indirect=["group"],
)
@pytest.mark.sample(2)
def test_training_gives_the_bits_of_a_twin_that_quantizes_its_weights(group: Any, name: str) -> None:
    """The gradient for quantized weights is applied to those that they were made of."""
    make, options = TRAINED[name]
    pair = QuantizedPair(make, group, **options)
    for clip in (None, 0.01):
        pair.step(on_tokens, clip=clip)
    pair.step(on_tokens, ("local", "sharded", "step"))
    if not pair.model.module.reentrant:  # which warns without gradients
        pair.evaluate(lambda model, turn: model(torch.randint(0, VOCABULARY, (2, 8), generator=turn.generator())))
    kept = pair.model.full_state_dict()
    same_states("full_state_dict()", kept, pair.twin.state_dict())


def test_dtypes_that_have_no_codes_are_gathered_as_ever(group: Any) -> None:
    """Frozen weights are coded as they are kept; fp64 is gathered as it is."""
    pair = QuantizedPair(MixedDtypes, group)
    quantized = {flat.layout.dtype: flat.quantized for flat in flats(pair.model)}
    assert quantized == {torch.float64: False, torch.float32: True}
    for _ in range(3):
        pair.step(on_rows)


class Counting(nn.Module):
    """Frozen integers beside floats, and an empty parameter. [B, 7] -> [B, 7]."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.arange(7), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0).half())
        self.gain = nn.Parameter(torch.randn(7).half(), requires_grad=False)
        self.linear = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.gain + self.shift) + self.empty.sum()


def test_integers_and_empty_parameters(group: Any) -> None:
    pair = QuantizedPair(lambda: nn.Sequential(Counting(), Counting()), group)
    for _ in range(2):
        pair.step(on_rows)


def test_a_rule_chooses_units(group: Any) -> None:
    asked = []

    def rule(name: str, module: nn.Module) -> bool:
        asked.append(name)
        return name == "blocks.1"

    def chosen(name: str) -> bool:
        return name.startswith("blocks.1.")

    pair = QuantizedPair(LanguageModel, group, chosen=chosen, rule=rule)
    for _ in range(2):
        pair.step(on_tokens)
    assert asked == ["", "blocks.0", "blocks.1"] * 2


def route_body(group: Any, route: Any, **options: Any) -> None:
    pair = QuantizedPair(Branching, group, **options)
    for _ in range(4):
        pair.step(loss_on(route))


@pytest.mark.parametrize("route", [layer_drop, other_orders])
@pytest.mark.parametrize("world_size", [2, WIDE])
def test_ranks_may_take_different_branches(cluster, route, world_size):
    cluster.check(route_body, world_size, route)


def test_branches_of_units_of_which_some_are_quantized(group: Any) -> None:
    """A rank takes part in quantized gathers and others."""
    route_body(
        group,
        layer_drop,
        chosen=lambda name: name.startswith("blocks."),
        rule=lambda name, _: name.startswith("blocks."),
    )


@pytest.mark.ranks(4)
def test_in_a_hybrid(group: Any) -> None:
    pair = QuantizedPair(LanguageModel, init_device_mesh("cpu", (2, 2)), replicas=2)
    for _ in range(2):
        pair.step(on_tokens)


# ---- bytes ----------------------------------------------------------------------------------------------------------


def bytes_body(group: Any, precision: Precision, quantized: bool) -> tuple[int, int, int]:
    """Return messages and bytes that one gather of a layer sends, and the staging memory that it takes."""
    layers = nn.Sequential(*(nn.Linear(96, 64, bias=False) for _ in range(1)))
    model = ShardLite(layers, units=nn.Linear, precision=replace(precision, quantized_gather=quantized), group=group)
    model.ledger.reset_peak()
    with model.gathered(writeback=False):
        sent = model.traffic()["0"]["gather"]
    assert sent.calls == 1
    assert model.ledger.current().get("staging", 0) == 0
    return sent.messages, sent.nbytes, model.ledger.peak().get("staging", 0)


@pytest.mark.parametrize("world_size", [2, 3, WIDE])
@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["fp32", "bf16"])
def test_a_gather_sends_33_bytes_for_32_weights(cluster, world_size, precision):
    numel = 96 * 64  # a multiple of 32 W
    shard = numel // world_size
    row = -(-(shard * 33 // 32) // 16) * 16
    assert row - shard * 33 / 32 < 16
    expected = [(world_size - 1, (world_size - 1) * row, world_size * row)] * world_size
    assert cluster.run(bytes_body, world_size, precision, True) == expected
    wide = 4 if precision.compute is None else 2
    plain = [(world_size - 1, (world_size - 1) * shard * wide, 0)] * world_size
    assert cluster.run(bytes_body, world_size, precision, False) == plain


def test_who_takes_part_passes_codes_on(group: Any) -> None:
    """Rank 1 alone needs the tower."""
    model = ShardLite(Branching(), group=group, precision=Precision(quantized_gather=True), prefetch=0)
    with torch.no_grad():
        model(torch.ones(2, WIDTH), [0], group.rank() == 1)
    torch.distributed.barrier(group)  # rank 0 serves rank 1 beside its own computation
    unit = next(unit for unit in units(model) if unit.name == "tower.0")
    row = sum(-(-(flat.layout.shard_numel * 33 // 32) // 16) * 16 for flat in unit.flats)
    sent = model.traffic()["tower.0"]
    purpose = "gather" if group.rank() == 1 else "take part"
    assert sent.keys() == {purpose}
    sent, row, staged = sent[purpose].nbytes, row, model.ledger.peak()["staging"]
    assert sent == row
    assert staged >= 2 * row


def bench_body(group: Any) -> dict[str, Any]:
    config = GPTConfig(layers=2, width=32, heads=2, context=16)
    return measure(Task(config, read_corpus(None, context=16, limit=1 << 16), 3, 0, group))


@pytest.mark.slow
def test_the_bench_compares_losses_and_bytes(cluster):
    row, _ = cluster.run(bench_body, 2)
    for loss in ("train_loss", "validation_loss"):
        assert row[loss].keys() == set(RUNS)
        assert row["difference"][loss] == pytest.approx(row[loss]["quantized"] - row[loss]["plain"], abs=2e-6)
        assert abs(row["noise"][loss]) < abs(row["chance"][loss])
    gathered = row["gather_bytes_per_step"]
    assert 33 / 128 <= gathered["quantized"] / gathered["plain"] < 0.27  # rows are padded to 16 bytes
    saved = gathered["plain"] - gathered["quantized"]
    everything = row["bytes_per_step"]
    assert everything["plain"] - everything["quantized"] == pytest.approx(saved, abs=1)  # each is rounded


# ---- what is kept ---------------------------------------------------------------------------------------------------


@PRECISIONS
@pytest.mark.ranks(2, WIDE)
def test_writing_back_keeps_all_digits_of_what_was_not_written(group: Any, precision: Precision) -> None:
    model = ShardLite(LanguageModel(tied=False), group=group, precision=replace(precision, quantized_gather=True))
    before = model.full_state_dict()
    with model.gathered():
        pass
    versions = [unit.version() for unit in units(model)]
    with model.gathered(), torch.no_grad():
        model.module.blocks[1].qkv.weight[3, 5] = 0.123
        model.module.blocks[1].norm.weight.mul_(1.5)
    assert [unit.version() != v for unit, v in zip(units(model), versions, strict=True)] == [False, False, True]
    for name, value in model.full_state_dict().items():
        expected = before[name].clone()
        if name == "blocks.1.qkv.weight":
            expected[3, 5] = torch.tensor(0.123, dtype=precision.compute or torch.float32)
        elif name == "blocks.1.norm.weight":
            expected *= 1.5
        same_bits(name, value, expected)
    with model.gathered(writeback=False):
        got = model.module.blocks[1].qkv.weight.detach().clone()
    kept = model.full_state_dict()["blocks.1.qkv.weight"]
    same_bits("what is gathered then", got, read_back(as_sent(kept, precision), precision.compute))


def test_a_moving_average_keeps_all_digits(group: Any) -> None:
    """The average is of the weights that are kept, and is quantized when it is computed with."""
    model = ShardLite(LanguageModel(tied=False), group=group, precision=Precision(quantized_gather=True))
    optimizer, ema = AdamW(model.parameters()), EMA(model, decay=0.5)
    expected = model.full_state_dict()
    for step in range(3):
        take_step(optimizer, on_tokens(model, Turn(step, group.rank(), 0)))
        ema.update()
        for name, weight in model.full_state_dict().items():
            expected[name].lerp_(weight, 0.5)
    kept = model.full_state_dict()
    with ema.swapped(), model.gathered():
        same_bits("the average", model.module.embed.weight.detach(), read_back(expected["embed.weight"]))
    same_states("the average", ema.full_state_dict(), expected)
    same_states("state", model.full_state_dict(), kept)


# ---- errors ---------------------------------------------------------------------------------------------------------


def wrap(group: Any, stage: int, rule: Any) -> None:
    ShardLite(LanguageModel(), stage=stage, group=group, precision=Precision(quantized_gather=rule))


@pytest.mark.parametrize(
    ("stage", "rule", "error", "message"),
    [
        *(
            (stage, True, LayoutError, f"Precision(quantized_gather=...) requires stage 3, got stage {stage}")
            for stage in (0, 1, 2)
        ),
        (2, {}.get, LayoutError, "Precision(quantized_gather=...) requires stage 3, got stage 2"),
        (
            3,
            "blocks",
            TypeError,
            "Precision: quantized_gather must be a bool or callable(name, module) -> bool, got 'blocks'",
        ),
        (3, None, TypeError, "got None"),
    ],
)
def test_errors_say_what_may_be_asked_for(group, stage, rule, error, message):
    with pytest.raises(error, match=re.escape(message)):
        wrap(group, stage, rule)


def test_ranks_must_agree_on_what_is_quantized(group):
    kind = r"\(torch.float32, trainable, gathered as torch.float32\)"
    expected = rf"{kind} in unit 'blocks.0', gathered as codes, rank 1 has"
    with pytest.raises(LayoutError, match=expected):
        wrap(group, 3, lambda name, _: name == f"blocks.{group.rank()}")
