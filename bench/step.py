"""Measure step time, throughput and peak memory of data-parallel systems on the same work, on CPUs or GPUs.

    python -m bench.step --ranks 1 2 4 --model all
    python -m bench.step --model small --precision fp32 bf16 --accumulation 1 4 --clip none 1.0

Without `--ranks`, the bench starts two ranks, or one rank per GPU. It measures all combinations of precision,
accumulation and clipping, each with all systems that support it (`shardlite.lab.compared.matrix`), or with the systems
that `--systems` names. Results are compared before the measurement (`shardlite.lab.compared.check`). Each model's rows
go to `bench/results/step-MODEL-Nranks.jsonl`. The file name has the suffix `-transports` if `p2p` or `collectives` is
among the systems, `-tree` if `tree` is, and `-cuda` on GPUs. There is one JSON object per system and combination:

| key | meaning |
|---|---|
| `precision`, `accumulation`, `clip` | dtype of computation; micro-batches per step; norm for clipping |
| `ms_p20`, `ms_p50`, `ms_p80` | milliseconds of a step, on the slowest rank; on GPUs measured with events |
| `per_second`, `item` | tokens or samples of all ranks per second, at `ms_p50` |
| `cpu_ms_p50` | CPU milliseconds of all threads of a process, hardly affected by other programs |
| `ms_above_floor` | `ms_p50` minus that of the system `floor`: the time of communication and sharding |
| `above_floor_vs_fsdp2`, `ms_vs_ddp` | `ms_above_floor` divided by FSDP2's; `ms_p50` divided by DDP's |
| `peak_bytes` | peak of bytes in tensors during a step, on the rank with the highest peak; meaningless for the floor |
| `activation_bytes` | bytes that the forward of the plain model saves for its backward, in one micro-batch |
| `held_vs_fsdp2` | `peak_bytes - activation_bytes`, divided by the same difference of FSDP2 |
| `tolerance_used` | largest difference found by `shardlite.lab.compared.check`, divided by the allowed one |
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from shardlite import Route
from shardlite.cli.launch import default_ranks
from shardlite.comm.transport.select import choose
from shardlite.lab.compared.check import verify
from shardlite.lab.compared.matrix import NAMES, Setting, settings, systems_in
from shardlite.lab.compared.systems import ORDERS, TRANSPORTS, Build
from shardlite.lab.compared.workloads import Workload, chosen
from shardlite.lab.ranks import device_of_rank, run_bench
from shardlite.lab.table import TABLES, Row, cells_of, markdown_table, render, system_name, where, write_rows
from shardlite.lab.timer import Times, activation_bytes, milliseconds, peak_bytes, percentile, time_steps

PEERS = ("floor", "fsdp2", "ddp")
"""Systems with which the other systems are compared."""

DEFAULT = tuple(name for name in NAMES if name not in (*TRANSPORTS, *ORDERS))


def measure(
    workload: Workload,
    systems: Mapping[str, Build],
    rounds: int,
    group: dist.ProcessGroup,
    setting: Setting = Setting(),  # noqa: B008 (frozen)
) -> list[Row]:
    """Verify all systems on one workload, measure memory and time, and return a row for each system. Collective.

    Args:
        workload: the model and batches; a batch is one micro-batch.
        systems: systems to build in `setting`, including `ddp`.
        rounds: number of timed steps of each system.
        group: process group of all ranks.
        setting: precision, accumulation and clipping.

    Raises:
        ResultError: If a result differs from DDP's. In this case, nothing is measured.
    """
    whole = setting.workload(workload)
    checked = verify(whole, systems, group, setting)
    activations = activation_bytes(workload, setting.compute)
    peaks = {name: peak_bytes(whole, build, group) for name, build in systems.items() if name != "floor"}
    taken = time_steps(whole, {name: build(whole, group) for name, build in systems.items()}, rounds, group)
    common = _common(workload, rounds, group, setting)
    common |= {"transport": _transports(group, systems, workload.device)}
    rows = []
    for name, times in taken.items():
        memory = {"peak_bytes": peaks.get(name), "activation_bytes": activations}
        speed = milliseconds(times.wall) | {"cpu_ms_p50": round(1e3 * percentile(times.cpu, 50), 2)}
        speed |= _throughput(whole, times, group.size())
        rows.append({**common, "system": name, "tolerance_used": round(checked[name], 3), **speed, **memory})
    return _compared(rows)


def _common(workload: Workload, rounds: int, group: dist.ProcessGroup, setting: Setting) -> Row:
    """Return the keys that all rows of a run share."""
    told = {"units": "one per block, one for the rest", "optimizer": setting.optimizer, **setting.row()}
    told |= {"parameters": workload.parameters(), "threads": torch.get_num_threads(), "rounds": rounds}
    return workload.row("step", group.size(), **told)


def _transports(group: dist.ProcessGroup, systems: Collection[str], device: torch.device) -> str:
    """Return the transport of the process group and the transport that ShardLite selects, in words."""
    if not TRANSPORTS.keys().isdisjoint(systems):
        return str(dist.get_backend(group))
    choice = choose(group, device, timedelta(minutes=1), route=Route())
    ours = {"SharedMemoryTransport": "in shared memory"}.get(type(choice.transport).__name__, "by the same way")
    return f"{dist.get_backend(group)}, ShardLite's messages {ours}"


def _throughput(workload: Workload, times: Times, ranks: int) -> Row:
    return {"per_second": round(ranks * workload.items / percentile(times.wall, 50), 1), "item": workload.item}


def _compared(rows: list[Row]) -> list[Row]:
    """Add comparisons with the floor, FSDP2 and DDP to each row, if these systems were measured."""
    floor, fsdp2, ddp = (next((row for row in rows if row["system"] == name), None) for name in PEERS)
    for row in rows:
        if floor:
            row["ms_above_floor"] = round(row["ms_p50"] - floor["ms_p50"], 2)
        if floor and fsdp2:
            row["above_floor_vs_fsdp2"] = round(row["ms_above_floor"] / (fsdp2["ms_p50"] - floor["ms_p50"]), 3)
        if ddp:
            row["ms_vs_ddp"] = round(row["ms_p50"] / ddp["ms_p50"], 3)
        if fsdp2:
            row["held_vs_fsdp2"] = round(_held(row) / _held(fsdp2), 3) if row["peak_bytes"] else None
    return rows


def _held(row: Row) -> int:
    """Return `peak_bytes` minus `activation_bytes`."""
    held: int = row["peak_bytes"] - row["activation_bytes"]
    return held


def render_runs(rows: Sequence[Row]) -> str:
    """Return one table for each model and number of ranks, with a heading.

    For a run with several settings, the table shows throughput, with one column per setting.
    """
    runs = [list(run) for _, run in groupby(rows, key=_run)]
    return "\n\n".join((_render_settings if _settings(run)[1:] else _render_run)(run) for run in runs)


def _run(row: Row) -> tuple[object, ...]:
    return row["model"], row["ranks"], row["transport"], row["machine"], row["date"]


def _settings(rows: Sequence[Row]) -> list[str]:
    """Return the settings of the rows in words."""
    return list(dict.fromkeys(map(_setting, rows)))


def _setting(row: Row) -> str:
    count, clip = row.get("accumulation", 1), row.get("clip")
    words = [row.get("precision", "fp32"), f"{count} micro-batches" if count > 1 else "", "clipped" if clip else ""]
    return ", ".join(filter(None, words))


def _render_settings(rows: list[Row]) -> str:
    rates = {(row["system"], _setting(row)): f"{row['per_second']:.0f}" for row in rows}
    found = _settings(rows)
    cells = [["system", *found]]
    for system in dict.fromkeys(row["system"] for row in rows):
        cells.append([system_name(system), *(rates.get((system, setting), "") for setting in found)])
    first = rows[0]
    optimizer = first["optimizer"].partition(", no clipping")[0]
    heading = (
        f"{first['item'].capitalize()} per second of {first['ranks']} ranks together; {first['words']} per rank and "
        f"micro-batch, {first['parameters'] / 1e6:.1f}M parameters; units: {first['units']}; {optimizer}; "
        f"over {first['transport']}, {first['threads']} thread each; medians of {first['rounds']} interleaved steps; "
        f"{where(first)}."
    )
    return f"{heading}\n\n{markdown_table(cells)}"


def _render_run(rows: list[Row]) -> str:
    held = [row | {"held_bytes": _held(row) if row["peak_bytes"] else None} for row in rows]
    cells = cells_of(TABLES["step"]["columns"], held)
    cells[0] = [f"{rows[0]['item']}/s" if name == "per second" else name for name in cells[0]]
    return f"{_heading(rows[0])}\n\n{markdown_table(cells)}"


def _heading(row: Row) -> str:
    """Return the heading of a run."""
    count = row.get("accumulation", 1)
    batches = f" in each of {count} micro-batches" if count > 1 else ""
    compute = ", computing in bf16" if row.get("precision") == "bf16" else ""
    return (
        f"{row['words']} per rank{batches}, {row['parameters'] / 1e6:.1f}M parameters in fp32{compute}; "
        f"units: {row['units']}; "
        f"{row['optimizer']}; {row['ranks']} ranks over {row['transport']}, {row['threads']} thread each; "
        f"medians of {row['rounds']} interleaved steps; {where(row)}."
    )


def _file(rows: Sequence[Row], folder: Path, device: torch.device) -> Path:
    """Return the file of the rows of one model."""
    transports = "-transports" if any(row["system"] in TRANSPORTS for row in rows) else ""
    order = "-tree" if any(row["system"] in ORDERS for row in rows) else ""
    kind = "" if device.type == "cpu" else f"-{device.type}"
    return folder / f"step-{rows[0]['model']}-{rows[0]['ranks']}ranks{transports}{order}{kind}.jsonl"


def _report(rows: list[Row]) -> None:
    """Print the table of one run."""
    worst = max(rows, key=lambda row: row["tolerance_used"])
    print(f"\n{render(rows)}")
    print(
        f"\nVerified: {worst['system']} needs most of the tolerance, {worst['tolerance_used']:.2f} of it.\n", flush=True
    )


def _run_rank(options: argparse.Namespace, group: dist.ProcessGroup) -> None:
    """Measure as one of the ranks, and write the rows on rank 0."""
    device = device_of_rank()
    norms = [None if each == "none" else float(each) for each in options.clip]
    for workload in chosen(options.model):
        rows: list[Row] = []
        for setting in settings(options.precision, options.accumulation, norms):
            systems = {each: build for each, build in systems_in(setting).items() if each in options.systems}
            if group.rank() == 0:
                left_out = [each for each in options.systems if each not in systems]
                _say(f"{workload.name}, {group.size()} ranks, {setting.words}: {', '.join(systems)}", left_out)
            rows += measure(workload.on(device), systems, options.steps, group, setting)
            if group.rank() == 0:  # after each setting, because a long run may be stopped early
                write_rows(rows, _file(rows, options.out, device))
        if group.rank() == 0:
            _report(rows)


def _say(words: str, left_out: Sequence[str]) -> None:
    """Print the measured setting, and the chosen systems that do not support it."""
    without = f" (not supported by: {', '.join(left_out)})" if left_out else ""
    print(f"step: {words}{without}", file=sys.stderr, flush=True)


def _check(options: argparse.Namespace) -> None:
    options.ranks = options.ranks or [default_ranks()]
    options.systems = options.systems or DEFAULT
    if "ddp" not in options.systems:
        raise ValueError("--systems must include ddp, because the other systems are verified against it")
    if min(*options.ranks, *options.accumulation, options.steps) < 1:
        raise ValueError("--ranks, --accumulation and --steps must be at least 1")
    if any(norm != "none" and not float(norm) > 0 for norm in options.clip):
        raise ValueError("--clip must be none or a positive norm")


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or measure if a launcher started this process as a rank. Return the exit status."""
    return run_bench("bench.step", arguments, _run_rank, _check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
