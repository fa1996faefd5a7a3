"""What one training step holds on a rank, by purpose, for a sharded model and for plain data parallel.

The library's own ledger says what it holds and a meter says what all tensors hold together; the difference is what the
program holds beside it: activations, temporary results, the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardlite.telemetry import Ledger, Meter

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on one rank during one step."""

    held: dict[str, int]
    """By purpose, each at its own highest: they need not meet, so their sum may exceed the peak."""

    activations: int
    """Everything that has no purpose in `held`, at the moment of the peak."""

    peak: int
    """The most that all tensors held together."""


def measure(step: Callable[[], object], ledger: Ledger) -> Footprint:
    """Run `step` under a meter."""
    ledger.reset_peak()
    with Meter(on_peak=ledger.current) as meter:
        step()
    booked = sum((meter.at_peak or {}).values())
    return Footprint(held=ledger.peak(), activations=meter.peak - booked, peak=meter.peak)


def measure_plain(model: nn.Module, batches: Iterable[Batch], max_norm: float) -> Footprint:
    """One step of `model` with nothing sharded: what every rank holds in plain data parallel, without its buckets."""
    ledger = Ledger()
    for parameter in model.parameters():
        ledger.track("parameters", parameter)
        on_gradient: Any = parameter.register_post_accumulate_grad_hook
        on_gradient(lambda p: _book_gradient(ledger, p))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    known = list(batches)

    def step() -> None:
        for x, y in known:
            (model(x, y) / len(known)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first one makes the optimizer's state
    book_state(ledger, optimizer)
    return measure(step, ledger)


def book_state(ledger: Ledger, optimizer: Optimizer) -> None:
    """Book the tensors that `optimizer` keeps from step to step."""
    for value in tree_leaves(list(optimizer.state.values())):
        if isinstance(value, Tensor):
            ledger.track("optimizer state", value)


def _book_gradient(ledger: Ledger, parameter: Tensor) -> None:
    if parameter.grad is not None:
        ledger.track("gradients", parameter.grad)
