"""What each rank does: train one system, and return a row of what this rank holds.

All sizes are bytes of one rank:

| key | what it is |
|---|---|
| `tensor_bytes` | the peak of all tensors in a step, on rank 0 |
| `predicted_bytes` | the same by arithmetic, at most (`predict.py`); absent if no rules are known |
| `predicted_least_bytes` | the same if each of ShardLite's reductions ends before the next gradient; else equal |
| `purposes` | what `memory()` reports at that peak; the rest are activations, and gradients not in a bucket yet |
| `weight_bytes`, `compute` | weights of the plain model in the dtype that it computes in, and that dtype |
| `error` | why the system could not be measured; there are no sizes then |

The others are measured with `process=True`. They are means of the ranks, and count from the size of a process after its
imports and the start of the process group:

| key | what it is |
|---|---|
| `wrap_peak_bytes`, `made_bytes`, `wrapped_bytes` | peak while the model is made and wrapped; made; wrapped |
| `pss_bytes` | peak of the proportional set size in a step |
| `pss_vs_fsdp2` | that as a fraction of FSDP2's |
| `between_bytes` | the same between two steps |
| `pss_purposes` | what `memory()` reports at the moment of `pss_bytes` |
| `unexplained` | the fraction of `pss_bytes` beyond `pss_purposes` and what `activations` adds to its weights |

`activations` runs forward and backward of the plain model, without its gradients. Its size includes autograd's own
memory, buffers of libraries, and code that is loaded then.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlite import ShardLite
from shardlite.apps.memory.machine import machine
from shardlite.apps.memory.peak import peak_of
from shardlite.apps.memory.process import Account, Sampler, purposes_of
from shardlite.apps.memory.systems import OPTIMIZER, System, Trainer
from shardlite.apps.plan.source import Source

Row = dict[str, Any]

WARM_UP = 3
"""Steps before those that are measured. They allocate the optimizer's state, and record the order of gathers."""

STEPS = 3
"""Steps in which processes are sampled."""


def measure(
    source: Source, system: System, group: dist.ProcessGroup, *, process: bool = False, steps: int = STEPS
) -> Row:
    """Measure one system as one of the ranks of `group`, and return its row. Collective.

    Args:
        source: the model, and a batch that is used in each step.
        system: the system to measure.
        group: the ranks.
        process: also sample the size of the processes.
        steps: steps in which processes are sampled.
    """
    system.prepare()
    parameters = _count(source)
    given = source.batch()
    source = replace(source, batch=lambda: given)
    if process:
        trainer, sizes = _sample_processes(source, system, group, steps)
    else:
        trainer, sizes = system.build(source, group), {}
        warm_up(trainer)
    gc.collect()
    tensor_bytes, purposes = peak_of(trainer.step, lambda: purposes_of(trainer.model))
    compute = _compute(trainer.model)
    return {
        "words": source.words,
        "parameters": parameters,
        "optimizer": OPTIMIZER,
        "threads": torch.get_num_threads(),
        **machine(),
        **sizes,
        "tensor_bytes": tensor_bytes,
        "purposes": purposes,
        "weight_bytes": parameters * compute.itemsize,
        "compute": str(compute).removeprefix("torch."),
    }


def warm_up(trainer: Trainer) -> None:
    """Take the steps before those that are measured."""
    for _ in range(WARM_UP):
        trainer.step()


def compared(rows: list[Row]) -> list[Row]:
    """Add `pss_vs_fsdp2` and `unexplained` to rows that differ in the system only."""
    sampled = [row for row in rows if "pss_bytes" in row]
    fsdp2 = [row["pss_bytes"] for row in sampled if row["system"] == "fsdp2"]
    alone = [row for row in sampled if row["system"].startswith("activations")]
    added = {row["compute"]: row["pss_bytes"] - row["weight_bytes"] for row in alone}
    for row in sampled:
        if fsdp2:
            row["pss_vs_fsdp2"] = round(row["pss_bytes"] / fsdp2[0], 3)
        if row["pss_purposes"] and row["compute"] in added:
            explained = sum(row["pss_purposes"].values()) + added[row["compute"]]
            row["unexplained"] = round((row["pss_bytes"] - explained) / row["pss_bytes"], 3)
    return rows


def _sample_processes(source: Source, system: System, group: dist.ProcessGroup, steps: int) -> tuple[Trainer, Row]:
    """Build and warm up a system, and return it with the sizes of the processes."""
    gc.collect()
    sampler = Sampler(group)
    sizes: Row = {"made_bytes": _made_bytes(source, sampler)}
    trainer = system.build(source, group)
    sizes["wrap_peak_bytes"], sizes["wrapped_bytes"] = sampler.sample()
    warm_up(trainer)
    sampler.sample()
    with Account(trainer.model) as account:
        for _ in range(steps):
            trainer.step()
        sizes["pss_bytes"], sizes["between_bytes"] = sampler.sample()
    sampler.close()
    return trainer, {**sizes, "pss_purposes": account.mean_at(sampler.when, group)}


def _count(source: Source) -> int:
    """Return the elements in all parameters. Imports what the model imports, so that this is not measured."""
    try:
        with torch.device("meta"):
            model = source.make()
    except (NotImplementedError, RuntimeError):  # its constructor reads values
        model = source.make()
    return sum(param.numel() for param in model.parameters())


def _made_bytes(source: Source, sampler: Sampler) -> int:
    """Return what the model alone adds to a process. It is deleted again."""
    made = source.make()
    _, nbytes = sampler.sample()
    del made
    gc.collect()
    sampler.sample()
    return nbytes


def _compute(model: nn.Module) -> torch.dtype:
    """Return the dtype of forward and backward."""
    own = model.precision.compute if isinstance(model, ShardLite) else None
    return own or next(model.parameters()).dtype
