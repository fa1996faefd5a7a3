"""Verify and time the optimizer's kernels and PyTorch's operators.

    python -m bench.kernels                       on the GPU if there is one, otherwise on the CPU
    python -m bench.kernels --device cpu --threads 1 2

With `TRITON_INTERPRET=1`, GPU kernels are verified in the interpreter, and nothing is timed. The rows go to
`bench/results/kernels-DEVICE.jsonl`, one JSON object for each kernel, format, size and number of threads:

| key | meaning |
|---|---|
| `ms_p20`, `ms_p50`, `ms_p80` | milliseconds of a step; on a GPU, time on the device, with an empty cache at the start |
| `bytes_per_element` | the minimum number of bytes that a step reads and writes in these formats |
| `gbps` | bandwidth in 1e9 bytes per second: these bytes divided by the median time |
| `ceiling`, `ceiling_gbps` | the operation that measures the machine's bandwidth, and the bandwidth in the same rounds; the operation is a copy on a GPU, and `a.add_(b)` on a CPU, because a CPU reads the target of a copy too |
| `share` | `gbps` divided by `ceiling_gbps`; may exceed 1 for tensors that fit in caches |
| `vs_raw` | time divided by that of `torch._fused_adamw_` on fp32 in the same round; the median over rounds |
| `cpu_ms_p50`, `cpu_vs_raw` | milliseconds of CPU time of all threads, and its ratio to that of `torch._fused_adamw_`; on a GPU, only the CPU time of the launch |
| `load` | load average of the machine in the minute before; times are noisy if it exceeds the number of threads |
| `goal`, `reached` | the intended result, and whether it was reached |
| `contract`, `error`, `tolerance_used` | whether results must be bit-equal; their largest relative error; this error divided by the allowed error |
| `note` | the reason why there is no time: a package is not installed or fails, or there is not enough memory |
"""  # noqa: E501

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from statistics import median

import torch
from shardlite_kernels.launch import INTERPRET

from bench.kernels.chain import chains
from bench.kernels.clock import (
    VERIFIED,
    Clock,
    DeviceClock,
    HostClock,
    Run,
    Sample,
    Verdict,
    Work,
    bandwidth_run,
    packed,
    time_runs,
    verify,
)
from bench.kernels.peers import peers, raw_fused
from bench.kernels.work import works
from shardlite.lab.memory.machine import machine
from shardlite.lab.ranks import parser_of
from shardlite.lab.table import Row, report
from shardlite.lab.timer import percentile

_CPU_NUMELS: tuple[int, ...] = (10**6, 10**7, 5 * 10**7)
_GPU_NUMELS: tuple[int, ...] = (10**6, 10**7, 10**8, 10**9)
_CPU_ROOM = 4 << 30
_CEILING = "ceiling"
_MEASURED = (
    *("ms_p20", "ms_p50", "ms_p80", "cpu_ms_p50", "gbps", "ceiling_gbps", "share", "vs_raw", "cpu_vs_raw", "rounds"),
    *("goal", "reached"),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes and limits of a run."""

    numels: Sequence[int]

    rounds: int

    budget: float = 10.0
    """Time limit in seconds for the steps of one work at one size. At least three steps are taken."""

    ceiling_bytes: int
    """Bytes of a tensor in the bandwidth measurement, much larger than any cache."""

    room: int
    """Bytes that works and the bandwidth measurement may hold at the same time."""


def plan_for(device: torch.device, rounds: int, budget: float, numels: Sequence[int] | None = None) -> Plan:
    """Return the sizes and limits for a device."""
    if device.type == "cpu":
        sizes, ceiling, room = _CPU_NUMELS, 1 << 27, _CPU_ROOM
    else:
        free, _ = torch.cuda.mem_get_info(device)
        sizes, ceiling, room = _GPU_NUMELS, 1 << 30, free * 9 // 10 - (2 << 30)  # compiled kernels also need memory
    return Plan(numels=numels or sizes, rounds=rounds, budget=budget, ceiling_bytes=ceiling, room=room)


def measure(chosen: Sequence[Work], device: torch.device, plan: Plan) -> Iterator[Row]:
    """Verify all works, and yield a row for each work at each size, first for PyTorch's fused operator.

    Raises:
        ResultError: If a work that is not optional computes a wrong result. Nothing is timed then.
    """
    raw = raw_fused()
    found = [(work, _verified(work, device)) for work in (raw, *chosen)]
    clock: Clock = DeviceClock(device) if device.type == "cuda" else HostClock()
    for numel in plan.numels:
        common = {**_common(device), "numel": numel}
        verdicts = {_name(work): verdict for work, verdict in found if isinstance(verdict, Verdict)}
        held = {name: verdict.held * numel // VERIFIED for name, verdict in verdicts.items()}
        timed = _times({_name(work): work for work, _ in found}, held, numel, device, clock, plan)
        for work, verdict in found:
            fits = None if _name(work) in timed else "does not fit"
            note = verdict if isinstance(verdict, str) else fits
            row = {**common, **_described(work, verdict), "note": note, **dict.fromkeys(_MEASURED)}
            yield {**row, **timed.get(_name(work), {})}


def _verified(work: Work, device: torch.device) -> Verdict | str:
    """Return the verdict, or the reason why an optional work has none."""
    try:
        return verify(work, device)
    except ImportError:
        if work.optional:
            return "not installed"
        raise
    except Exception as error:  # errors in third-party code must not end hours of measurements
        if work.optional:
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        raise


def _times(
    named: Mapping[str, Work], held: Mapping[str, int], numel: int, device: torch.device, clock: Clock, plan: Plan
) -> dict[str, Row]:
    """Time the works in `held` that fit into memory, in groups. The first work is PyTorch's fused operator."""
    raw, *others = held
    room = plan.room - 2 * plan.ceiling_bytes - held[raw]
    timed: dict[str, Row] = {}
    for group in packed({name: held[name] for name in others}, room) or [[]]:
        runs = {name: named[name].make(numel, device) for name in (raw, *group)}
        runs[_CEILING] = bandwidth_run(plan.ceiling_bytes, device)
        taken = time_runs(runs, clock, plan.rounds, plan.budget)
        gbps = runs[_CEILING].moved / percentile([sample.wall for sample in taken.pop(_CEILING)], 50) / 1e9
        for name, samples in taken.items():
            timed.setdefault(name, _timed(named[name], runs[name], samples, taken[raw], gbps))
        del runs  # before the next runs are allocated
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return timed


def _timed(work: Work, run: Run, samples: Sequence[Sample], raw: Sequence[Sample], ceiling: float) -> Row:
    """Return the timing entries of a row, from samples of a work and of the fused operator in the same rounds."""
    wall, cpu = zip(*samples, strict=True)
    gbps = run.moved / percentile(wall, 50) / 1e9
    ratio, cpu_ratio = (median(mine[i] / theirs[i] for mine, theirs in zip(samples, raw, strict=False)) for i in (0, 1))
    row: Row = {f"ms_p{percent}": _short(1e3 * percentile(wall, percent)) for percent in (20, 50, 80)}
    row |= {"cpu_ms_p50": _short(1e3 * percentile(cpu, 50))}
    row |= {"gbps": _short(gbps), "ceiling_gbps": _short(ceiling), "share": _short(gbps / ceiling)}
    row |= {"vs_raw": _short(ratio), "cpu_vs_raw": _short(cpu_ratio), "rounds": len(samples)}
    if work.at_most is not None:
        row |= {"goal": f"vs_raw <= {work.at_most}", "reached": ratio <= work.at_most}
    if work.share_at_least is not None:
        row |= {"goal": f"share >= {work.share_at_least}", "reached": gbps / ceiling >= work.share_at_least}
    return row


def _described(work: Work, verdict: Verdict | str) -> Row:
    """Return the entries of a row that do not depend on timing."""
    described: Row = {"system": work.system, "operation": work.operation, "format": work.format}
    if isinstance(verdict, str):
        return {**described, "bytes_per_element": None, "contract": None, "error": None, "tolerance_used": None}
    return {
        **described,
        "bytes_per_element": round(verdict.moved / VERIFIED, 3),
        "contract": verdict.contract,
        "error": _short(verdict.error),
        "tolerance_used": _short(verdict.tolerance_used),
    }


def _name(work: Work) -> str:
    return f"{work.system}: {work.operation} ({work.format})"


def _short(value: float) -> float:
    """Return a number, rounded to four digits."""
    return float(f"{value:.4g}")


def _common(device: torch.device) -> Row:
    """Return the keys that all rows of a run share."""
    gpu = device.type == "cuda"
    return {
        "bench": "kernels",
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "ceiling": "copy_" if gpu else "add_",
        "verified": VERIFIED,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda if gpu else None,
        **machine(),
    }


def version_of(package: str) -> str | None:
    """Return the version of a package, or `None` if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _file(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"kernels-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.jsonl"


def main(arguments: Sequence[str]) -> int:
    """Measure on one device, print the table and write the rows."""
    options = parser_of("bench.kernels").parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    plan = plan_for(device, options.rounds, options.seconds, options.numel and list(map(int, options.numel)))
    chosen = [*works(device), *chains(), *peers(device)]
    if INTERPRET:
        for work in chosen:
            print(f"{_name(work)}: {_verified(work, device)}", flush=True)
        return 0
    rows: list[Row] = []
    for threads in options.threads if device.type == "cpu" else [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        for row in measure(chosen, device, plan):
            print(f"{row['system']}: {row['operation']} ({row['format']})", file=sys.stderr, flush=True)
            rows.append(row)
    report(rows, options.out / _file(device))
    return 0
