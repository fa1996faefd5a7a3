"""Decoders: the byte-level GPT that is trained, and the models of presets, which are planned.

They are ordinary PyTorch modules that do not depend on ShardLite. Blocks are pre-norm.

Legend: `b` sequences, `t` tokens in a sequence, `c` width, `h` heads, `d = c / h`, `v` vocabulary (256 byte values).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardlite.lab.train.settings import BYTE_VALUES as BYTE_VALUES
from shardlite.lab.train.settings import GPTConfig


class Attention(nn.Module):
    """Causal self-attention. Several query heads may share one key and value head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.rotary = config.heads, config.kind != "gpt2"
        self.groups, each = config.kv_heads or config.heads, config.width // config.heads
        if config.kind == "bytes":
            self.qkv = nn.Linear(config.width, 3 * config.width)
        else:
            self.q = nn.Linear(config.width, config.width, bias=config.biases)
            self.kv = nn.Linear(config.width, 2 * self.groups * each, bias=config.biases)
        self.out = nn.Linear(config.width, config.width, bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states: [b t c] -> [b t c]."""
        if hasattr(self, "qkv"):
            q, k, v = rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        else:
            q = rearrange(self.q(x), "b t (h d) -> b h t d", h=self.heads)
            k, v = rearrange(self.kv(x), "b t (two g d) -> two b g t d", two=2, g=self.groups)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        if self.groups < self.heads:
            k, v = (repeat(each, "b g t d -> b (g n) t d", n=self.heads // self.groups) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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


class SwiGLU(nn.Module):
    """Three matrices of an MLP, one of which gates another."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.rise, self.gate = (nn.Linear(config.width, config.inner, bias=False) for _ in range(2))
        self.fall = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states: [b t c] -> [b t c]."""
        rise = self.rise(x)
        return self.fall(F.silu(self.gate(x)) * rise)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then an MLP, each with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        gelu = nn.GELU("tanh" if config.kind == "gpt2" else "none")
        self.mlp = (
            SwiGLU(config)
            if config.kind == "llama"
            else nn.Sequential(nn.Linear(config.width, config.inner), gelu, nn.Linear(config.inner, config.width))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states: [b t c] -> [b t c]."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Predicts the next token at every position of a text.

    Args:
        config: the shape of the model.
        recompute: whether the backward recomputes the blocks, so that their activations need not be kept.
    """

    def __init__(self, config: GPTConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width) if config.kind == "gpt2" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialize()
        if config.kind != "llama":
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the logits [b t v] of the token after each token of `x` [b t].

        If the following tokens `y` [b t] are given, return the mean loss in nats per token instead.

        Raises:
            ValueError: `t` exceeds the context.
        """
        if x.shape[1] > self.config.context:
            raise ValueError(f"GPT got {x.shape[1]} bytes, but its context is {self.config.context}")
        hidden = self.embedding(x)
        if self.positions is not None:
            hidden = hidden + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        if y is None:
            return logits
        logits = logits if self.config.kind == "bytes" else logits.float()
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


def _norm(config: GPTConfig) -> nn.Module:
    return nn.RMSNorm(config.width) if config.kind == "llama" else nn.LayerNorm(config.width)
