"""Models that the benches train, and their batches. The forward of a model returns the loss.

Legend: `b` sequences or examples per rank, `t` bytes in a sequence, `c` width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from shardlite.lab.compared.gpt import BYTE_VALUES, GPT
from shardlite.lab.memory.machine import machine
from shardlite.lab.train.settings import GPTConfig

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its batches. Every system shards the children of the module `blocks` as units."""

    name: str
    """Name on the command line."""

    words: str
    """Description of model and batch."""

    make: Callable[[], nn.Module]
    """Function that builds the model on the default device, with the same weights in each call."""

    draw: Callable[[int, int], Batch]
    """Function of rank and step that returns a batch on the CPU. Calls with the same arguments return equal batches."""

    terms: int
    """Number of terms over which the loss averages."""

    items: int
    """Number of tokens or samples in a batch."""

    item: str = "tokens"
    """Unit of `items`: tokens or samples."""

    blocks: str = "blocks"
    """Path of the module whose children are the units."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    """Device of the model and its batches."""

    def on(self, device: torch.device) -> Workload:
        """Return the same workload on a different device."""
        return replace(self, device=device)

    def model(self) -> nn.Module:
        """Build the model on the device, with the same weights in each call."""
        with self.device:
            return self.make()

    def batch(self, rank: int, step: int) -> Batch:
        """Return the batch of a rank and step on the device, with the same values in each call."""
        x, y = self.draw(rank, step)
        return x.to(self.device), y.to(self.device)

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Return the units of a model that `model()` built."""
        return [*model.get_submodule(self.blocks).children()]

    def row(self, bench: str, ranks: int, **more: Any) -> dict[str, Any]:
        """Return the keys that all rows of a run share."""
        common = {"bench": bench, "model": self.name, "words": self.words, "ranks": ranks}
        return {**common, **more, **machine(self.device if self.device.type == "cuda" else None)}

    def parameters(self) -> int:
        """Return the number of elements in all parameters."""
        with torch.device("meta"):
            return sum(param.numel() for param in self.make().parameters())


class Perceptron(nn.Module):
    """Residual perceptron: layer norm, and two linear layers with a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rise = nn.Linear(width, 4 * width)
        self.fall = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[b c] -> [b c]."""
        rise: Tensor = self.fall(F.gelu(self.rise(self.norm(x))))
        return x + rise


class Perceptrons(nn.Module):
    """Residual blocks. The loss is the mean squared error."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Perceptron(width) for _ in range(blocks))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[b c], [b c] -> []."""
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def perceptrons(name: str, *, blocks: int, width: int, batch: int) -> Workload:
    """Return a model of residual perceptrons, trained on noise."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Perceptrons(blocks, width)

    def draw(rank: int, step: int) -> Batch:
        chance = _chance(rank, step)
        return torch.randn(batch, width, generator=chance), torch.randn(batch, width, generator=chance)

    words = f"{blocks} residual MLP blocks of width {width}, batch {batch}"
    return Workload(name=name, words=words, make=make, draw=draw, terms=batch * width, items=batch, item="samples")


class Pieces(nn.Module):
    """Many small parameters in one module. The loss depends on their mean."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(nn.Parameter(torch.randn(numel)) for _ in range(count))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[c], [c] -> []."""
        return F.mse_loss(torch.stack([*self.pieces]).mean(0) * x, y)


def pieces(name: str, *, count: int, numel: int) -> Workload:
    """Return a model of many small parameters, which are expensive for systems that handle each one separately."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Pieces(count, numel)

    def draw(rank: int, step: int) -> Batch:
        chance = _chance(rank, step)
        return torch.randn(numel, generator=chance), torch.randn(numel, generator=chance)

    words = f"{count:,} parameters of {numel:,} elements in one module"
    return Workload(name=name, words=words, make=make, draw=draw, terms=numel, items=1, item="samples", blocks="pieces")


def gpt(name: str, config: GPTConfig, *, batch: int) -> Workload:
    """Return the GPT of the demo, trained on random bytes."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(config)

    def draw(rank: int, step: int) -> Batch:
        text = torch.randint(BYTE_VALUES, (batch, config.context + 1), generator=_chance(rank, step))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    tokens = batch * config.context
    words = f"GPT of {config.layers} blocks of width {config.width}, batch {batch} x {config.context}"
    return Workload(name=name, words=words, make=make, draw=draw, terms=tokens, items=tokens)


class WithLoss(nn.Module):
    """A causal language model of transformers, whose forward returns the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[b t], [b t] -> []. The model shifts the labels."""
        loss: Tensor = self.model(x, labels=y, use_cache=False).loss
        return loss


def _attention() -> str:
    """Register PyTorch's attention under a name for which transformers makes no mask, and return the name.

    Attention is causal without a mask. Under the name "sdpa", transformers reads from the GPU in each forward whether
    sequences are packed, and if a CUDA graph is captured, it makes a mask, with which attention is slower.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    return "causal"


def transformers_gpt2(name: str, *, layers: int, width: int, vocabulary: int, context: int, batch: int) -> Workload:
    """Return GPT-2 of transformers with activation checkpointing and without dropout, on random tokens."""

    def make() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=vocabulary, **dropouts)
        )
        model.set_attn_implementation(_attention())
        checkpoint_activations(model)
        return WithLoss(model.train())

    def draw(rank: int, step: int) -> Batch:
        text = torch.randint(vocabulary, (batch, context), generator=_chance(rank, step))
        return text, text

    words = f"GPT-2 of transformers, {layers} blocks of width {width}, checkpointing, batch {batch} x {context}"
    return Workload(
        name=name,
        words=words,
        make=make,
        draw=draw,
        terms=batch * (context - 1),
        items=batch * context,
        blocks="model.transformer.h",
    )


class LlamaBlocks(nn.Module):
    """The blocks of a Llama of transformers, applied to hidden states. The loss is the mean squared error."""

    def __init__(self, **settings: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        self.model = LlamaModel(LlamaConfig(vocab_size=1, **settings))
        self.model.set_attn_implementation(_attention())
        self.model.embed_tokens = nn.Identity()  # inputs are hidden states, so there is nothing to embed

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[b t c], [b t c] -> []."""
        hidden = self.model(inputs_embeds=x, use_cache=False).last_hidden_state
        return F.mse_loss(hidden.float(), y.float())


LLAMA_BLOCK_NUMEL = 218_112_000
"""Parameters of a block of Llama 3 8B."""


def llama_blocks(name: str, *, layers: int, context: int, width: int = 4096) -> Workload:
    """Return blocks of Llama 3 8B (config.json of meta-llama/Meta-Llama-3-8B), 218.1M parameters each, on bf16 noise.

    With another `width`, blocks have the same parameters and heads, and the other sizes are in proportion.
    """
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    shape = {"hidden_size": width, "intermediate_size": 7 * width // 2, **heads}

    def make() -> nn.Module:
        torch.manual_seed(0)
        return LlamaBlocks(num_hidden_layers=layers, **shape).train()

    def draw(rank: int, step: int) -> Batch:
        chance = _chance(rank, step)
        x, y = (torch.randn(1, context, width, generator=chance) for _ in range(2))
        return x.bfloat16(), y.bfloat16()

    narrow = "" if width == 4096 else f" of width {width}"
    return Workload(
        name=name,
        words=f"{layers} blocks of Llama 3 8B{narrow}, no checkpointing, batch 1 x {context}",
        make=make,
        draw=draw,
        terms=context * width,
        items=context,
        blocks="model.layers",
    )


def compiled(workload: Workload, **options: Any) -> Workload:
    """Return the workload with each block compiled separately. `options` are passed to `torch.compile`."""

    def make() -> nn.Module:
        model = workload.make()
        for block in workload.units(model):
            block.compile(**options)
        return model

    words = workload.words.replace(", batch", ", each compiled by torch.compile, batch")
    return replace(workload, name=f"{workload.name}-compiled", words=words, make=make)


def checkpoint_activations(model: Any) -> None:
    """Enable activation checkpointing of a model of transformers. The method's name depends on the version."""
    options = {"use_reentrant": False, "preserve_rng_state": False}  # there is no dropout
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _chance(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * step + rank)


MEASURED = ("mlp", "gpt")
"""Models of `--model all`."""

WORKLOADS = {
    workload.name: workload
    for workload in (
        perceptrons("mlp", blocks=8, width=512, batch=64),
        compiled(perceptrons("mlp", blocks=8, width=512, batch=64)),
        gpt("gpt", GPTConfig(), batch=8),
        gpt("small", GPTConfig(layers=4, width=128, heads=4, context=64), batch=8),
        gpt("deep", GPTConfig(layers=20, width=512, heads=8), batch=2),
        perceptrons("tiny", blocks=2, width=32, batch=4),
        perceptrons("many", blocks=48, width=8, batch=2),
        pieces("pieces", count=2000, numel=6000),
        transformers_gpt2("gpt2", layers=12, width=768, vocabulary=8192, context=128, batch=1),
        transformers_gpt2("gpt2-xl", layers=48, width=1600, vocabulary=50257, context=1024, batch=8),
        transformers_gpt2("gpt2-xl-12", layers=12, width=1600, vocabulary=50257, context=1024, batch=2),
        transformers_gpt2("gpt2-6", layers=6, width=768, vocabulary=8192, context=128, batch=1),
        llama_blocks("llama-1k", layers=8, context=1024),
        llama_blocks("llama-4k", layers=8, context=4096),
    )
}
"""Workloads by name.

`deep`, `gpt2` and `gpt2-6` have many parameters and few tokens, to compare memory. `gpt2-xl` and Llama's blocks are for
GPUs. `pieces` is for checkpoints, `small` for many settings in little time, and `tiny` for tests. `many` measures the
host's work around blocks that take almost no time to compute. Models of transformers require the package
`transformers`.
"""

CHOICES = ("all", *WORKLOADS)
"""Values of `--model` of a bench that measures `all` models of `MEASURED`."""


def chosen(model: str) -> list[Workload]:
    """Return the workloads that a value in `CHOICES` selects."""
    return [WORKLOADS[name] for name in (MEASURED if model == "all" else (model,))]
