"""Step times, taken in turn so that a busy machine is busy for all, and memory, taken one system at a time.

Legend: `W` ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, process_time

import torch
import torch.distributed as dist

from bench.support.systems import Build
from bench.support.workloads import Workload
from shardlite.telemetry.meter import Meter

WARM_UP = 3
"""Steps that are not counted: by then optimizers have their state, and orders are recorded."""


@dataclass(frozen=True)
class Times:
    """Seconds of each step, on the rank that took longest."""

    wall: list[float] = field(default_factory=list)
    """From the common start to the end."""

    cpu: list[float] = field(default_factory=list)
    """That all threads of the process worked. Other programs on the machine hardly change it."""


def time_steps(
    workload: Workload, systems: Mapping[str, Build], rounds: int, group: dist.ProcessGroup
) -> dict[str, Times]:
    """Take `rounds` steps of each system.

    Each round takes one step of every system, and the next round starts with the next system. All ranks start a step
    together.
    """
    trainers = {name: build(workload, group) for name, build in systems.items()}
    taken = {name: Times() for name in trainers}
    for turn in range(WARM_UP + rounds):
        batch = workload.batch(group.rank(), turn)
        for name in rotated(list(trainers), turn):
            dist.barrier(group)
            wall, cpu = seconds(partial(trainers[name].step, batch), workload.device)
            taken[name].wall.append(wall)
            taken[name].cpu.append(cpu)
    return {
        name: Times(largest(times.wall[WARM_UP:], group), largest(times.cpu[WARM_UP:], group))
        for name, times in taken.items()
    }


def seconds(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the seconds that a call takes, and those that the threads of this process work in it.

    On a GPU the former are those between two events on the current stream, launches included.
    """
    if device.type == "cpu":
        wall, cpu = perf_counter(), process_time()
        call()
        return perf_counter() - wall, process_time() - cpu
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    cpu = process_time()
    begin.record()
    call()
    end.record()
    cpu = process_time() - cpu
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, cpu


def peak_bytes(workload: Workload, build: Build, group: dist.ProcessGroup) -> int:
    """Return the most bytes in tensors during a step on the rank that holds most, above those there before.

    On a GPU they are what PyTorch's allocator gave out.
    """
    before = _live_bytes(workload.device)
    trainer = build(workload, group)
    for step in range(WARM_UP):
        trainer.step(workload.batch(group.rank(), step))
    batch = workload.batch(group.rank(), WARM_UP)
    gc.collect()
    if workload.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(workload.device)
        trainer.step(batch)
        peak = torch.cuda.max_memory_allocated(workload.device)
    else:
        with Meter[None]() as meter:
            trainer.step(batch)
        peak = meter.peak
    return int(largest([peak - before], group)[0])


def activation_bytes(workload: Workload, compute: torch.dtype | None = None) -> int:
    """Return what the forward of the plain model leaves behind for its backward, in a dtype of computation."""
    model, batch = workload.model().to(compute), workload.batch(0, 0)
    batch = tuple(each.to(compute) if each.is_floating_point() else each for each in batch)
    gc.collect()
    if workload.device.type == "cuda":
        before = torch.cuda.memory_allocated(workload.device)
        loss = model(*batch)
        after = torch.cuda.memory_allocated(workload.device)
    else:
        with Meter[None]() as meter:  # what the graph alone holds is seen as it is made
            before = meter.live
            loss = model(*batch)
            after = meter.live
    del loss
    return after - before


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of all lie, interpolated."""
    return torch.quantile(torch.tensor(values, dtype=torch.float64), percent / 100).item()


def quantiles(key: str, values: Sequence[float], digits: int) -> dict[str, float]:
    """Return `{"KEY_p20": ..., "KEY_p50": ..., "KEY_p80": ...}`, the entries of a row, rounded to `digits`."""
    return {f"{key}_p{percent}": round(percentile(values, percent), digits) for percent in (20, 50, 80)}


def milliseconds(wall: Sequence[float]) -> dict[str, float]:
    """Return the entries `ms_p20`, `ms_p50` and `ms_p80` of a row, of seconds."""
    return quantiles("ms", [1e3 * each for each in wall], 2)


def _live_bytes(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with Meter[None]() as meter:
        return meter.live


def rotated(names: Sequence[str], turn: int) -> Sequence[str]:
    """Return `names`, beginning with another one each turn."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def largest(values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """Return the largest of all ranks, one by one. To be called by every rank, with as many values."""
    most = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    values_of_all: list[float] = most.tolist()
    return values_of_all
