"""A byte-level GPT: pre-norm blocks, causal attention with rotary positions, tied embedding and head.

It is an ordinary PyTorch module that does not depend on ShardLite.

Legend: `b` sequences, `t` bytes in a sequence, `c` width, `h` heads, `d = c / h`, `v = 256` byte values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardlite.lab.train.settings import GPTConfig

BYTE_VALUES = 256


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states: [b t c] -> [b t c]."""
        q, k, v = rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        mixed: Tensor = self.out(rearrange(attended, "b h t d -> b t (h d)"))
        return mixed


def rotate(x: Tensor) -> Tensor:
    """Rotate each pair of elements of the vectors `x` [... t d] by an angle proportional to the vector's position.

    The product of two rotated vectors depends on their positions only through the distance of the positions, so
    blocks need no other position encoding (Su et al. 2021, "RoFormer"). Pair `i` consists of the elements i and
    i + d/2. From one position to the next, the angle of pair `i` grows by 10000^(-2i/d).
    """
    t, d = x.shape[-2:]
    speed = 10000.0 ** (torch.arange(0, d, 2, device=x.device) / -d)
    angle = torch.outer(torch.arange(t, device=x.device), speed)
    first, second = x.chunk(2, dim=-1)
    turned = first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()
    return torch.cat(turned, dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention, then an MLP, each with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states: [b t c] -> [b t c]."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Predicts the next byte at every position of a text.

    Args:
        config: the shape of the model.
        recompute: whether the backward recomputes the blocks, so that their activations need not be kept.
    """

    def __init__(self, config: GPTConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        self.embedding = nn.Embedding(BYTE_VALUES, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, BYTE_VALUES, bias=False)
        self._initialize()
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the logits [b t v] of the byte after each byte of `x` [b t].

        If the following bytes `y` [b t] are given, return the mean loss in nats per byte instead.

        Raises:
            ValueError: `t` exceeds the context.
        """
        if x.shape[1] > self.config.context:
            raise ValueError(f"GPT got {x.shape[1]} bytes, but its context is {self.config.context}")
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        if y is None:
            return logits
        return F.cross_entropy(rearrange(logits, "b t v -> (b t) v"), rearrange(y, "b t -> (b t)"))

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """Return `prompt`, continued by `count` bytes that are sampled at `temperature`."""
        chance = torch.Generator().manual_seed(seed)
        text = torch.tensor([list(prompt)])
        for _ in range(count):
            logits = self(text[:, -self.config.context :])[:, -1] / temperature
            following = torch.multinomial(logits.softmax(dim=-1), 1, generator=chance)
            text = torch.cat([text, following], dim=1)
        return bytes(text[0].tolist())

    def _initialize(self) -> None:
        """Initialize as in GPT-2, from a normal distribution with the standard deviation 0.02.

        For matrices whose output is added to the residual stream, the deviation is divided by the square root of the
        number of such additions.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                adds = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** 0.5 if adds else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
