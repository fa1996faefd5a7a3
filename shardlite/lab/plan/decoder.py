"""The models of presets, built from PyTorch's modules without other packages. They are planned, not trained.

Legend: `b` sequences, `t` tokens in a sequence, `c` width, `h` heads, `d = c / h`, `v` vocabulary.
"""

import torch.nn.functional as F  # noqa: N812
from einops import rearrange, repeat
from torch import Tensor, nn

from shardlite.lab.gpt import rotate
from shardlite.lab.plan.presets import Shape


class Attention(nn.Module):
    """Causal self-attention. Several query heads may share one key and value head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        biases, self.heads = shape.kind == "gpt2", shape.heads
        self.groups, self.rotary = shape.kv_heads or shape.heads, shape.kind == "llama"
        each = shape.width // shape.heads
        self.q = nn.Linear(shape.width, shape.width, bias=biases)
        self.kv = nn.Linear(shape.width, 2 * self.groups * each, bias=biases)
        self.out = nn.Linear(shape.width, shape.width, bias=biases)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states: [b t c] -> [b t c]."""
        q = rearrange(self.q(x), "b t (h d) -> b h t d", h=self.heads)
        k, v = rearrange(self.kv(x), "b t (two g d) -> two b g t d", two=2, g=self.groups)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        if self.groups < self.heads:
            k, v = (repeat(each, "b g t d -> b (g n) t d", n=self.heads // self.groups) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(attended, "b h t d -> b t (h d)"))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Two matrices with GELU between them, or three with SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        biases, hidden = shape.kind == "gpt2", shape.hidden or 4 * shape.width
        self.rise = nn.Linear(shape.width, hidden, bias=biases)
        self.gate = nn.Linear(shape.width, hidden, bias=False) if shape.kind == "llama" else None
        self.fall = nn.Linear(hidden, shape.width, bias=biases)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states: [b t c] -> [b t c]."""
        rise = self.rise(x)
        risen = F.gelu(rise, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * rise
        return self.fall(risen)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then an MLP, each with a norm in front and a residual connection around norm and module."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(shape), Attention(shape)
        self.mlp_norm, self.mlp = _norm(shape), Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states: [b t c] -> [b t c]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A decoder that predicts the next token at every position. Its forward returns the loss."""

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
        """Return the mean loss [] of tokens `x` [b t] whose next tokens are `y` [b t]."""
        hidden = self.embedding(x)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(rearrange(logits, "b t v -> (b t) v").float(), rearrange(y, "b t -> (b t)"))


def _norm(shape: Shape) -> nn.Module:
    return nn.LayerNorm(shape.width) if shape.kind == "gpt2" else nn.RMSNorm(shape.width)
