"""Measure the peak of one training step on a rank, in bytes of tensors, by purpose.

`Meter` counts all tensors. Tensors without a purpose in a `Ledger` are activations, temporary results and the batch.
"""

import gc
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
    """Peak bytes of each purpose. Purposes peak at different moments, so the sum of their peaks may exceed `peak`."""

    activations: int
    """Bytes that have no purpose in `held`, at the moment of the peak."""

    peak: int
    """Peak of all tensors together."""


def live_bytes(device: torch.device) -> int:
    """Return the bytes in tensors on a device. On a GPU, these are those that PyTorch's allocator has allocated."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with Meter[None]() as meter:
        return meter.live


def peak_in(step: Callable[[], object], device: torch.device) -> int:
    """Run `step`, and return the peak of `live_bytes` in it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    return peak_of(step, dict)[0]


def peak_of(step: Callable[[], object], purposes: Callable[[], dict[str, int]]) -> tuple[int, dict[str, int]]:
    """Run `step`. Return the peak of all tensors in bytes, and the result of `purposes` at the moment of the peak."""
    with Meter(on_peak=purposes) as meter:
        step()
    return meter.peak, meter.at_peak or {}


def measure_step(step: Callable[[], object], ledger: Ledger) -> Footprint:
    """Run `step`, and return its footprint by the purposes of `ledger`."""
    ledger.reset_peak()
    peak, purposes = peak_of(step, ledger.current)
    return Footprint(held=ledger.peak(), activations=peak - sum(purposes.values()), peak=peak)


def measure_plain(model: nn.Module, batches: Iterable[Batch], max_norm: float) -> Footprint:
    """Return the footprint of one step of an unsharded `model`, as in plain data parallel without buckets."""
    ledger = Ledger()
    for parameter in model.parameters():
        ledger.track("parameters", parameter)
        hook: Any = parameter.register_post_accumulate_grad_hook
        hook(lambda p: ledger.track("gradients", p.grad))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    known = list(batches)

    def step() -> None:
        for x, y in known:
            (model(x, y) / len(known)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()

    step()  # this first step allocates the optimizer's state
    track_state(ledger, optimizer)
    return measure_step(step, ledger)


def track_state(ledger: Ledger, optimizer: Optimizer) -> None:
    """Track the tensors that `optimizer` keeps between steps as `"optimizer state"`."""
    for value in tree_leaves(list(optimizer.state.values())):
        if isinstance(value, Tensor):
            ledger.track("optimizer state", value)
