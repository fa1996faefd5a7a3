"""Models of well-known architectures train with the bits of plain data parallel."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardlite import Precision
from shardlite.wrapping.partition import ROOT, partition_module
from tests.support.models.hf import ARCHITECTURES, WIDTH, case, drawn_tokens, numbered
from tests.support.twins.sharded import WIDE, Loss, Pair, Turn, same_states, trained

SIZES = (2, WIDE)


def unit_names(model: nn.Module) -> list[str]:
    return [unit.name or ROOT for unit in partition_module(model, None) if unit.params]


@pytest.mark.parametrize("name", [*map(case, ARCHITECTURES)])
def test_blocks_and_large_tables_become_units(name):
    architecture = ARCHITECTURES[name]
    units = partition_module(architecture.make(), None)
    print(f"{name}:", *(f"{unit.name or ROOT}={sum(p.numel() for p in unit.params)}" for unit in units))
    assert unit_names(architecture.make()) == architecture.units


def follows_its_twin(make: Callable[[], nn.Module], loss: Loss, group: Any, **options: Any) -> Pair:
    """Train, evaluate, and compare everything."""
    pair = trained(make, loss, group, **options)
    same_states("full_state_dict()", pair.model.full_state_dict(), pair.twin.state_dict())
    pair.evaluate(loss)
    return pair


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("name", [*map(case, ARCHITECTURES)])
def test_training_gives_the_bits_of_its_twin(group: Any, name: str) -> None:
    """At two ranks with SGD, too, as Adam hides a wrong scale, at one of the other stages."""
    architecture = ARCHITECTURES[name]
    others = {"sgd": list(ARCHITECTURES).index(name) % 3} if group.size() == 2 else {}
    for recipe, stage in {"adamw": 3, **others}.items():
        pair = follows_its_twin(architecture.make, architecture.loss, group, recipe=recipe, stage=stage)
        assert pair.model.unit_names == architecture.units


@dataclass(frozen=True)
class Variant:
    """An architecture with something switched on."""

    of: str
    settings: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module], object] | None = None
    loss: Loss | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Of `Pair`."""

    def make(self) -> nn.Module:
        model = ARCHITECTURES[self.of].make(**self.settings)
        if self.prepare is not None:
            self.prepare(model)
        return model


def checkpointed(model: nn.Module, *, reentrant: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="`gradient_checkpointing_enable` is deprecated", category=FutureWarning
        )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def on_hidden_states(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Use what each block returns, and its attention, beside the loss."""
    tokens = drawn_tokens(turn)
    out = model(input_ids=tokens, labels=tokens, output_hidden_states=True, output_attentions=True)
    inside = (*out.hidden_states, *out.attentions)
    return out.loss + sum(each.square().mean() for each in inside)


EAGER = {"attn_implementation": "eager"}
VARIANTS = {
    **{
        f"{name}-{'reentrant' if reentrant else 'nonreentrant'}": Variant(
            name, {"use_cache": False}, prepare=partial(checkpointed, reentrant=reentrant)
        )
        for name in ("gpt2", "t5", "mixtral")
        for reentrant in (True, False)
    },
    "gpt2-eager-hidden-states": Variant("gpt2", EAGER, loss=on_hidden_states),
    "llama-eager": Variant("llama", EAGER),
    "mixtral-eager": Variant("mixtral", EAGER | {"experts_implementation": "eager"}),
    "mixtral-batched": Variant("mixtral", {"experts_implementation": "batched_mm"}),
    "llama-bfloat16": Variant("llama", options={"precision": Precision(compute=torch.bfloat16)}),
    "t5-bfloat16": Variant("t5", options={"precision": Precision(compute=torch.bfloat16)}),
    "bert-kept": Variant("bert", options={"reshard_after_forward": False}),
}


@pytest.mark.parametrize("name", [case(name, of=variant.of) for name, variant in VARIANTS.items()])
def test_variants_give_the_bits_of_their_twins(group: Any, name: str) -> None:
    variant = VARIANTS[name]
    follows_its_twin(variant.make, variant.loss or ARCHITECTURES[variant.of].loss, group, **variant.options)


class Experts(nn.Module):
    """A layer whose own parameters are few beside its experts'."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(3))


@pytest.mark.parametrize("dense", [2, 3])
def test_layers_become_units_and_not_their_experts(dense):
    """Even if only one of the layers has experts, and so is unlike the others."""
    layers = nn.ModuleList([*(nn.Linear(WIDTH, 5 * WIDTH) for _ in range(dense)), Experts()])
    model = nn.ModuleDict({"layers": layers, "norm": nn.LayerNorm(WIDTH)})
    assert unit_names(model) == [ROOT, *numbered("layers", count=dense + 1)]


def test_a_small_module_between_the_blocks_stays_with_the_root():
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)])
    assert unit_names(model) == [ROOT, "0", "2"]


IDLE_EXPERTS = {
    "mixtral": {"num_local_experts": 17, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    "switch": {"num_experts": 17},
}
"""More experts than a rank has tokens."""


def leaves_out_experts(group: Any, name: str) -> set[str]:
    """Body of a rank: make two steps, and return the experts that this rank's tokens were sent to."""
    architecture = ARCHITECTURES[name]
    pair = Pair(partial(architecture.make, **IDLE_EXPERTS[name]), group)
    assert pair.model.unit_names == architecture.units
    called: set[str] = set()
    for path, module in pair.model.module.named_modules():
        if path.endswith(".mlp.experts"):
            module.register_forward_pre_hook(partial(note_experts, called, path))
    for _ in range(2):
        pair.step(architecture.loss)
    return called


def note_experts(called: set[str], path: str, experts: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Mixtral numbers each token's experts, Switch marks them."""
    chosen = inputs[1].flatten(0, -2).any(0).nonzero() if isinstance(experts, nn.ModuleDict) else inputs[1].unique()
    called.update(f"{path}.{expert}" for expert in chosen.flatten().tolist())


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", [*map(case, IDLE_EXPERTS)])
def test_ranks_may_leave_out_experts(cluster, name, world_size):
    """Slices of a parameter (Mixtral), or modules that do not run (Switch)."""
    called = cluster.run(leaves_out_experts, world_size, name)
    assert set.union(*called) != set.intersection(*called), "every rank called the same experts"
