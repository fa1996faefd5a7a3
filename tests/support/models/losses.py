"""Losses on random batches, and small models with theirs in the dtypes that `Precision` has to deal with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardlite import Precision
from tests.support.models.small import VOCABULARY, LanguageModel, MixedDtypes, frozen
from tests.support.twins.sharded import Turn

BF16 = Precision(compute=torch.bfloat16)


def on_tokens(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Predict the next token."""
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=turn.generator())
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def on_rows(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Make the output for rows of 7 numbers small."""
    return model(torch.randn(5, 7, generator=turn.generator())).float().square().mean()


def partly_frozen() -> nn.Module:
    return frozen(LanguageModel(), lambda name: "qkv" in name or "blocks.1" in name)


def mostly_bf16() -> nn.Module:
    """A model as it is often loaded, with norms in fp32."""
    model = LanguageModel(reentrant=False).bfloat16()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "plain": (LanguageModel, on_tokens),
    "checkpointed": (lambda: LanguageModel(blocks=3, reentrant=True, span=2), on_tokens),
    "frozen": (partly_frozen, on_tokens),
    "bf16": (mostly_bf16, on_tokens),
    "mixed": (MixedDtypes, on_rows),
}
