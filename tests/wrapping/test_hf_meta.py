"""Hugging Face models on the meta device, and ours in their manner, are initialized by `_init_weights`.

Their constructors apply this function, and `init=` takes it. Only it can initialize the buffers that are not
saved.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardlite import LayoutError, ShardLite
from shardlite.wrapping.init import children_first
from tests.support.models.hf import ARCHITECTURES, case
from tests.support.twins.plain import RECIPES
from tests.support.twins.sharded import Pair, Turn, same_bits, same_states, take_step

PRETRAINED = [name for name in ARCHITECTURES if name != "nn.Transformer"]


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = make()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model


def initialized(model: nn.Module) -> nn.Module:
    """Apply a model's own initialization, children first; each tensor keeps its first values."""
    filled: set[torch.Tensor] = set()
    with torch.no_grad():
        for module in children_first(model):
            own = {*module.parameters(recurse=False), *module.buffers(recurse=False)}
            kept = [(tensor, tensor.clone()) for tensor in own & filled]
            if own - filled or not own:
                model._init_weights(module)
            for tensor, value in kept:
                tensor.copy_(value)
            filled |= own
    return model


@pytest.mark.parametrize(
    ("name", "group"), [*(case(name, 2) for name in PRETRAINED), case("llama", 4)], indirect=["group"]
)
def test_a_model_born_on_meta_is_one_born_with_memory(group: Any, name: str) -> None:
    """Born with the weights and buffers of a model that always had memory, and trained like it."""
    architecture = ARCHITECTURES[name]
    model = on_meta(architecture.make)
    torch.manual_seed(7)
    model = ShardLite(model, init=model._init_weights, group=group)
    assert model.unit_names == architecture.units
    usual = architecture.make()
    torch.manual_seed(7)
    initialized(usual)
    born = model.full_state_dict() | dict(model.named_buffers())
    expected = usual.state_dict() | dict(usual.named_buffers())
    assert born.keys() == expected.keys()
    same_states("state", born, expected)
    pair, optimizer = Pair(lambda: copy.deepcopy(usual), group), RECIPES["adamw"].make(model.parameters())
    for step in range(2):
        pair.step(architecture.loss)
        take_step(optimizer, architecture.loss(model, Turn(step, pair.rank, 0)))
    for (key, got), shard in zip(model.named_parameters(), pair.model.parameters(), strict=True):
        same_bits(key, got, shard)


def weights_only(module: nn.Module) -> None:
    """Initialize as many do it by hand."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif "Norm" in type(module).__name__:
        nn.init.ones_(module.weight)


@pytest.mark.parametrize(("name", "first"), [case("ours", "Rotary"), case("llama", "LlamaRMSNorm")])
@pytest.mark.parametrize(
    ("init", "message"),
    [
        (weights_only, "left buffer 'model.rotary_emb.inv_freq' with"),
        (None, "{first} has no reset_parameters() to initialize it: pass init="),
    ],
)
def test_what_has_no_values_is_named(group, name, first, init, message):
    """On every rank."""
    with pytest.raises(LayoutError, match=re.escape(message.format(first=first))):
        ShardLite(on_meta(ARCHITECTURES[name].make), init=init, group=group)
