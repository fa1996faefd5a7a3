"""Steps of one system between the GPUs of a host. Each probe measures one system, in processes of its own.

All systems compute in bf16 and reduce in fp32, and AdamW is fused. All clip to 1.0, except `in_backward`, which cannot.

Legend: `W` ranks, `n` parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu.report import Report, free, milliseconds
from bench.gpu.several.links import busbw
from shardlite import NonFiniteWarning
from shardlite.lab.compared.systems import ON_GPU, Build
from shardlite.lab.compared.trainer import Trainer
from shardlite.lab.compared.workloads import WORKLOADS, Workload, llama_blocks, transformers_gpt2
from shardlite.lab.compared.workloads import compiled as with_compiled_blocks
from shardlite.lab.timer import slowest

_WARM_UP, _ROUNDS = 3, 8
_CLIP = 1.0


SYSTEMS: Mapping[str, Build] = {
    **{
        name: ON_GPU[name]
        for name in ("ddp", "fsdp2", "exact", "fast", "in_backward", "registered", "symmetric_memory")
    },
    **dict.fromkeys(("fsdp2_again", "fsdp2_compiled"), ON_GPU["fsdp2"]),
    **dict.fromkeys(("exact_compiled", "captured"), ON_GPU["exact"]),
}
"""Systems by the names of their probes. `fsdp2_again` shows by how much the machine has changed since `fsdp2`."""

_ONLY_ON_GPUS = ("registered", "symmetric_memory")

MODELS = {
    "llama-4k": WORKLOADS["llama-4k"],
    "gpt2-xl": WORKLOADS["gpt2-xl"],
}
_ON_A_CPU = {
    "llama-4k": llama_blocks("llama-4k", layers=2, context=8, width=64),
    "gpt2-xl": transformers_gpt2("gpt2-xl", layers=2, width=64, vocabulary=256, context=8, batch=1),
}
"""Models with the names of the real ones, for a dry run."""


def run(report: Report, group: dist.ProcessGroup) -> None:
    """Report the steps of the probe's system with each model."""
    for model in MODELS:
        names = {"model": model, "system": report.probe}
        if report.dry and report.probe in _ONLY_ON_GPUS:
            report(**names, note="needs GPUs")
            continue
        workload = workload_of(model, report)
        found = _measured(workload, report, group)
        report(**names, words=workload.words, parameters=workload.parameters(), **found)
        free()


def workload_of(model: str, report: Report) -> Workload:
    """Return a model on the device of this rank, with compiled blocks if the probe measures them."""
    workload = (_ON_A_CPU if report.dry else MODELS)[model].on(report.device)
    if not report.probe.endswith("_compiled"):
        return workload
    return with_compiled_blocks(workload, **({"backend": "eager"} if report.dry else {}))


def prepared(system: str, workload: Workload, group: dist.ProcessGroup) -> tuple[Trainer, Callable[[], Tensor]]:
    """Build a system, take its first steps, and return it with a function that takes a step."""
    warnings.simplefilter("error", NonFiniteWarning)  # the time of a skipped step is meaningless
    clip = None if system == "in_backward" else _CLIP
    trainer = replace(SYSTEMS[system](workload, group), max_norm=clip)
    on_gpu = workload.device.type == "cuda"
    take = trainer.model.capture(trainer.step, _WARM_UP) if system == "captured" and on_gpu else trainer.step
    step = partial(take, workload.batch(group.rank(), 0))
    for _ in range(_WARM_UP + 1):  # after the warm-up, the next step is captured
        step()
    return trainer, step


def _measured(workload: Workload, report: Report, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return times, memory and bandwidth of a step, of the slowest and the largest rank."""
    device, on_gpu = report.device, report.device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    trainer, step = prepared(report.probe, workload, group)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    dist.barrier(group)
    found = milliseconds(step, device, 1 if report.dry else _ROUNDS)
    if on_gpu:
        free_bytes, all_bytes = torch.cuda.mem_get_info(device)
        found |= {"peak_bytes": torch.cuda.max_memory_allocated(device) - before, "used_bytes": all_bytes - free_bytes}
    loss = float(step())
    assert loss == loss, "the loss is not a number"
    found = slowest(found, group)
    # Every system moves at least this much: two gathers in bf16 and a reduction in fp32, or an all-reduce in fp32.
    found["busbw_gbps"] = round(busbw(8 * workload.parameters(), found["ms_p50"], group.size()), 3)
    del trainer
    return found
