"""Run the probes one after the other, each with a time limit: `python -m bench.gpu`.

    python -m bench.gpu --out gpu                 runs all probes on a GPU, within 8.5 minutes
    python -m bench.gpu --only fake8 host         runs some of the probes
    python -m bench.gpu --dry                     runs all probes on the CPU, with real models at one layer
    python -m bench.gpu --land gpu                copies the rows of a folder to `bench/results/` and the pages

A probe that fails, hangs or crashes does not affect other probes. Each probe is a process group, which is killed at its
time limit. The rows that a killed probe has written are kept. A separate process compiles kernels during the first
probes.

| file in the folder | content |
|---|---|
| `rows.jsonl` | one JSON object for each result, written immediately, and one with `status` for each finished probe |
| `probes.log` | output of the probes, including tracebacks |
| `table.md` | the printed table, and a table with all numbers for each probe |
| `gpu.tar.gz` | these three files |

This file does not import PyTorch, so the first probe starts immediately.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any

from bench.gpu import ROOT

Row = dict[str, Any]

LIMIT = 8 * 60 + 30
"""Time limit in seconds for the whole run."""

GRACE = 2
"""Seconds between SIGTERM and SIGKILL for the processes of a probe."""

TABLE = 10
"""Seconds reserved for the table and the archive."""

ROWS, LOG, TABLE_FILE, ARCHIVE = "rows.jsonl", "probes.log", "table.md", "gpu.tar.gz"


@dataclass(frozen=True)
class Probe:
    """A probe of a GPU."""

    name: str
    """Name of the probe, and of its function `NAME(report)` in the module."""

    module: str
    """Module in this folder."""

    seconds: float
    """Time limit in seconds, including imports."""

    asked: bool = False
    """Whether the probe runs only if `--only` names it."""


PROBES = (
    Probe("environment", "checks", 20),
    Probe("nccl", "checks", 45),
    Probe("calls", "calls", 30),
    Probe("bits", "kernels", 40),
    Probe("bandwidth", "kernels", 33),
    Probe("fake8", "fake_ranks", 130),
    Probe("host", "fake_ranks", 45),
    Probe("twin", "training", 50),
    Probe("compiled", "training", 40),
    Probe("pair", "pair", 45),
    Probe("captured", "captured", 150, asked=True),
)
"""Probes in order of importance. All but those `asked` for, the grace periods and the table take at most `LIMIT`."""

WARM_UP = "warm_up"
"""The process that compiles all kernels during the first probes."""

BESIDE_WARM_UP = ("environment", "nccl")
"""Probes that run while kernels are compiled."""

PATIENCE = 45
"""Time limit of compilation in seconds after the start of the run. Until then, the other probes wait for its end."""

_WHERE = ("machine", "card", "torch", "python", "date")

NO_GPU = 3
"""Exit status of a probe on a machine without a GPU."""


def run(names: Sequence[str], folder: Path, *, dry: bool) -> list[Row]:
    """Run probes, and return a row with the status of each. If there is no GPU, stop after the first probe.

    Args:
        names: names of the probes, which run in the order of `PROBES`.
        folder: output folder. Earlier files in it are replaced.
        dry: whether to run on the CPU.
    """
    began = monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    rows, log = folder / ROWS, folder / LOG
    rows.write_text("")
    ended = []
    with log.open("w") as output:
        warm_up = _start(WARM_UP, rows, output, dry=dry)
        try:
            for probe in PROBES:
                if probe.name not in names:
                    continue
                if probe.name not in BESIDE_WARM_UP:
                    _await(warm_up, began + PATIENCE)
                    if warm_up.poll() is None:
                        _end_group(warm_up)
                        print("not all kernels were compiled in time; the probes compile the rest", flush=True)
                start = monotonic()
                limit = probe.seconds if dry else min(probe.seconds, began + LIMIT - TABLE - GRACE - start)
                status = _run_probe(probe, limit, rows, output, dry=dry)
                row: Row = {"bench": "gpu", "probe": probe.name, "status": status, "dry": dry}
                row |= {"seconds": round(monotonic() - start, 1), "rows": _count(rows, probe.name)}
                _append(rows, row)
                ended.append(row)
                print(f"{probe.name}: {status}, {row['rows']} rows, {row['seconds']} s", flush=True)
                if status == f"failed with status {NO_GPU}":
                    print("there is no GPU that PyTorch can use; --dry runs on the CPU", file=sys.stderr, flush=True)
                    break
        finally:
            _end_group(warm_up)
    return ended


def _start(name: str, rows: Path, output: IO[str], *, dry: bool) -> subprocess.Popen[bytes]:
    """Start a probe as the leader of a process group."""
    output.write(f"==== {name}\n")
    output.flush()
    command = [sys.executable, "-m", "bench.gpu", "--probe", name, "--out", str(rows), *["--dry"][: int(dry)]]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    # With fewer connections, streams of several systems would share hardware queues.
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if dry:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def _run_probe(probe: Probe, limit: float, rows: Path, output: IO[str], *, dry: bool) -> str:
    """Run one probe, and return its status."""
    if limit < 1:
        return "not started: no time was left"
    process = _start(probe.name, rows, output, dry=dry)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"ended after {limit:.0f} s"
    finally:
        _end_group(process)
    return "ok" if status == 0 else f"failed with status {status}"


def _await(process: subprocess.Popen[bytes], deadline: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - monotonic()))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a group, even if its leader has already ended."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):  # no process is left
            os.killpg(process.pid, how)
            deadline = monotonic() + GRACE
            while how == signal.SIGTERM and monotonic() < deadline:
                process.poll()  # reaps the leader, which would otherwise keep the group alive as a zombie
                os.killpg(process.pid, 0)
                sleep(0.05)
    _await(process, monotonic() + GRACE)  # a process that hangs in the driver is left behind


def _count(rows: Path, probe: str) -> int:
    return sum(row["probe"] == probe for row in _read(rows))


def _read(rows: Path) -> list[Row]:
    """Return the rows of a file, without an incomplete row of a probe that was killed."""
    found = []
    for line in rows.read_text().splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def _append(rows: Path, row: Row) -> None:
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\n")


def be_probe(name: str, rows: Path, *, dry: bool) -> int:
    """Run a probe in this process, and return its exit status: 1 if any of its parts failed."""
    import torch

    if not dry and not torch.cuda.is_available():
        return NO_GPU
    from bench.gpu.report import Report

    modules = {probe.name: probe.module for probe in PROBES} | {WARM_UP: WARM_UP}
    report = Report(name, rows, dry=dry)
    getattr(importlib.import_module(f"bench.gpu.{modules[name]}"), name)(report)
    return int(report.failed)


def located(rows: Sequence[Row]) -> list[Row]:
    """Return the rows. Status rows lack the name of the machine, so this name is added to them."""
    where = next((row for row in rows if "card" in row), {})
    return [{**{key: where[key] for key in _WHERE if key in where}, **row} for row in rows]


def finish(folder: Path) -> str:
    """Write the tables of the rows, and the archive. Return the table of all probes."""
    from bench.gpu.table import render, render_summary

    rows = located(_read(folder / ROWS))
    (folder / ROWS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    summary = render_summary(rows)
    (folder / TABLE_FILE).write_text(f"{summary}\n\n{render(rows)}\n")
    with tarfile.open(folder / ARCHIVE, "w:gz") as archive:
        for name in (ROWS, LOG, TABLE_FILE):
            archive.add(folder / name, name)
    return summary


def main(arguments: Sequence[str]) -> int:
    """Run probes and print their table, or run as a probe. Return 1 if a probe failed."""
    names = [probe.name for probe in PROBES]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="correctness and speed on a GPU")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of: {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder for the files (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="run without a GPU, with models of one layer")
    parser.add_argument("--land", type=Path, metavar="FOLDER", help="only copy the rows of a folder to the pages")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.probe:
        return be_probe(options.probe, options.out, dry=options.dry)
    if options.land:
        from bench.gpu.land import land

        try:
            return land(options.land)
        except (ValueError, OSError) as wrong:
            parser.error(str(wrong))
    # On SIGTERM, `sys.exit` raises an exception, so that `finally` ends the running probe.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ended: list[Row] = []
    try:
        ended = run(
            options.only or [probe.name for probe in PROBES if not probe.asked], options.out.resolve(), dry=options.dry
        )
    finally:
        print(f"\n{finish(options.out)}\nto send back: {options.out / ARCHIVE}", flush=True)
    return int(any(row["status"] != "ok" for row in ended))
