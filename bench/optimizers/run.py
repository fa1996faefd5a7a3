"""Measure the step time of Muon, sharded and not sharded.

    python -m bench.optimizers --ranks 2 4 --model all

starts the ranks, verifies all systems (`bench.optimizers.check`), then measures them. Each model's rows go to
`bench/results/optimizers-MODEL-Nranks.jsonl`, one JSON object per system:

| key | meaning |
|---|---|
| `ms_p20`, `ms_p50`, `ms_p80` | milliseconds of a step (forward, backward and update), on the slowest rank |
| `cpu_ms_p50` | CPU milliseconds of all threads of a process, hardly affected by other programs |
| `ms_above_floor` | `ms_p50` minus that of the system `floor`: the time of communication and of repeated work |
| `above_floor_vs_fsdp2` | `ms_above_floor` divided by that of `fastest_fsdp2`, the fastest system with FSDP2 |
| `above_floor_vs_ddp` | `ms_above_floor` divided by DDP's |
| `cpu_ms_above_floor` and so on | the same for `cpu_ms_p50` |
| `optimizer_bytes` | bytes that the busiest rank sends in the optimizer's step, so without gradients and gathers |
| `peak_bytes` | peak of bytes in tensors during a step, on the rank with the highest peak; meaningless for the floor |
| `activation_bytes` | bytes that the forward of the plain model saves for its backward |
| `tolerance_used` | largest error found by `bench.optimizers.check`, divided by the allowed one |

If there are more ranks than cores, CPU times show the work, because a rank that waits leaves its core to others. Bytes
are measured without `torch.compile`, times with it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from bench.optimizers import sweep
from bench.optimizers.builds import OF_FSDP2, OPTIMIZER, SYSTEMS
from bench.optimizers.check import verify
from bench.optimizers.libraries import installed
from bench.optimizers.peers import missing
from bench.optimizers.wire import sent_in_update
from shardlite.lab.compared.systems import Build
from shardlite.lab.compared.workloads import Workload, chosen
from shardlite.lab.ranks import run_bench
from shardlite.lab.table import Row, render, write_rows
from shardlite.lab.timer import activation_bytes, largest, milliseconds, peak_bytes, percentile, time_steps


def measure(workload: Workload, systems: Mapping[str, Build], rounds: int, group: dist.ProcessGroup) -> list[Row]:
    """Verify all systems on one workload, measure bytes and times, and return a row for each system. Collective.

    Args:
        workload: the model and batches.
        systems: systems to build, including `ddp`.
        rounds: number of timed steps of each system.
        group: process group of all ranks.

    Raises:
        ResultError: A result is wrong. In this case, nothing is measured.
    """
    checked = verify(workload, systems, group)
    activations = activation_bytes(workload)
    sizes = {name: _sizes(workload, build, group) for name, build in systems.items() if name != "floor"}
    taken = time_steps(workload, {name: build(workload, group) for name, build in systems.items()}, rounds, group)
    told = {"units": "one per block, one for the rest", "optimizer": OPTIMIZER, "parameters": workload.parameters()}
    told |= {"threads": torch.get_num_threads(), "rounds": rounds}
    common = workload.row("optimizers", group.size(), **told)
    rows = []
    for name, times in taken.items():
        speed = milliseconds(times.wall) | {"cpu_ms_p50": round(1e3 * percentile(times.cpu, 50), 2)}
        size = sizes.get(name, {"optimizer_bytes": 0, "peak_bytes": None})
        checks = {"tolerance_used": round(checked[name], 3)}
        rows.append({**common, "system": name, **checks, **speed, **size, "activation_bytes": activations})
    return _compared(rows)


def _sizes(workload: Workload, build: Build, group: dist.ProcessGroup) -> Row:
    """Return `optimizer_bytes` and `peak_bytes` of a system. Collective."""
    with torch.compiler.set_stance("force_eager"):  # allocations of a compiled function cannot be seen
        peak = peak_bytes(workload, build, group)
        trainer = build(workload, group)
        trainer.backward(workload.batch(group.rank(), 0))
        sent = sent_in_update(trainer, group.rank(), group.size())
    return {"optimizer_bytes": int(largest([sent], group)[0]), "peak_bytes": peak}


def _compared(rows: list[Row]) -> list[Row]:
    """Add comparisons with the floor, DDP and the fastest system with FSDP2, if these systems were measured."""
    by_name = {row["system"]: row for row in rows}
    if "floor" not in by_name:
        return rows
    of_fsdp2 = [row for name, row in by_name.items() if name in OF_FSDP2]
    fastest = min(of_fsdp2, key=lambda row: row["ms_p50"], default=None)
    for prefix in ("", "cpu_"):
        floor = by_name["floor"][f"{prefix}ms_p50"]
        above = {name: row[f"{prefix}ms_p50"] - floor for name, row in by_name.items()}
        for name, row in by_name.items():
            row[f"{prefix}ms_above_floor"] = round(above[name], 2)
            row[f"{prefix}above_floor_vs_ddp"] = round(above[name] / above["ddp"], 3)
            if fastest is not None:
                row["fastest_fsdp2"] = fastest["system"]
                row[f"{prefix}above_floor_vs_fsdp2"] = round(above[name] / above[fastest["system"]], 3)
    return rows


def _run_rank(options: argparse.Namespace, group: dist.ProcessGroup) -> bool:
    """Measure as one of the ranks, and write the rows on rank 0. Return whether a sweep has found a defect."""
    if options.sweep:
        return sweep.run(options.sweep, options.only, group, options.out)
    systems = {name: SYSTEMS[name] for name in options.systems}
    for workload in chosen(options.model):
        if group.rank() == 0:
            words = f"optimizers: {workload.name}, {group.size()} ranks: {', '.join(systems)}"
            print(words, file=sys.stderr, flush=True)
        rows = measure(workload, systems, options.steps, group)
        if group.rank() == 0:
            write_rows(rows, options.out / f"optimizers-{workload.name}-{group.size()}ranks.jsonl")
            print(f"\n{render(rows)}\n", flush=True)
    return False


def _check(options: argparse.Namespace) -> None:
    """Check the options, and choose the systems whose packages are installed."""
    if options.sweep:
        if absent := [each for each in options.sweep if not installed(each)]:
            raise ValueError(f"--sweep: not installed: run pip install --no-deps {' '.join(absent)}")
        return
    without = missing(options.systems or [*SYSTEMS])
    if options.systems and without:
        raise ValueError(f"--systems: not installed: {', '.join(without)}; run {'; '.join(without.values())}")
    for name, command in without.items():
        print(f"optimizers: without {name}, which is not installed; run {command}", file=sys.stderr)
    options.systems = options.systems or [name for name in SYSTEMS if name not in without]
    if "ddp" not in options.systems:
        raise ValueError("--systems must include ddp, because the other systems are verified against it")
    if min(*options.ranks, options.steps) < 1:
        raise ValueError("--ranks and --steps must be at least 1")


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or measure if a launcher started this process as a rank. Return the exit status."""
    return run_bench("bench.optimizers", arguments, _run_rank, _check)
