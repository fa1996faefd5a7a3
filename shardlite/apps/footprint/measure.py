"""One system measured by its ranks: what each holds while the model is made and wrapped, in a step and between steps.

All sizes are bytes of one rank, above what it held after the imports and the start of the process group:

| key | what it is |
|---|---|
| `wrap_peak_bytes`, `made_bytes`, `wrapped_bytes` | while the model is made and wrapped at most; made; wrapped |
| `pss_bytes` | the most in a step: proportional set size, mean of the ranks |
| `pss_vs_fsdp2` | that as a part of FSDP2's |
| `between_bytes` | the same between two steps |
| `tensor_bytes` | the most bytes in tensors in a step, on rank 0 |
| `predicted_bytes` | the same by arithmetic, at most (`predict.py`); absent where no rules are known |
| `predicted_least_bytes` | the same, if each reduction of ShardLite ends before the next gradient; else equal |
| `purposes` | what `memory()` says at that moment; the rest are activations, and gradients on their way |
| `pss_purposes` | what `memory()` says at the moment of `pss_bytes`, mean of the ranks |
| `weight_bytes`, `compute` | of the plain model, in the dtype that it computes in |
| `unexplained` | the part of `pss_bytes` that is not in `pss_purposes`, nor beside the weights in `activations` |
| `error` | why the system could not be measured; there are no sizes then |

`activations` are forward and backward of the plain model alone, without its gradients: autograd's own memory, the
libraries' buffers and code that is loaded then are in it, too.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlite import ShardLite
from shardlite.apps.footprint.machine import machine
from shardlite.apps.footprint.sampler import Account, Sampler, purposes_of
from shardlite.apps.footprint.systems import OPTIMIZER, SYSTEMS, Trainer
from shardlite.apps.plan.source import Source
from shardlite.telemetry import Meter

Row = dict[str, Any]

WARM_UP = 3
"""Steps before those that are sampled: by then optimizers have their state, and orders are recorded."""

STEPS = 3
"""Steps that are sampled; the largest counts."""


def measure(source: Source, system: str, group: dist.ProcessGroup, *, steps: int = STEPS) -> Row:
    """Measure one system as one of the ranks of `group`, and return its row.

    Args:
        source: the model, and a batch that each step takes.
        system: a name of `SYSTEMS`.
        group: all ranks call it.
        steps: steps that are sampled.
    """
    SYSTEMS[system].prepare()
    parameters = _count(source)
    given = source.batch()
    source = replace(source, batch=lambda: given)
    gc.collect()
    sampler = Sampler(group)
    sizes = {"made_bytes": _made_bytes(source, sampler)}
    trainer = SYSTEMS[system].build(source, group)
    sizes["wrap_peak_bytes"], sizes["wrapped_bytes"] = sampler.take()
    for _ in range(WARM_UP):
        trainer.step()
    sampler.take()
    with Account(trainer.model) as account:
        for _ in range(steps):
            trainer.step()
        sizes["pss_bytes"], sizes["between_bytes"] = sampler.take()
    sampler.close()
    sizes["tensor_bytes"], purposes = _tensors(trainer)
    compute = _compute(trainer.model)
    return {
        **_facts(source, system, group, parameters),
        **sizes,
        "purposes": purposes,
        "pss_purposes": account.mean_at(sampler.when, group),
        "weight_bytes": parameters * compute.itemsize,
        "compute": str(compute).removeprefix("torch."),
    }


def compared(rows: list[Row]) -> list[Row]:
    """Add to each row how it compares with FSDP2, and what of it nothing explains. They differ in the system only."""
    measured = [row for row in rows if "error" not in row]
    fsdp2 = [row["pss_bytes"] for row in measured if row["system"] == "fsdp2"]
    alone = [row for row in measured if row["system"].startswith("activations")]
    beside = {row["compute"]: row["pss_bytes"] - row["weight_bytes"] for row in alone}
    for row in measured:
        if fsdp2:
            row["pss_vs_fsdp2"] = round(row["pss_bytes"] / fsdp2[0], 3)
        if row["pss_purposes"] and row["compute"] in beside:
            explained = sum(row["pss_purposes"].values()) + beside[row["compute"]]
            row["unexplained"] = round((row["pss_bytes"] - explained) / row["pss_bytes"], 3)
    return rows


def _facts(source: Source, system: str, group: dist.ProcessGroup, parameters: int) -> Row:
    return {
        "bench": "footprint",
        "model": source.name,
        "words": source.words,
        "parameters": parameters,
        "optimizer": OPTIMIZER,
        "ranks": group.size(),
        "threads": torch.get_num_threads(),
        **machine(),
        "system": system,
    }


def _count(source: Source) -> int:
    """Return the elements in all parameters, and import what the model imports, so that this is not measured."""
    try:
        with torch.device("meta"):
            model = source.make()
    except (NotImplementedError, RuntimeError):  # its constructor reads values
        model = source.make()
    return sum(param.numel() for param in model.parameters())


def _made_bytes(source: Source, sampler: Sampler) -> int:
    """Return what the model alone adds to a process. It is dropped again."""
    made = source.make()
    _, nbytes = sampler.take()
    del made
    gc.collect()
    sampler.take()
    return nbytes


def _tensors(trainer: Trainer) -> tuple[int, dict[str, int]]:
    """Return the most bytes in tensors during one more step, and at that moment the bytes by purpose."""
    gc.collect()
    with Meter(on_peak=lambda: purposes_of(trainer.model)) as meter:
        trainer.step()
    return meter.peak, meter.at_peak or {}


def _compute(model: nn.Module) -> torch.dtype:
    """Return the dtype of forward and backward."""
    own = model.precision.compute if isinstance(model, ShardLite) else None
    return own or next(model.parameters()).dtype
