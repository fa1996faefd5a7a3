"""Models by name, made of PyTorch's own modules, so that no other package is needed. They are planned, not trained.

Legend: `b` sequences, `t` tokens in one, `c` width, `h` heads, `d = c / h`, `v` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F  # noqa: N812
from einops import rearrange, repeat
from torch import Tensor, nn

from shardlite.apps.demo.gpt import rotate


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a decoder."""

    kind: Literal["gpt2", "llama"]
    """`gpt2`: layer norm, biases, learnt positions, GELU, one matrix for embedding and head. `llama`: RMS norm, no
    biases, rotary positions, SwiGLU, two matrices.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    kv_heads: int | None = None
    """Heads of keys and values; as many as of queries if `None`."""

    hidden: int | None = None
    """Width inside the MLP; four times the width if `None`."""

    source: str


_GPT2 = {"kind": "gpt2", "vocabulary": 50257, "context": 1024, "source": "Radford et al. 2019"}
_LLAMA2 = {"kind": "llama", "vocabulary": 32000, "context": 4096, "source": "Touvron et al. 2023"}

PRESETS: dict[str, Shape] = {
    "gpt2": Shape(layers=12, width=768, heads=12, **_GPT2),  # type: ignore[arg-type]
    "gpt2-medium": Shape(layers=24, width=1024, heads=16, **_GPT2),  # type: ignore[arg-type]
    "gpt2-large": Shape(layers=36, width=1280, heads=20, **_GPT2),  # type: ignore[arg-type]
    "gpt2-xl": Shape(layers=48, width=1600, heads=25, **_GPT2),  # type: ignore[arg-type]
    "turing-nlg": Shape(
        kind="gpt2", layers=78, width=4256, heads=28, vocabulary=50257, context=1024, source="Rasley et al. 2020"
    ),
    "gpt3-175b": Shape(
        kind="gpt2", layers=96, width=12288, heads=96, vocabulary=50257, context=2048, source="Brown et al. 2020"
    ),
    "llama-2-7b": Shape(layers=32, width=4096, heads=32, hidden=11008, **_LLAMA2),  # type: ignore[arg-type]
    "llama-2-13b": Shape(layers=40, width=5120, heads=40, hidden=13824, **_LLAMA2),  # type: ignore[arg-type]
    "llama-2-70b": Shape(layers=80, width=8192, heads=64, kv_heads=8, hidden=28672, **_LLAMA2),  # type: ignore[arg-type]
    "llama-3-8b": Shape(
        kind="llama",
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        hidden=14336,
        vocabulary=128256,
        context=8192,
        source="Dubey et al. 2024",
    ),
}


class Attention(nn.Module):
    """Causal self-attention; heads of keys and values may serve several of queries."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        biases, self.heads = shape.kind == "gpt2", shape.heads
        self.groups, self.rotary = shape.kv_heads or shape.heads, shape.kind == "llama"
        each = shape.width // shape.heads
        self.q = nn.Linear(shape.width, shape.width, bias=biases)
        self.kv = nn.Linear(shape.width, 2 * self.groups * each, bias=biases)
        self.out = nn.Linear(shape.width, shape.width, bias=biases)

    def forward(self, x: Tensor) -> Tensor:
        """[b t c] -> [b t c]."""
        q = rearrange(self.q(x), "b t (h d) -> b h t d", h=self.heads)
        k, v = rearrange(self.kv(x), "b t (two g d) -> two b g t d", two=2, g=self.groups)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        if self.groups < self.heads:
            k, v = (repeat(each, "b g t d -> b (g n) t d", n=self.heads // self.groups) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(rearrange(attended, "b h t d -> b t (h d)"))
        return mixed


class Mlp(nn.Module):
    """GELU between two matrices, or SwiGLU between three."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        biases, hidden = shape.kind == "gpt2", shape.hidden or 4 * shape.width
        self.rise = nn.Linear(shape.width, hidden, bias=biases)
        self.gate = nn.Linear(shape.width, hidden, bias=False) if shape.kind == "llama" else None
        self.fall = nn.Linear(hidden, shape.width, bias=biases)

    def forward(self, x: Tensor) -> Tensor:
        """[b t c] -> [b t c]."""
        rise = self.rise(x)
        risen = F.gelu(rise, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * rise
        fallen: Tensor = self.fall(risen)
        return fallen


class Block(nn.Module):
    """Attention, then an MLP, each with a norm before and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(shape), Attention(shape)
        self.mlp_norm, self.mlp = _norm(shape), Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        """[b t c] -> [b t c]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Predicts the next token at every position. Its forward returns the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width) if shape.kind == "gpt2" else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.kind == "gpt2":
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[b t], [b t] -> []."""
        hidden = self.embedding(x)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(rearrange(logits, "b t v -> (b t) v").float(), rearrange(y, "b t -> (b t)"))


def _norm(shape: Shape) -> nn.Module:
    return nn.LayerNorm(shape.width) if shape.kind == "gpt2" else nn.RMSNorm(shape.width)
