"""Fill Triton's cache with every kernel that the probes launch. Many processes compile, while the first probes run.

On a GPU, each kernel is launched at a tiny size, with lengths that are multiples of 16 and with other lengths, because
Triton compiles a separate version for each of the two. A tiny model also takes steps in each system. In a dry run, one
kernel is compiled ahead of time instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from time import perf_counter

import torch

from bench.gpu.fake_ranks import RANKS, SYSTEMS, one_of
from bench.gpu.kernels import all_works, ring_on_streams
from bench.gpu.report import Report, synchronize
from bench.kernels.clock import VERIFIED, Work
from shardlite.lab.compared.systems import FORMATS, Build
from shardlite.lab.compared.workloads import perceptrons
from shardlite.lab.ranks import only_rank

PROCESSES = 12
_LENGTHS = (VERIFIED, 327_680)

Task = Callable[[], None]


def warm_up(report: Report) -> None:
    """Compile all kernels, and report the time."""
    begin = perf_counter()
    processes = min(PROCESSES, max(1, (os.cpu_count() or 1) - 2)) if not report.dry else 1
    share = partial(compile_share, processes=processes, dry=report.dry)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        compiled = sum(pool.map(share, range(processes)))
    report(compiled=compiled, processes=processes, seconds=round(perf_counter() - begin, 1))


def compile_share(first: int, *, processes: int, dry: bool) -> int:
    """Run every `processes`-th task, starting at `first`. Return the number of tasks that succeeded."""
    torch.set_num_threads(1)  # because there are many processes
    tasks, count = _tasks_dry() if dry else _tasks(), 0
    for name, task in islice(tasks.items(), first, None, processes):
        try:
            task()
            count += 1
        except Exception as error:  # not reported here, because the probe that launches the kernel reports it
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    return count


def _tasks() -> dict[str, Task]:
    device = torch.device("cuda")
    sharded = {name: build for name, build in SYSTEMS.items() if name != "floor"}
    tasks: dict[str, Task] = {f"fake: {name}": partial(_train_fake, build, device) for name, build in sharded.items()}
    tasks |= {f"alone: {name}": partial(_train_alone, build, device) for name, build in FORMATS.items()}
    for dtype in (torch.float32, torch.bfloat16):
        tasks[f"ring of {dtype}"] = partial(ring_on_streams, device, dtype, 1 << 16)  # type: ignore[assignment]
    for numel in _LENGTHS:
        for work in all_works(device):
            tasks[f"{work.system}: {work.operation} ({work.format}) of {numel}"] = partial(_launch, work, numel, device)
    return tasks


def _tasks_dry() -> dict[str, Task]:
    from bench.kernels.aot import compiled_rows

    device = torch.device("cpu")
    return {
        "a kernel": partial(compiled_rows, [0], ["sm_90"], workers=0),  # type: ignore[dict-item]
        "fake": partial(_train_fake, SYSTEMS["exact"], device),
        "alone": partial(_train_alone, FORMATS["compact"], device),
        "a work": partial(_launch, all_works(device)[0], 3200, device),
    }


def _launch(work: Work, numel: int, device: torch.device) -> None:
    work.make(numel, device).step()
    synchronize(device)


def _train_fake(build: Build, device: torch.device) -> None:
    with one_of(RANKS, device) as (group, _):
        workload = perceptrons("warm", blocks=2, width=128, batch=4).on(device)
        for clip in (None, 1.0):
            trainer = replace(build(workload, group), max_norm=clip)
            if clip is None or not getattr(trainer.optimizer, "in_backward", False):
                trainer.step(workload.batch(0, 0))
    synchronize(device)


def _train_alone(build: Build, device: torch.device) -> None:
    with only_rank(device) as group:
        workload = perceptrons("warm", blocks=2, width=128, batch=4).on(device)
        build(workload, group).step(workload.batch(0, 0))
    synchronize(device)
