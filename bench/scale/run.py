"""Measure how ShardLite's stage 3 scales on this machine (weak and strong). Simulate scaling here and on clusters.

    python -m bench.scale --model gpt --ranks 1 2 4

starts one rank, then two, then four, and writes `bench/results/scale-MODEL.jsonl`. In weak scaling, each rank has
the batch of the workload. In strong scaling, the ranks divide this batch. Results are compared with DDP's before the
measurement. There is one JSON object for each mode, cluster and number of ranks:

| key | meaning |
|---|---|
| `kind` | `measured` or `simulated` |
| `cluster` | `this machine`, or a cluster of `shardlite plan` |
| `mode`, `ranks` | `weak` or `strong`; number of ranks |
| `ms_p50` | milliseconds of a step: measured median on the slowest rank, or simulated |
| `efficiency` | throughput of `W` ranks divided by `W` times that of one rank, of the same kind and cluster |
| `per_second`, `item` | tokens or samples of all ranks per second |
| `simulated_vs_measured` | in simulated rows: `ms_p50` divided by that of the measured row, if there is such a row |

The simulation is that of `shardlite plan`. For this machine it has three measured inputs (`bench.scale.simulated`): the
time of forward and backward on one rank, the time of the optimizer's step, and a link fitted to collectives of 2 ranks.
A row `"scale-fit"` records these inputs. `--figure FILE` draws the newest rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from bench.ring import run as ring
from bench.ring.cases import GLOO, System
from bench.scale import simulated
from bench.scale.results import paint
from shardlite.cli import usage_errors
from shardlite.lab.compared.check import verify
from shardlite.lab.compared.systems import SYSTEMS, Build
from shardlite.lab.compared.workloads import WORKLOADS, Batch, Workload
from shardlite.lab.memory.machine import machine
from shardlite.lab.plan.source import find_source
from shardlite.lab.ranks import one_of_them, parser_of, start_ranks
from shardlite.lab.table import Row, read_rows, report, rows_for, write_rows
from shardlite.lab.timer import WARM_UP, milliseconds, percentile, seconds, time_steps
from shardlite.plan import CLUSTERS

SYSTEM = "stage3"

_SIZES = (1 << 14, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the buffers to which the link is fitted. The sizes of units are in this range."""


def measure(workload: Workload, rounds: int, group: dist.ProcessGroup) -> list[Row]:
    """Verify and time both modes on the ranks of the group. Collective.

    Raises:
        ResultError: If results differ from DDP's. Nothing is timed then.
    """
    systems: dict[str, Build] = {name: SYSTEMS[name] for name in ("ddp", SYSTEM)}
    verify(workload, systems, group)
    rows = []
    for mode in ("weak", "strong"):
        given = workload if mode == "weak" else divided(workload, group.size())
        wall = time_steps(given, {SYSTEM: systems[SYSTEM](given, group)}, rounds, group)[SYSTEM].wall
        per_second = round(group.size() * given.items / percentile(wall, 50), 1)
        rows.append(
            {
                **workload.row(
                    "scale", group.size(), kind="measured", cluster=simulated.HERE, mode=mode, rounds=rounds
                ),
                **milliseconds(wall),
                "per_second": per_second,
                "item": workload.item,
            }
        )
    return rows


def divided(workload: Workload, ranks: int) -> Workload:
    """Return a workload in which each rank has an equal part of the batch.

    Raises:
        ValueError: If the batch is not divisible by `ranks`.
    """

    def draw(rank: int, step: int) -> Batch:
        x, y = workload.draw(rank, step)
        return x[: len(x) // ranks], y[: len(y) // ranks]

    batch = len(workload.draw(0, 0)[0])
    if batch % ranks:
        raise ValueError(f"{workload.name}: a batch of {batch} cannot be divided among {ranks} ranks")
    return replace(workload, draw=draw, terms=workload.terms // ranks, items=workload.items // ranks)


def measure_fit(workload: Workload, rounds: int, group: dist.ProcessGroup) -> Row:
    """Measure inputs of the simulation: on one rank the seconds of a step's parts, on two ranks the link.

    Collective. Return the entries of the row `"scale-fit"` that this number of ranks measures.
    """
    if group.size() == 1:
        trainer = SYSTEMS[SYSTEM](workload, group)
        taken = []
        for turn in range(WARM_UP + rounds):
            backward = seconds(partial(trainer.backward, workload.batch(0, turn)), workload.device)[0]
            taken.append((backward, seconds(trainer.update, workload.device)[0]))
        compute, update = (percentile([each[i] for each in taken[WARM_UP:]], 50) for i in (0, 1))
        return {"bench": "scale-fit", "compute_seconds": compute, "update_seconds": update}
    rows = ring.measure(_SIZES, [System(GLOO), System("shared_memory", "direct")], max(rounds, 4), group)
    link = next(row for row in rows if row["bench"] == "ring-fit" and row["key"] == "ms_p50")
    names = ("alpha", "beta", "gamma", "overhead", "overlaps", "error_p50", "error_max")
    return {"bench": "scale-fit", **{name: link[name] for name in names}}


def _run_rank(options: argparse.Namespace) -> None:
    """Measure as one of the ranks, and write the rows on rank 0."""
    with one_of_them() as group:
        workload = WORKLOADS[options.model]
        rows = measure(workload, options.steps, group)
        if group.size() <= 2:
            rows.append(measure_fit(workload, options.steps, group))
        if group.rank() == 0:
            write_rows(rows, options.out / f"measured-{group.size()}.jsonl")


def _run_all(options: argparse.Namespace) -> int:
    """Measure on each number of ranks, simulate the same numbers, and write all rows."""
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            print(f"scale: measuring {ranks} ranks", file=sys.stderr, flush=True)
            given = ["--model", options.model, "--steps", str(options.steps), "--out", folder]
            if status := start_ranks("bench.scale", ranks, given):
                return status
        found = read_rows(Path(folder).glob("*.jsonl"))
    measured = simulated.with_efficiency([row for row in found if row["bench"] == "scale"])
    fit = {key: value for row in found if row["bench"] == "scale-fit" for key, value in row.items()}
    rows = [*measured, {**fit, "model": options.model, **machine()}]
    rows += simulated.here(WORKLOADS[options.model], fit, measured)
    print(f"scale: simulating {options.planned} on {', '.join(options.named)}", file=sys.stderr, flush=True)
    rows += simulated.elsewhere([CLUSTERS[name] for name in options.named], options.planned)
    report(rows, options.out / f"scale-{options.model}.jsonl")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Find a wrong option before the measurement."""
    if not {1, 2} <= set(options.ranks):
        raise ValueError("--ranks must include 1 and 2, because the simulation is fitted to them")
    if min(*options.ranks, options.steps) < 1:
        raise ValueError("--ranks and --steps must be at least 1")
    for ranks in options.ranks:
        divided(WORKLOADS[options.model], ranks)
    find_source(options.planned, simulated.BATCH, None)


def main(arguments: Sequence[str]) -> int:
    """Measure and simulate, or draw rows. If a launcher started this process, measure as one of the ranks."""
    parser = parser_of("bench.scale")
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        _run_rank(options)
        return 0
    with usage_errors(parser):
        _check(options)
    if options.figure:
        paint(rows_for(["bench/results/scale-gpt.jsonl", "bench=scale"]), options.figure)
        return 0
    return _run_all(options)
