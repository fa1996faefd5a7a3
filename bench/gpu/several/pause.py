"""Measure the time that other ranks lose if one host pauses between forward and backward in every step.

A host that runs ahead of its GPU has a lead, within which a pause costs nothing. A pause of one host that is longer
than its lead delays its GPU, and then the GPUs of all ranks, because they wait in collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from bench.gpu.report import Report, free, milliseconds
from bench.gpu.several.steps import prepared, workload_of
from shardlite.lab.timer import slowest

PAUSE = 0.05
"""Seconds."""

_ROUNDS = 8


def run(report: Report, group: dist.ProcessGroup) -> None:
    """Report the step time of each system with and without pauses of the last rank."""
    workload, rounds = workload_of("llama-4k", report), 1 if report.dry else _ROUNDS
    for system in ("fsdp2", "exact", "fast"):
        trainer, step = prepared(system, workload, group)
        found: dict[str, float] = {}
        for key, pauses in (("", 0.0), ("paused_", PAUSE)):
            hook = trainer.model.register_forward_hook(_pausing(pauses if group.rank() == group.size() - 1 else 0.0))
            dist.barrier(group)
            times = milliseconds(step, report.device, rounds)
            hook.remove()
            # The host of the paused rank is not counted: its time includes the pauses.
            host = 0.0 if group.rank() == group.size() - 1 else times["host_ms_p50"]
            found |= slowest({f"{key}ms_p50": times["ms_p50"], f"{key}host_ms_p50": host}, group)
        lost = round(found["paused_ms_p50"] - found["ms_p50"], 3)
        report(model=workload.name, system=system, words=workload.words, pause_ms=1e3 * PAUSE, **found, lost_ms=lost)
        del trainer, step
        free()


def _pausing(seconds: float) -> Callable[..., None]:
    def hook(module: object, batch: tuple[Tensor, ...], loss: Tensor) -> None:
        del module, batch, loss
        time.sleep(seconds)

    return hook
