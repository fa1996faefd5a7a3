"""Memory of one training step on a rank, by purpose, for a sharded model and for plain data parallel.

The library's ledger counts its own memory, and a meter counts all tensors. The difference is the program's memory:
activations, temporary results, the batch.
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
    """By purpose, each at its own peak. Peaks may occur at different moments, so their sum may exceed `peak`."""

    activations: int
    """Bytes without a purpose in `held`, at the moment of the peak."""

    peak: int
    """The maximum of all tensors together."""


def measure(step: Callable[[], object], ledger: Ledger) -> Footprint:
    """Run `step` under a meter, and return its footprint."""
    ledger.reset_peak()
    with Meter(on_peak=ledger.current) as meter:
        step()
    booked = sum((meter.at_peak or {}).values())
    return Footprint(held=ledger.peak(), activations=meter.peak - booked, peak=meter.peak)


def measure_plain(model: nn.Module, batches: Iterable[Batch], max_norm: float) -> Footprint:
    """Return the footprint of one step of an unsharded `model`: that of plain data parallel, without its buckets."""
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

    step()  # the first step allocates the optimizer's state
    book_state(ledger, optimizer)
    return measure(step, ledger)


def book_state(ledger: Ledger, optimizer: Optimizer) -> None:
    """Track the tensors that `optimizer` keeps from step to step."""
    for value in tree_leaves(list(optimizer.state.values())):
        if isinstance(value, Tensor):
            ledger.track("optimizer state", value)


def _book_gradient(ledger: Ledger, parameter: Tensor) -> None:
    if parameter.grad is not None:
        ledger.track("gradients", parameter.grad)
