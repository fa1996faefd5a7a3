"""Train one system as one of its ranks, and return a row of the rank's memory.

All sizes are bytes per rank:

| key | meaning |
|---|---|
| `tensor_bytes` | the peak of all tensors in a step, on rank 0 |
| `predicted_bytes` | an upper bound of `tensor_bytes` by arithmetic (`predict.py`); absent for systems without rules |
| `predicted_least_bytes` | a lower bound of `tensor_bytes`: the peak if each reduction ends before the next gradient |
| `purposes` | `memory()` at the moment of `tensor_bytes`; the rest are activations and gradients not in a bucket |
| `compute`, `weight_bytes` | dtype of forward and backward, and the weights of the plain model in this dtype |
| `error` | why the system could not be measured; such a row has no sizes |

The following keys are measured with `process=True`. They are means over the ranks, relative to the size of a process
after its imports and the start of the process group:

| key | meaning |
|---|---|
| `made_bytes` | size with the plain model |
| `wrap_peak_bytes`, `wrapped_bytes` | peak while the model is created and wrapped, and size afterwards |
| `pss_bytes` | peak of the proportional set size in a step, of all ranks together |
| `pss_apart_bytes` | peak of the proportional set size of a rank by itself |
| `pss_vs_fsdp2` | `pss_bytes` divided by the `pss_bytes` of FSDP2 |
| `between_bytes` | size between two steps |
| `pss_purposes` | the result of `memory()` at the moment of `pss_bytes` |
| `unexplained` | the fraction of `pss_bytes` that neither `pss_purposes` nor the system `activations` explains |

The system `activations` runs forward and backward of the plain model, without its gradients. The size of this system
includes autograd's own memory, buffers of libraries, and code that is loaded during the step.
"""

import gc
import os
import subprocess
import sys
import threading
import time
from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlite import ShardLite
from shardlite.comm import all_gather_json
from shardlite.lab.compared.systems import OPTIMIZER, System
from shardlite.lab.compared.trainer import Trainer
from shardlite.lab.memory.machine import machine
from shardlite.lab.memory.peak import peak_of
from shardlite.model import ModelState
from shardlite.plan import Source

Row = dict[str, Any]

WARM_UP = 3
"""Number of warm-up steps. They allocate the optimizer's state, and record the order of gathers."""

STEPS = 3
"""Default number of steps in which processes are sampled."""

_PAUSE = 0.002
"""Seconds between two samples of `memory()`."""


def measure(
    source: Source, system: System, group: dist.ProcessGroup, *, process: bool = False, steps: int = STEPS
) -> Row:
    """Measure one system as one of the ranks of `group`, and return its row. Collective.

    Args:
        source: the model, and the batch of all steps.
        system: the system to measure.
        group: the ranks.
        process: whether to sample the size of the processes as well.
        steps: number of steps in which processes are sampled.
    """
    system.prepare()
    parameters = source.parameters()  # also imports the packages of the model, so that no import is measured
    given = source.batch()
    source = replace(source, batch=lambda: given)
    if process:
        trainer, sizes = _sample_processes(source, system, group, steps)
    else:
        trainer, sizes = system.train(source, group), {}
        warm_up(trainer)
    gc.collect()
    tensor_bytes, purposes = peak_of(partial(take_step, trainer), lambda: _purposes_of(trainer.model))
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


def take_step(trainer: Trainer, enter: Callable[[str], object] = lambda _: None) -> None:
    """Take one training step. Call `enter` with the name of each phase when the phase begins."""
    enter("forward")
    loss = trainer.loss(())  # type: ignore[arg-type]  # the loss holds the batch
    enter("backward")
    trainer.differentiate(loss)
    enter("step")
    trainer.update()


def warm_up(trainer: Trainer) -> None:
    """Take the warm-up steps, which are not measured."""
    for _ in range(WARM_UP):
        take_step(trainer)


def compared(rows: list[Row]) -> list[Row]:
    """Add `pss_vs_fsdp2` and `unexplained` to rows that differ only in the system."""
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
    """Build and warm up a system, and return its trainer and the sizes of the processes."""
    gc.collect()
    sampler = _Sampler(group)
    made = source.make()
    sizes: Row = {"made_bytes": sampler.sample()[1]}
    del made
    gc.collect()
    sampler.sample()
    trainer = system.train(source, group)
    sizes["wrap_peak_bytes"], sizes["wrapped_bytes"] = sampler.sample()
    warm_up(trainer)
    sampler.sample()
    with _Account(trainer.model) as account:
        for _ in range(steps):
            take_step(trainer)
        sizes["pss_bytes"], sizes["between_bytes"] = sampler.sample()
        sizes["pss_apart_bytes"] = sampler.apart
    sampler.close()
    return trainer, {**sizes, "pss_purposes": account.mean_at(sampler.when, group)}


def _compute(model: nn.Module) -> torch.dtype:
    """Return the dtype of forward and backward."""
    own = model.precision.compute if isinstance(model, ShardLite) else None
    return own or next(model.parameters()).dtype


class _Sampler:
    """Samples the mean proportional set size of a group's ranks, minus the mean at the start.

    All methods are collective.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        processes = all_gather_json(group, os.getpid(), "the numbers of the processes")
        self._program = None
        if group.rank() == 0:
            command = [sys.executable, "-S", "-E", str(Path(__file__).parent / "pss.py"), *map(str, processes)]
            self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._start = self.when = self.apart = 0
        self._start = self.sample()[1]

    def sample(self) -> tuple[int, int]:
        """Return the peak since the previous call, and the current size, in bytes.

        The attribute `when` is set to the moment of the peak, in nanoseconds of the monotonic clock, and `apart` to the
        mean of the peaks of each rank by itself.
        """
        dist.barrier(self._group)
        answer = [0] * 4
        if self._program is not None:
            assert self._program.stdin is not None
            assert self._program.stdout is not None
            print(file=self._program.stdin, flush=True)
            answer = [int(word) for word in self._program.stdout.readline().split()]
        peak, now, self.when, apart = all_gather_json(self._group, answer, "what the processes hold")[0]
        peak, now, self.apart = (total // self._group.size() - self._start for total in (peak, now, apart))
        return peak, now

    def close(self) -> None:
        """End the sampling program."""
        if self._program is not None:
            self._program.communicate()


class _Account:
    """Samples the bytes by purpose of this rank during a `with` block. Systems without `memory()` have no purposes.

    A second thread takes the samples. The thread reads only counters, because `memory()` would read gradients while the
    backward writes them. A call of `memory()` beforehand registers all tensors with the counters.
    """

    def __init__(self, model: nn.Module) -> None:
        _purposes_of(model)
        self._context = ModelState(model).context if isinstance(model, ShardLite) else None
        self._samples: list[tuple[int, dict[str, int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "_Account":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def mean_at(self, when: int, group: dist.ProcessGroup) -> dict[str, int]:
        """Return the bytes by purpose at a moment of the monotonic clock, as means over the ranks. Collective."""
        own = self._samples[max(0, bisect(self._samples, when, key=itemgetter(0)) - 1)][1]
        of_ranks = all_gather_json(group, own, "what memory() reports")
        return {purpose: sum(each.get(purpose, 0) for each in of_ranks) // len(of_ranks) for purpose in own}

    def _sample(self) -> None:
        over = False
        while not over:  # take at least one sample, however short the block is
            held = self._context.held() if self._context else {}
            now = {purpose: each.now for purpose, each in held.items() if each.now}
            self._samples.append((time.monotonic_ns(), now))
            over = self._over.wait(_PAUSE)


def _purposes_of(model: nn.Module) -> dict[str, int]:
    """Return the current bytes of this rank by purpose, or an empty dict for a system without `memory()`."""
    held = model.memory() if isinstance(model, ShardLite) else {}
    return {purpose: each.now for purpose, each in held.items() if each.now}
