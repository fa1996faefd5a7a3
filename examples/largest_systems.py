"""The models and systems of `largest_model.py`: GPTs whose size grows in small steps, and systems that train them.

All systems get models on the meta device, and the same optimizer, dtypes and checkpointing. On one rank they draw the
same initial weights.

Legend: `b` sequences, `t` bytes in a sequence, `c` width, `f` width inside the perceptron.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from shardlite import AdamW, Precision, ShardLite
from shardlite.lab.compared.gpt import BYTE_VALUES, Attention, GPTConfig

BATCH, CONTEXT = 2, 64
HEAD = 64
FAMILY = (
    f"GPTs of bytes with d blocks of width {HEAD}d, d heads and perceptrons 3 to 5 times as wide (d > 8), "
    f"batch {BATCH} x {CONTEXT}"
)

OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
TRAINING = f"bf16 gathered, fp32 reduced, blocks checkpointed, AdamW with lr {OPTIONS['lr']:g}, no clipping"


# ---- the family of models -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The shape of one model of the family."""

    depth: int
    hidden: int

    @property
    def width(self) -> int:
        """Width of the model, proportional to the depth, so that one block is about `1/depth` of the model."""
        return HEAD * self.depth

    @classmethod
    def near(cls, size: int) -> "Shape":
        """Return the shape whose blocks have about `size` parameters in total. This total is `depth (4 c^2 + 2 c f)`.

        The depth is the largest for which `f >= 3 c`. Then `f` is adjusted in steps of 8.
        """
        depth = max(1, math.floor((size / (10 * HEAD**2)) ** (1 / 3) + 1e-9))
        width = HEAD * depth
        return cls(depth, 8 * max(1, round((size / depth / width - 4 * width) / 16)))

    def parameters(self) -> int:
        """Return the number of elements in all parameters."""
        return sum(param.numel() for param in self.on_meta().parameters())

    def on_meta(self) -> "GPT":
        """Return the model on the meta device."""
        with torch.device("meta"):
            return GPT(self)


class Block(nn.Module):
    """Residual attention and residual perceptron, both recomputed in the backward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(GPTConfig(layers=shape.depth, width=width, heads=shape.depth, context=CONTEXT))
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """[b t c] -> [b t c]."""
        again: Tensor = checkpoint(self._forward, x, use_reentrant=False)
        return again

    def _forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """A model that predicts the next byte. Its embedding and head are small compared with its blocks."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_VALUES, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTE_VALUES, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy of predicting `y` [b t] from `x` [b t], in nats per byte."""
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """Initialize a module's own parameters: normal(0.02) for matrices, 1 for weights of norms, and 0 for biases."""
    for name, param in module.named_parameters(recurse=False):
        local = param.to_local() if isinstance(param, DTensor) else param
        if param.ndim >= 2:
            local.normal_(std=0.02)
        else:
            local.fill_(1.0 if name == "weight" else 0.0)  # the weight of a norm, or a bias


# ---- the systems ----------------------------------------------------------------------------------------------------

Trainer = tuple[nn.Module, Optimizer]


def fsdp2(model: GPT, device: torch.device) -> Trainer:
    """Shard with PyTorch's FSDP2: one unit per block, and one for the other parameters."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device).apply(initialise)
    return model, torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)


def standard(model: GPT, device: torch.device) -> Trainer:
    """Shard with ShardLite's defaults, which find the same units."""
    sharded = _shard(model, device, Precision(compute=torch.bfloat16))
    return sharded, AdamW(sharded.parameters(), **OPTIONS)


def in_backward(model: GPT, device: torch.device) -> Trainer:
    """Step each unit as soon as its gradients are reduced, so that gradients of all units never exist together."""
    sharded = _shard(model, device, Precision(compute=torch.bfloat16))
    return sharded, AdamW(sharded.parameters(), **OPTIONS, in_backward=True)


def compact(model: GPT, device: torch.device) -> Trainer:
    """Step each unit in the backward like `in_backward`, but with 24-bit weights and 8-bit optimizer state."""
    sharded = _shard(model, device, Precision(compute=torch.bfloat16, master="split24"))
    return sharded, AdamW(sharded.parameters(), **OPTIONS, in_backward=True, state="int8")


def _shard(model: GPT, device: torch.device, precision: Precision) -> ShardLite:
    return ShardLite(model, device=device, init=initialise, precision=precision)


BASE = "FSDP2"
SYSTEMS: dict[str, Callable[[GPT, torch.device], Trainer]] = {
    BASE: fsdp2,
    "ShardLite": standard,
    "ShardLite, in_backward": in_backward,
    "ShardLite, in_backward, split24, int8": compact,
}
"""Systems by their names in the table. The table compares all systems with `BASE`."""
