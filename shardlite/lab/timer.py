"""Measure step times and memory. Systems take timed steps in turn, so that a busy machine affects all of them.

Legend: `W` ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, process_time, thread_time

import torch
import torch.distributed as dist

from shardlite.lab.compared.systems import Build
from shardlite.lab.compared.trainer import Trainer
from shardlite.lab.compared.workloads import Workload
from shardlite.lab.memory.peak import live_bytes, peak_in
from shardlite.telemetry import Meter

WARM_UP = 3
"""Steps that are not timed: they create optimizer state and record the gather order."""


@dataclass(frozen=True)
class Times:
    """Seconds of each step, on the slowest rank."""

    wall: list[float] = field(default_factory=list)
    """Wall time from the common start to the end."""

    cpu: list[float] = field(default_factory=list)
    """CPU time of all threads of the process. Other programs hardly affect this time."""

    main: list[float] = field(default_factory=list)
    """CPU time of the main thread."""


def time_steps(
    workload: Workload, trainers: Mapping[str, Trainer], rounds: int, group: dist.ProcessGroup
) -> dict[str, Times]:
    """Time `rounds` steps of each system.

    Each round takes one step of every system, and starts with a different system than the previous round. All ranks
    start each step together.
    """
    taken = {name: Times() for name in trainers}
    for turn in range(WARM_UP + rounds):
        batch = workload.batch(group.rank(), turn)
        for name in rotated(list(trainers), turn):
            dist.barrier(group)
            main = thread_time()
            wall, cpu = seconds(partial(trainers[name].step, batch), workload.device)
            taken[name].main.append(thread_time() - main)
            taken[name].wall.append(wall)
            taken[name].cpu.append(cpu)
    counted = {name: [each[WARM_UP:] for each in (times.wall, times.cpu, times.main)] for name, times in taken.items()}
    return {name: Times(*(largest(each, group) for each in lists)) for name, lists in counted.items()}


def seconds(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return the wall time of a call and the CPU time of this process, in seconds.

    On a GPU, the wall time is the time between two events on the current stream, including launches.
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
    """Return the peak of bytes in tensors during a step, minus the bytes before the build: the maximum over ranks.

    On a GPU, these are the bytes that PyTorch's allocator has allocated.
    """
    before = live_bytes(workload.device)
    trainer = build(workload, group)
    for step in range(WARM_UP):
        trainer.step(workload.batch(group.rank(), step))
    batch = workload.batch(group.rank(), WARM_UP)
    peak = peak_in(partial(trainer.step, batch), workload.device)
    return int(largest([peak - before], group)[0])


def activation_bytes(workload: Workload, compute: torch.dtype | None = None) -> int:
    """Return the bytes that the forward of the plain model saves for its backward."""
    model = workload.model().to(compute)
    batch = [each.to(compute) if each.is_floating_point() else each for each in workload.batch(0, 0)]
    gc.collect()
    if workload.device.type == "cuda":
        before = torch.cuda.memory_allocated(workload.device)
        loss = model(*batch)
        after = torch.cuda.memory_allocated(workload.device)
    else:
        with Meter[None]() as meter:  # counts tensors of the graph when they are created
            before = meter.live
            loss = model(*batch)
            after = meter.live
    del loss
    return after - before


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated."""
    return torch.quantile(torch.tensor(values, dtype=torch.float64), percent / 100).item()


def quantiles(key: str, values: Sequence[float], digits: int) -> dict[str, float]:
    """Return `{"KEY_p20": ..., "KEY_p50": ..., "KEY_p80": ...}`, the entries of a row, rounded to `digits`."""
    return {f"{key}_p{percent}": round(percentile(values, percent), digits) for percent in (20, 50, 80)}


def milliseconds(wall: Sequence[float]) -> dict[str, float]:
    """Return the entries `ms_p20`, `ms_p50` and `ms_p80` of a row, from times in seconds."""
    return quantiles("ms", [1e3 * each for each in wall], 2)


def rotated(names: Sequence[str], turn: int) -> Sequence[str]:
    """Return `names`, rotated by `turn`."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def largest(values: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """Return the elementwise maximum over the ranks. Collective; all ranks pass the same number of values."""
    most = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    values_of_all: list[float] = most.tolist()
    return values_of_all


def slowest(found: Mapping[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    """Return the maximum of each number over the ranks. Collective; all ranks pass the same keys."""
    return dict(zip(found, largest(list(found.values()), group), strict=True))
