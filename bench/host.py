"""What the host does per unit and step: time of a model of many tiny blocks, and Python calls.

    python -m bench.host --ranks 2

starts its ranks itself. The rows go to `bench/results/host-Nranks.jsonl`, one JSON object a system:

| key | what it is |
|---|---|
| `us_per_unit_p20`, `_p50`, `_p80` | microseconds of a step per block, on the slowest rank, waits included |
| `main_us_per_unit_p50` | microseconds that the main thread works for a step, per block |
| `calls_per_step` | Python functions that the main thread enters in a step |
| `us_vs_fsdp2` | `us_per_unit_p50` as a part of FSDP2's |

`many` has 48 blocks so small that computing them costs next to nothing, so a step is what the library does around
them. Systems take steps in turn, and their results are compared before (`bench.support.check`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter, thread_time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from bench.support.check import verify
from bench.support.machine import machine
from bench.support.measure import WARM_UP, largest, percentile, rotated
from bench.support.ranks import one_of_them, start_ranks
from bench.support.systems import OPTIMIZER, SYSTEMS, Trainer
from bench.support.table import RESULTS, Row, markdown_table
from bench.support.workloads import WORKLOADS, Batch, Workload

CHOSEN = ("floor", "ddp", "fsdp2", "stage0", "stage3")
COUNTED = 5
"""Steps over which Python calls are averaged."""


def measure(workload: Workload, rounds: int, group: dist.ProcessGroup) -> list[Row]:
    """Verify and time the systems on one workload; return a row for each. To be called by every rank."""
    systems = {name: SYSTEMS[name] for name in CHOSEN}
    verify(workload, systems, group)
    trainers = {name: build(workload, group) for name, build in systems.items()}
    walls: Mapping[str, list[float]] = {name: [] for name in trainers}
    mains: Mapping[str, list[float]] = {name: [] for name in trainers}
    for turn in range(WARM_UP + rounds):
        batch = workload.draw(group.rank(), turn)
        for name in rotated(list(trainers), turn):
            dist.barrier(group)
            wall, main = perf_counter(), thread_time()
            trainers[name].step(batch)
            walls[name].append(perf_counter() - wall)
            mains[name].append(thread_time() - main)
    calls = {name: calls_per_step(trainer, workload.draw(group.rank(), 0)) for name, trainer in trainers.items()}
    units = len(list(trainers["floor"].model.get_submodule(workload.blocks).children()))
    rows = []
    for name in trainers:
        wall = [1e6 * each / units for each in largest(walls[name][WARM_UP:], group)]
        main = [1e6 * each / units for each in largest(mains[name][WARM_UP:], group)]
        rows.append(
            {
                "bench": "host",
                "model": workload.name,
                "words": workload.words,
                "units": units,
                "optimizer": OPTIMIZER,
                "ranks": group.size(),
                "threads": torch.get_num_threads(),
                "rounds": rounds,
                **machine(),
                "system": name,
                **{f"us_per_unit_p{percent}": round(percentile(wall, percent), 1) for percent in (20, 50, 80)},
                "main_us_per_unit_p50": round(percentile(main, 50), 1),
                "calls_per_step": round(calls[name]),
            }
        )
    fsdp2 = next(row for row in rows if row["system"] == "fsdp2")
    return [{**row, "us_vs_fsdp2": round(row["us_per_unit_p50"] / fsdp2["us_per_unit_p50"], 3)} for row in rows]


def calls_per_step(trainer: Trainer, batch: Batch) -> float:
    """Return how many Python functions the main thread enters in a step, on average."""
    entered = 0

    def count(_: FrameType, event: str, __: Any) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(COUNTED):
            trainer.step(batch)
    finally:
        sys.setprofile(None)
    return entered / COUNTED


def render(rows: Sequence[Row]) -> str:
    """Return a table for people."""
    head = ["model", "system", "us per unit", "main thread, us", "Python calls per step", "/ FSDP2's"]
    lines = [
        [
            row["model"],
            row["system"],
            f"{row['us_per_unit_p50']:.0f}",
            f"{row['main_us_per_unit_p50']:.0f}",
            f"{row['calls_per_step']}",
            f"{row['us_vs_fsdp2']:.2f}",
        ]
        for row in rows
    ]
    return markdown_table([head, *lines])


def main(arguments: Sequence[str]) -> int:
    """Measure, as one rank if a launcher started this process, else by starting the ranks."""
    parser = argparse.ArgumentParser(prog="python -m bench.host", description="what the host does per unit and step")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each system (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the rows (%(default)s)")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        return start_ranks("bench.host", options.ranks, arguments)
    with one_of_them() as group:
        rows = [row for name in ("many", "mlp") for row in measure(WORKLOADS[name], options.steps, group)]
        if group.rank() == 0:
            options.out.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(row) for row in rows]
            (options.out / f"host-{options.ranks}ranks.jsonl").write_text("\n".join(lines) + "\n")
            print(*lines, sep="\n")
            print(f"\n{render(rows)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
