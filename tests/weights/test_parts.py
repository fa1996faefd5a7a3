"""Parts of a wrapped model can be called directly, without registration.

Each case computes a loss without the model's own forward, or with it; gradients have the twin's bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.models.hf import ARCHITECTURES, case, drawn_tokens, drawn_vectors
from tests.support.twins.sharded import Loss, Pair, Turn


def blocks(model: nn.Module) -> nn.ModuleList:
    """Those of a GPT-2, or of ours."""
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def first_block(model: nn.Module, turn: Turn) -> Tensor:
    """One block; all other parameters have no gradient."""
    return blocks(model)[0](drawn_vectors(turn)).square().mean()


def blocks_backwards(model: nn.Module, turn: Turn) -> Tensor:
    """The blocks in another order than the model calls them in, and one twice."""
    x = drawn_vectors(turn)
    for i in (-1, 0, 1, 0):
        x = blocks(model)[i](x)
    return x.square().mean()


def encoder(model: nn.Module, turn: Turn) -> Tensor:
    """The encoder of a T5 as one would embed sentences."""
    return model.get_encoder()(input_ids=drawn_tokens(turn)).last_hidden_state.square().mean()


def encoder_then_decoder(model: nn.Module, turn: Turn) -> Tensor:
    """A T5 in two calls; the encoder's answer is used by two calls of the whole."""
    source, target = drawn_tokens(turn, 11).split((6, 5), dim=1)
    encoded = model.get_encoder()(input_ids=source)
    losses = [model(encoder_outputs=encoded, labels=labels.contiguous()).loss for labels in (target, target.flip(1))]
    return losses[0] + losses[1]


def without_head(model: nn.Module, turn: Turn) -> Tensor:
    """The body."""
    return model.model(input_ids=drawn_tokens(turn)).last_hidden_state.square().mean()


def head_in_pieces(model: nn.Module, turn: Turn) -> Tensor:
    """The head for a few tokens at a time, which is done to save memory."""
    tokens = drawn_tokens(turn)
    hidden = model.model(input_ids=tokens).last_hidden_state
    pieces = zip(hidden[:, :-1].split(2, dim=1), tokens[:, 1:].split(2, dim=1), strict=True)
    return sum(functional.cross_entropy(model.lm_head(x).flatten(0, 1), y.flatten()) for x, y in pieces)


def embedded_before(model: nn.Module, turn: Turn) -> Tensor:
    """Embeddings that are made before the forward, and used beside it."""
    tokens = drawn_tokens(turn)
    embedded = model.get_input_embeddings()(tokens)
    noise = torch.randn(embedded.shape, generator=turn.generator())
    return model(inputs_embeds=embedded + 0.1 * noise, labels=tokens).loss + embedded.square().mean()


Part = Callable[[nn.Module, Turn], Tensor]

PARTS: dict[str, tuple[Sequence[str], Part]] = {
    "block": (["ours", "gpt2"], first_block),
    "blocks-backwards": (["ours", "gpt2"], blocks_backwards),
    "encoder": (["t5"], encoder),
    "encoder-then-decoder": (["t5"], encoder_then_decoder),
    "without-head": (["ours", "llama"], without_head),
    "head-in-pieces": (["ours", "llama"], head_in_pieces),
    "embeddings": (["ours", "llama", "gpt2"], embedded_before),
}
"""The models that have such a part; GPT-2's embedding is tied to the head."""


def of_module(loss: Part) -> Loss:
    return lambda model, turn: loss(model.module, turn)


CASES = [(name, of, 2) for name, (models, _) in PARTS.items() for of in models]
WIDE = [("blocks-backwards", "gpt2", 4), ("encoder-then-decoder", "t5", 4)]


@pytest.mark.parametrize(
    ("name", "of", "group"),
    [case(*each, of=each[1], id="-".join(map(str, each))) for each in (*CASES, *WIDE)],
    indirect=["group"],
)
def test_parts_train_by_themselves(group: Any, name: str, of: str) -> None:
    """Steps of the part by itself, and of the model between them."""
    architecture, part = ARCHITECTURES[of], of_module(PARTS[name][1])
    pair = Pair(architecture.make, group)
    for loss in (part, architecture.loss, part, part):
        pair.step(loss)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            pair.evaluate(part)
