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
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist

from bench.optimizers import sweep
from bench.optimizers.builds import OF_FSDP2, OPTIMIZER, SYSTEMS
from bench.optimizers.check import verify
from bench.optimizers.libraries import LIBRARIES, installed
from bench.optimizers.peers import missing
from bench.optimizers.wire import sent_in_update
from shardlite.lab.ranks import on_ranks, options_of_ranks
from shardlite.lab.systems import Build
from shardlite.lab.table import Columns, Row, number, system_name, titled, write_rows
from shardlite.lab.timer import activation_bytes, largest, milliseconds, peak_bytes, percentile, time_steps
from shardlite.lab.workloads import MEASURED, WORKLOADS, Workload


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
    with torch.compiler.set_stance("force_eager"):  # a compiled function does not tell what it allocates
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


_COLUMNS: Columns = {
    "system": lambda row: system_name(row["system"]),
    "step, ms": lambda row: f"{row['ms_p50']:.0f}",
    "p20 to p80": lambda row: f"{row['ms_p20']:.0f} to {row['ms_p80']:.0f}",
    "above floor, ms": lambda row: number(row, "ms_above_floor", 0),
    "above / FSDP2's": lambda row: number(row, "above_floor_vs_fsdp2", 2),
    "above / DDP's": lambda row: number(row, "above_floor_vs_ddp", 2),
    "CPU, ms": lambda row: f"{row['cpu_ms_p50']:.0f}",
    "CPU above floor, ms": lambda row: number(row, "cpu_ms_above_floor", 0),
    "CPU above / FSDP2's": lambda row: number(row, "cpu_above_floor_vs_fsdp2", 2),
    "sent by the optimizer, MiB": lambda row: f"{row['optimizer_bytes'] / 2**20:.1f}",
    "peak, MiB": lambda row: "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
}


def render(rows: Sequence[Row]) -> str:
    """Return a table for each model and number of ranks."""
    runs = groupby(rows, key=lambda row: (row["model"], row["ranks"], row["date"]))
    return "\n\n".join(_render_run(list(run)) for _, run in runs)


def _render_run(rows: list[Row]) -> str:
    first = rows[0]
    heading = (
        f"{first['words']} per rank, {first['parameters'] / 1e6:.1f}M parameters in fp32; {first['optimizer']}; "
        f"{first['ranks']} ranks, {first['threads']} thread each; medians of {first['rounds']} interleaved steps"
    )
    return titled(heading, _COLUMNS, rows)


def _run_rank(options: argparse.Namespace, group: dist.ProcessGroup) -> bool:
    """Measure as one of the ranks, and write the rows on rank 0. Return whether a sweep has found a defect."""
    if options.sweep:
        return sweep.run(options.sweep, options.only, group, options.out)
    systems = {name: SYSTEMS[name] for name in options.systems}
    for name in MEASURED if options.model == "all" else (options.model,):
        if group.rank() == 0:
            print(f"optimizers: {name}, {group.size()} ranks: {', '.join(systems)}", file=sys.stderr, flush=True)
        rows = measure(WORKLOADS[name], systems, options.steps, group)
        if group.rank() == 0:
            write_rows(rows, options.out / f"optimizers-{name}-{group.size()}ranks.jsonl")
            print(f"\n{render(rows)}\n", flush=True)
    return False


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = options_of_ranks("bench.optimizers", "step time of Muon, sharded and not sharded", [2])
    parser.add_argument("--model", choices=["all", *WORKLOADS], default="all", help="(%(default)s)")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, help="systems to measure (all whose packages are installed)"
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each system (%(default)s)")
    parser.add_argument(
        "--sweep", nargs="+", choices=LIBRARIES, help="instead: train with every optimizer of these libraries"
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="with --sweep: only these optimizers")
    options = parser.parse_args(arguments)
    if options.sweep:
        missing_libraries = [each for each in options.sweep if not installed(each)]
        if missing_libraries:
            parser.error(f"--sweep: not installed: run pip install --no-deps {' '.join(missing_libraries)}")
        return options
    absent = missing(options.systems or [*SYSTEMS])
    if options.systems and absent:
        parser.error(f"--systems: not installed: {', '.join(absent)}; run {'; '.join(absent.values())}")
    for name, command in absent.items():
        print(f"optimizers: without {name}, which is not installed; run {command}", file=sys.stderr)
    options.systems = options.systems or [name for name in SYSTEMS if name not in absent]
    if "ddp" not in options.systems:
        parser.error("--systems must include ddp, because the other systems are verified against it")
    if min(*options.ranks, options.steps) < 1:
        parser.error("--ranks and --steps must be at least 1")
    return options


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or measure if a launcher started this process as a rank. Return the exit status."""
    options = _options(arguments)
    return on_ranks("bench.optimizers", options.ranks, arguments, partial(_run_rank, options))
