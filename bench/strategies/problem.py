"""The training problem of every strategy: a small GPT on the bytes of Python's standard library, with AdamW.

With AdamW, averaging weights differs visibly from averaging gradients, because each rank has second moments of its own
gradients. With plain SGD, averaging weights after each step gives the same weights as averaging gradients.

Legend: `W` ranks, `B` sequences in a global batch, `t` bytes in a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import count

import torch
from torch import Tensor, nn

from shardlite.lab.compared.gpt import GPT
from shardlite.lab.train.settings import GPTConfig
from shardlite.lab.train.text import Corpus, draw_sequences, read_corpus

CONFIG = GPTConfig(layers=4, width=96, heads=4, context=64)

BATCH = 16
"""Sequences in a global batch."""

SEED = 0

ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}

Batch = tuple[Tensor, Tensor]


def make_model() -> GPT:
    """Return the model with its initial weights, the same on every rank."""
    torch.manual_seed(SEED)
    return GPT(CONFIG)


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return PyTorch's AdamW with the settings that all strategies share."""
    return torch.optim.AdamW(params, fused=True, **ADAMW)


def batches(size: int, *, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
    """Yield a rank's part of each global batch of `size` sequences: bytes x [size/W t], and their next bytes y.

    Sequence `i` is the same for every batch size and number of ranks.

    Raises:
        ValueError: If `size` is not a multiple of `ranks`.
    """
    if size % ranks:
        raise ValueError(f"a global batch of {size} sequences cannot be split evenly over {ranks} ranks")
    share = size // ranks
    for step in count():
        first = step * size + rank * share
        yield draw_sequences(corpus().train, CONFIG.context, [(SEED, number) for number in range(first, first + share)])


@lru_cache
def corpus() -> Corpus:
    """Return the text that `shardlite train` reads by default."""
    return read_corpus(None, context=CONFIG.context)


def words(model: nn.Module) -> str:
    """Return a description of model, data and optimizer."""
    parameters = sum(param.numel() for param in model.parameters())
    settings = ", ".join(f"{name} {value}" for name, value in ADAMW.items())
    return (
        f"GPT of {CONFIG.layers} blocks of width {CONFIG.width}, {parameters:,} parameters in fp32, global batch "
        f"{BATCH} x {CONFIG.context} bytes of Python's standard library; AdamW, {settings}"
    )
