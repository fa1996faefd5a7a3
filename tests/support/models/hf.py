"""Small models of well-known architectures with random weights: those of Hugging Face, PyTorch's own, and one of ours.

Ours has what is particular to Hugging Face's, without their package: tests of those are slow ones, which need
`transformers`. That is imported inside functions, since it takes seconds, in every worker that does it. Sizes are odd
where the architecture allows it, so cuts between ranks fall inside parameters. Dropout is on where it is by default.

Legend: `B` rows of a batch, `T` tokens in a row, `D` width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.models.small import CausalLM
from tests.support.twins.sharded import Loss, Turn

VOCABULARY = 53
WIDTH = 12
HIDDEN = 19
LABELS = 7
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BLOCK = {"num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": 2}
SEQ2SEQ = TOKENS | {
    "d_model": WIDTH,
    "d_kv": 5,
    "d_ff": HIDDEN,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


def gpt2(**settings: Any) -> nn.Module:
    """Conv1D layers, learnt positions, the head tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": WIDTH, "n_layer": 3, "n_head": 2, "n_positions": 32, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(GPT2Config(**TOKENS | shape | settings))


def llama(**settings: Any) -> nn.Module:
    """Rotary positions, six heads that share three keys; embedding and head are not tied unless asked for."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 2}
    return LlamaForCausalLM(LlamaConfig(**TOKENS | BLOCK | heads | settings))


def bert(**settings: Any) -> nn.Module:
    """Three embeddings, the head's weight and bias tied."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**TOKENS | BLOCK | {"max_position_embeddings": 32} | settings))


def t5(**settings: Any) -> nn.Module:
    """Encoder, decoder and head share one embedding; the first block of each has the positions of all."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(**SEQ2SEQ | settings))


def switch(**settings: Any) -> nn.Module:
    """T5 with experts in a `ModuleDict`, of which only those run that have got tokens."""
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    experts = {"num_experts": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 64}
    return SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**SEQ2SEQ | experts | settings))


def mixtral(**settings: Any) -> nn.Module:
    """Each layer's experts are slices of 3-D parameters, whose rows PyTorch wants to be multiples of 16 bytes."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_key_value_heads": 1, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20}
    return MixtralForCausalLM(MixtralConfig(**TOKENS | BLOCK | experts | settings))


def vit(**settings: Any) -> nn.Module:
    """A convolution and parameters that belong to no layer, blocks, a small head."""
    from transformers import ViTConfig, ViTForImageClassification

    images = {"image_size": 9, "patch_size": 3, "num_labels": LABELS}
    return ViTForImageClassification(ViTConfig(**BLOCK | images | settings))


def causal_lm() -> nn.Module:
    """Ours."""
    return CausalLM(VOCABULARY, WIDTH, HIDDEN)


def torch_transformer(**settings: Any) -> nn.Module:
    """PyTorch's encoder and decoder."""
    shape = {"d_model": WIDTH, "nhead": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": HIDDEN}
    return nn.Transformer(**shape | settings, batch_first=True)


def seeded(turn: Turn) -> torch.Generator:
    """Return a turn's generator, and seed dropout."""
    torch.manual_seed(turn.generator().initial_seed())
    return turn.generator()


def drawn_tokens(turn: Turn, length: int = 7) -> Tensor:
    """Draw this turn's tokens, without any that mean an end or a padding, [B, T]."""
    return torch.randint(3, VOCABULARY, (2, length), generator=seeded(turn))


def drawn_vectors(turn: Turn) -> Tensor:
    """Draw what a block may be given, [B, T, D]."""
    return torch.randn(2, 5, WIDTH, generator=seeded(turn))


def on_next_tokens(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Predict each next token."""
    tokens = drawn_tokens(turn)
    return model(input_ids=tokens, labels=tokens).loss


def on_masked_tokens(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Predict some tokens; the second row is shorter than the first, so it is padded."""
    tokens = drawn_tokens(turn)
    there = torch.ones_like(tokens)
    there[1, 5:] = 0
    chosen = torch.arange(tokens.shape[1]) % 3 == 1
    return model(
        input_ids=tokens.masked_fill(chosen, 3) * there,
        attention_mask=there,
        labels=tokens.masked_fill(~chosen | (there == 0), -100),
    ).loss


def on_pairs(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Translate a row of tokens into another one."""
    source, target = drawn_tokens(turn, 11).split((6, 5), dim=1)
    return model(input_ids=source, labels=target.contiguous()).loss


def on_routed_tokens(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Predict each next token, and spread tokens over experts."""
    tokens = drawn_tokens(turn)
    return model(input_ids=tokens, labels=tokens, output_router_logits=True).loss


def on_images(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Classify noise."""
    generator = seeded(turn)
    pixels = torch.randn(3, 3, 9, 9, generator=generator)
    return model(pixel_values=pixels, labels=torch.randint(LABELS, (3,), generator=generator)).loss


def on_vectors(model: Callable[..., Any], turn: Turn) -> Tensor:
    """Map vectors to their reverse. PyTorch's fast path of evaluation, of other bits, takes no module with hooks."""
    x = drawn_vectors(turn)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return functional.mse_loss(model(x, x.roll(1, dims=1)), x.flip(1))
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@dataclass(frozen=True)
class Architecture:
    """How to make a model of it and what to train it on, and how it is to be cut."""

    make: Callable[..., nn.Module]
    loss: Loss
    units: Sequence[str]
    """Units that are found by default."""


def numbered(*lists: str, count: int = 2) -> list[str]:
    return [f"{name}.{i}" for name in lists for i in range(count)]


ARCHITECTURES = {
    "gpt2": Architecture(gpt2, on_next_tokens, ["(root)", *numbered("transformer.h", count=3)]),
    "llama": Architecture(
        llama, on_next_tokens, ["(root)", "model.embed_tokens", *numbered("model.layers"), "lm_head"]
    ),
    "llama-tied": Architecture(
        lambda **settings: llama(tie_word_embeddings=True, **settings),
        on_next_tokens,
        ["(root)", *numbered("model.layers")],
    ),
    "bert": Architecture(bert, on_masked_tokens, ["(root)", *numbered("bert.encoder.layer")]),
    "t5": Architecture(t5, on_pairs, ["(root)", *numbered("encoder.block", "decoder.block")]),
    "switch": Architecture(switch, on_pairs, ["(root)", *numbered("encoder.block", "decoder.block")]),
    "mixtral": Architecture(mixtral, on_routed_tokens, ["(root)", *numbered("model.layers")]),
    "vit": Architecture(vit, on_images, ["(root)", *numbered("vit.layers")]),
    "nn.Transformer": Architecture(
        torch_transformer, on_vectors, ["(root)", *numbered("encoder.layers", "decoder.layers")]
    ),
    "ours": Architecture(
        causal_lm, on_next_tokens, ["(root)", "model.embed_tokens", *numbered("model.layers"), "lm_head"]
    ),
}
INSTALLED = ("nn.Transformer", "ours")

FOREIGN = (
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: `make test-all` installs it"),
)


def case(name: str, *more: Any, of: str | None = None, id: str | None = None) -> Any:
    """Return the parameters of a test, with the marks of the architecture `of` that it needs, or else `name`."""
    return pytest.param(name, *more, marks=() if (of or name) in INSTALLED else FOREIGN, id=id)
