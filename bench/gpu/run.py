"""Run the probes one after the other, each with a time limit: `python -m bench.gpu`.

    python -m bench.gpu --out gpu                 runs all probes on a GPU, within nine minutes
    python -m bench.gpu --only fake8 host         runs some of the probes
    python -m bench.gpu --ranks 8                 runs the probes of several GPUs on 8 GPUs, within 10 minutes
    python -m bench.gpu --dry                     runs all probes on the CPU, with models of one layer
    python -m bench.gpu --land gpu                copies a folder or an archive to `bench/results/` and the pages

A probe that fails, hangs or crashes does not affect other probes. Each probe is a process group, which is killed at its
time limit. The rows that a killed probe has written are kept. A separate process compiles kernels during the first
probes.

| file in the folder | content |
|---|---|
| `rows.jsonl` | one JSON object for the run, one for each result, and one with `status` for each finished probe |
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
from time import monotonic
from typing import IO, Any

from bench.gpu import ROOT
from shardlite.lab.launch import end_group, run_limited, start_group

Row = dict[str, Any]

LIMIT = 9 * 60
"""Time limit in seconds for the whole run."""

LIMIT_ON_SEVERAL = 10 * 60
"""Time limit in seconds for a run on several GPUs."""

DRY = 4
"""Factor of the time limits of a dry run with several ranks, which share the cores of the machine."""

MOST_RANKS = 8
"""Maximum number of GPUs: those of one machine."""

FORMAT = 1
"""Version of the keys of the rows, in the row of the run. `--land` only knows this one."""

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

    on: str = "one"
    """`one` GPU, `several` GPUs with a rank on each, or `any`: one GPU, in both runs. `asked`: only with `--only`.

    Every rank of a probe on several GPUs calls the function `run(report, group)` in the module.
    """


PROBES = (
    Probe("environment", "checks", 20, "any"),
    Probe("nccl", "checks", 45),
    Probe("calls", "calls", 30),
    Probe("bits", "kernels", 40),
    Probe("bandwidth", "kernels", 33),
    Probe("fake8", "fake_ranks", 160),
    Probe("host", "fake_ranks", 45),
    Probe("twin", "training", 50),
    Probe("compiled", "training", 40),
    Probe("pair", "pair", 45),
    Probe("graphs", "graphs", 150, "asked"),
    Probe("offload", "offload", 300, "asked"),
    Probe("links", "several.links", 45, "several"),
    *(Probe(name, "several.steps", 35, "several") for name in ("fsdp2", "exact", "fast", "in_backward")),
    *(Probe(name, "several.steps", 35, "several") for name in ("captured", "ddp")),
    Probe("pause", "several.pause", 30, "several"),
    *(Probe(name, "several.steps", 65, "several") for name in ("fsdp2_compiled", "exact_compiled")),
    Probe("registered", "several.steps", 30, "several"),
    Probe("copy_engines", "several.links", 25, "several"),
    Probe("symmetric_memory", "several.steps", 30, "several"),
    Probe("fsdp2_again", "several.steps", 30, "several"),
)
"""Probes in order of importance. The limits of a run, grace periods and the table take at most the limit of the run."""

WARM_UP = "warm_up"
"""The process that compiles all kernels during the first probes."""

BESIDE_WARM_UP = ("environment", "nccl", "links")
"""Probes that run while kernels are compiled."""

PATIENCE = 45
"""Time limit of compilation in seconds after the start of the run. Until then, the other probes wait for its end."""

_WHERE = ("machine", "card", "torch", "python", "date")

NO_GPU = 3
"""Exit status of a probe on a machine without a GPU."""


def probes_on(ranks: int, asked: Sequence[str] = ()) -> list[Probe]:
    """Return the probes of a run on `ranks` GPUs, with those that only run if they are `asked` for by name."""
    kinds = ("any", "one") if ranks == 1 else ("any", "several")
    return [each for each in PROBES if each.on in kinds or (ranks == 1 and each.on == "asked" and each.name in asked)]


def marks(ranks: int, *, dry: bool) -> Row:
    """Return the keys of every row of a run."""
    return {"bench": "gpu", "dry": dry} if ranks == 1 else {"bench": "gpu-ranks", "ranks": ranks, "dry": dry}


def run(names: Sequence[str], folder: Path, *, dry: bool, ranks: int = 1, command: str = "") -> list[Row]:
    """Run probes, and return a row with the status of each. If there is no GPU, stop after the first probe.

    Args:
        names: names of the probes, which run in the order of `PROBES`.
        folder: output folder. Earlier files in it are replaced.
        dry: whether to run on the CPU.
        ranks: number of GPUs.
        command: command of the run, for its row.
    """
    began = monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    rows, log = folder / ROWS, folder / LOG
    rows.write_text("")
    ended = []
    options = [*(["--ranks", str(ranks)] if ranks > 1 else []), *["--dry"][: int(dry)]]
    if ranks > 1:
        _append(rows, {**marks(ranks, dry=dry), "probe": "run", **origin(command)})
    with log.open("w") as output:
        warm_up = start_group(*_command(WARM_UP, rows, output, options), output)
        try:
            for probe in probes_on(ranks, names):
                if probe.name not in names:
                    continue
                if probe.name not in BESIDE_WARM_UP:
                    _await(warm_up, began + PATIENCE)
                    if warm_up.poll() is None:
                        end_group(warm_up, GRACE)
                        print("not all kernels were compiled in time; the probes compile the rest", flush=True)
                start = monotonic()
                left = began + (LIMIT if ranks == 1 else LIMIT_ON_SEVERAL) - TABLE - GRACE - start
                limit = probe.seconds * (DRY if ranks > 1 else 1) if dry else min(probe.seconds, left)
                status = _run_probe(probe, limit, rows, output, options)
                row: Row = {**marks(ranks, dry=dry), "probe": probe.name, "status": status}
                row |= {"seconds": round(monotonic() - start, 1), "rows": _count(rows, probe.name)}
                _append(rows, row)
                ended.append(row)
                print(f"{probe.name}: {status}, {row['rows']} rows, {row['seconds']} s", flush=True)
                if status == f"failed with status {NO_GPU}":
                    print("there is no GPU that PyTorch can use; --dry runs on the CPU", file=sys.stderr, flush=True)
                    break
        finally:
            end_group(warm_up, GRACE)
    return ended


def origin(command: str) -> Row:
    """Return the format of the rows, the command, and the commit of the checkout: `None` without git."""

    def git(*arguments: str) -> str | None:
        try:
            return subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"format": FORMAT, "command": command, "commit": git("rev-parse", "HEAD"), "clean": changed == ""}


def _command(name: str, rows: Path, output: IO[str], options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command of a probe and its environment, and write a headline to the log."""
    output.write(f"==== {name}\n")
    output.flush()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    # With fewer connections, streams of several systems would share hardware queues.
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if "--dry" in options:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return [sys.executable, "-m", "bench.gpu", "--probe", name, "--out", str(rows), *options], environment


def _run_probe(probe: Probe, limit: float, rows: Path, output: IO[str], options: Sequence[str]) -> str:
    """Run one probe, and return its status."""
    if limit < 1:
        return "not started: no time was left"
    command, environment = _command(probe.name, rows, output, options)
    return run_limited(command, limit, environment, output, GRACE)


def _await(process: subprocess.Popen[bytes], deadline: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - monotonic()))


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


def be_probe(name: str, rows: Path, *, dry: bool, ranks: int = 1) -> int:
    """Run a probe in this process, and return its exit status: 1 if any of its parts failed.

    For a probe on several GPUs, start the ranks, or be one of them.
    """
    import torch

    if not dry and not torch.cuda.is_available():
        return NO_GPU
    known = {probe.name: probe for probe in PROBES} | {WARM_UP: Probe(WARM_UP, WARM_UP, PATIENCE)}
    if known[name].on == "several":
        from bench.gpu.several import launch

        be = launch.be_rank if "RANK" in os.environ else launch.lead
        return be(known[name], rows, dry, ranks)
    from bench.gpu.report import Report

    report = Report(name, rows, dry=dry, ranks=ranks)
    getattr(importlib.import_module(f"bench.gpu.{known[name].module}"), name)(report)
    return int(report.failed)


def located(rows: Sequence[Row]) -> list[Row]:
    """Return the rows. Status rows lack the name of the machine, so this name is added to them."""
    where = next((row for row in rows if "card" in row), {})
    return [{**{key: where[key] for key in _WHERE if key in where}, **row} for row in rows]


def finish(folder: Path) -> str:
    """Write the tables of the rows, and the archive. Return the table of all probes."""
    from bench.gpu.results import render_summary
    from shardlite.lab.table import render

    rows = located(_read(folder / ROWS))
    (folder / ROWS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    summary = render_summary(rows)
    (folder / TABLE_FILE).write_text(f"{summary}\n\n{render(rows) if rows else ''}\n")
    with tarfile.open(folder / ARCHIVE, "w:gz") as archive:
        for name in (ROWS, LOG, TABLE_FILE):
            archive.add(folder / name, name)
    return summary


def main(arguments: Sequence[str]) -> int:
    """Run probes and print their table, or run as a probe. Return 1 if a probe failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="correctness and speed on GPUs")
    names = [probe.name for probe in PROBES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of: {', '.join(names)}")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="run the probes of several GPUs on N GPUs")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder for the files (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="run without a GPU, with small models")
    parser.add_argument("--land", type=Path, metavar="PATH", help="only copy a folder or an archive to the pages")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.probe:
        return be_probe(options.probe, options.out, dry=options.dry, ranks=options.ranks)
    if options.land:
        from bench.gpu.land import land

        try:
            return land(options.land)
        except (ValueError, OSError) as wrong:
            parser.error(str(wrong))
    if refused := _wrong(options.ranks, options.only or (), dry=options.dry):
        parser.error(refused)
    # On SIGTERM, `sys.exit` raises an exception, so that `finally` ends the running probe.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ended: list[Row] = []
    try:
        chosen = options.only or [probe.name for probe in probes_on(options.ranks)]
        command = " ".join(["python -m bench.gpu", *arguments])
        ended = run(chosen, options.out.resolve(), dry=options.dry, ranks=options.ranks, command=command)
    finally:
        print(f"\n{finish(options.out)}\nto send back: {options.out / ARCHIVE}", flush=True)
    return int(any(row["status"] != "ok" for row in ended))


def _wrong(ranks: int, only: Sequence[str], *, dry: bool) -> str:
    """Return why this machine cannot run these probes on so many GPUs, or an empty string."""
    if not 1 <= ranks <= MOST_RANKS:
        return f"--ranks {ranks}: pass the number of GPUs of this machine to use, from 2 to {MOST_RANKS}"
    if others := {*only} - {probe.name for probe in probes_on(ranks, only)}:
        instead = "pass --ranks N for a number of GPUs" if ranks == 1 else "leave --ranks out for those of one GPU"
        return f"--only {' '.join(sorted(others))}: not a probe of a run with --ranks {ranks}; {instead}"
    if ranks == 1 or dry:
        return ""
    import torch

    gpus = torch.cuda.device_count()
    few = {0: "--dry runs on the CPU", 1: "leave --ranks out to measure one GPU"}
    instead = few.get(gpus, f"pass --ranks {gpus}")
    return "" if ranks <= gpus else f"--ranks {ranks} needs {ranks} GPUs, but PyTorch finds {gpus}: {instead}"
