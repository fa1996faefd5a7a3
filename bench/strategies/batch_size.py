"""Train with larger batches: with the linear learning-rate rule and warm-up, and by accumulating gradients.

The rule (Goyal et al. 2017): if the batch is `k` times as large, use a learning rate `k` times as large, so that a step
moves about as far as `k` small steps. The rule does not hold while weights change fast, so the learning rate starts at
that of the small batch and rises during the warm-up. The rule was derived for SGD, so the optimizer is SGD with
momentum.

Legend: `B` sequences in the smallest batch, `k B` sequences in a larger batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.strategies.problem import CONFIG, SEED, batches, corpus, make_model
from shardlite.lab.compared.check import UNIT_ROUNDOFF
from shardlite.lab.table import Row
from shardlite.lab.train.text import draw_sequences

SMALLEST = 4
"""Sequences in a batch of size `B`."""

FACTORS = (1, 2, 4, 8)

SAMPLES = 1024
"""Number of sequences in every run, so that the largest batch takes 32 steps."""

LR = 0.02
"""Learning rate of the smallest batch."""

WARM_UP = 0.2
"""Fraction of a run in which the learning rate rises."""

RULES = ("constant", "linear", "linear, warm-up")
"""Learning rates for `k` times the smallest batch: the same rate, `k` times this rate, or a rise to this multiple."""

_MOMENTUM = 0.9
_VALIDATIONS = 8
_VALIDATED = 32  # sequences


def learning_rate(rule: str, k: int, progress: float) -> float:
    """Return the learning rate for a batch of `k B` sequences at `progress` of the run, from 0 to 1."""
    if rule == "constant":
        return LR
    if rule == "linear" or progress >= WARM_UP:
        return k * LR
    return LR * (1 + (k - 1) * progress / WARM_UP)


def train(k: int, rule: str, samples: int = SAMPLES) -> Row:
    """Train on `samples` sequences in batches of `k B`. Return a row with the validation losses."""
    model, size = make_model(), k * SMALLEST
    optimizer = torch.optim.SGD(model.parameters(), momentum=_MOMENTUM)
    steps = samples // size
    at, losses = [0], [validation_loss(model)]
    for step, (x, y) in zip(range(steps), batches(size), strict=False):
        optimizer.param_groups[0]["lr"] = learning_rate(rule, k, step / steps)
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) * _VALIDATIONS // steps > step * _VALIDATIONS // steps:
            at.append((step + 1) * size)
            losses.append(validation_loss(model))
    words = f"SGD, momentum {_MOMENTUM}, lr {LR} at a batch of {SMALLEST}, warm-up in {WARM_UP:.0%} of a run"
    return {"batch": size, "rule": rule, "lr": LR if rule == "constant" else k * LR, "steps": steps, "words": words} | {
        "samples": at,
        "losses": [round(loss, 4) for loss in losses],
    }


@torch.no_grad()
def validation_loss(model: nn.Module) -> float:
    """Return the mean loss on validation text, in nats per byte."""
    keys = [(SEED, 1, number) for number in range(_VALIDATED)]
    loss: Tensor = model(*draw_sequences(corpus().validation, CONFIG.context, keys))
    return loss.item()


def learning_rates(say: Callable[[str], None], samples: int = SAMPLES) -> list[Row]:
    """Train with all batch sizes and all rules. The runs are divided among the ranks. Each rank returns all rows."""
    runs = [(k, rule) for k in FACTORS for rule in RULES if k > 1 or rule == "linear"]
    mine = []
    for number, (k, rule) in enumerate(runs):
        if number % dist.get_world_size() == dist.get_rank():
            say(f"batch {k * SMALLEST}, learning rate {rule}")
            mine.append((number, train(k, rule, samples)))
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    return [row for _, row in sorted((run for part in of_all for run in part), key=lambda run: run[0])]


def large_batch(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Compute the gradients of one large batch."""
    model(x, y).backward()


def accumulated(model: nn.Module, x: Tensor, y: Tensor, *, k: int) -> None:
    """Compute the gradients of `large_batch` from `k` micro-batches. Each loss is divided by `k`."""
    for micro_x, micro_y in zip(x.chunk(k), y.chunk(k), strict=True):
        loss = model(micro_x, micro_y) / k
        loss.backward()


def accumulation(k: int = FACTORS[-1]) -> Row:
    """Compare the gradients of `k` micro-batches and of a batch `k` times as large with the exact gradient in fp64.

    In the Euclidean norm, the error of accumulation may be twice the error of the large batch, plus the error of
    rounding the exact gradient. `tolerance_used` is the error divided by this limit.
    """
    x, y = next(batches(k * SMALLEST))
    exact = _gradient(make_model().double(), partial(large_batch, x=x, y=y))
    whole, parts = (
        (_gradient(make_model(), by) - exact).norm() / exact.norm()
        for by in (partial(large_batch, x=x, y=y), partial(accumulated, x=x, y=y, k=k))
    )
    used = parts / (2 * whole + UNIT_ROUNDOFF)
    return {"batch": k * SMALLEST, "micro_batches": k, "tolerance_used": round(used.item(), 3)} | {
        "large_batch_off_by": whole.item(),
        "accumulated_off_by": parts.item(),
    }


def _gradient(model: nn.Module, make: Callable[[nn.Module], None]) -> Tensor:
    """Return all gradients in one vector, in fp64."""
    make(model)
    return torch.cat([param.grad.double().flatten() for param in model.parameters()])
