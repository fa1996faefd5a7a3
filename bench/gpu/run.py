"""Everything that this library wants to know of a GPU, in four parts of less than nine minutes each.

    python -m bench.gpu --part 1 --out gpu         (without --part: all of them)

| part | probes |
|---|---|
| 1 | what the machine is; the tests for GPUs; the kernels under memcheck; all stages and formats beside a plain twin |
| 2 | bandwidth of a copy; all kernels; the additions of a reduction beside a running matrix product |
| 3 | steps of GPT-2 XL beside FSDP2; waits of the host; compiled blocks; messages of a rank to itself |
| 4 | the largest model that trains |

Each probe is a process of its own with a time limit, so one that hangs or crashes costs no other. Its rows are written
as they come, to `part-N.jsonl`, and what it prints to `part-N.log`: at most eight files. A row `"status"` tells how it
ended. The end is a table of all probes. `--dry` runs every line that does not need a GPU at toy size on the CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from bench.support.ranks import end_group
from bench.support.table import Row, markdown_table, read_rows
from shardlite.apps.footprint.machine import machine


@dataclass(frozen=True)
class Probe:
    """One question to a GPU: a function `NAME(report, dry)` of a module of this folder."""

    module: str
    name: str
    seconds: float
    """After which it is ended."""


PARTS: dict[int, Sequence[Probe]] = {
    1: (
        Probe("correctness", "environment", 60),
        Probe("correctness", "gpu_tests", 200),
        Probe("correctness", "memcheck", 90),
        Probe("correctness", "twins", 120),
        Probe("correctness", "ranks_on_one_card", 60),
    ),
    2: (
        Probe("kernels", "copies", 30),
        Probe("kernels", "all_kernels", 400),
        Probe("kernels", "beside_a_matrix_product", 90),
    ),
    3: (
        Probe("training", "steps", 300),
        Probe("training", "host_waits", 60),
        Probe("training", "compiled", 120),
        Probe("training", "messages_to_itself", 50),
    ),
    4: (Probe("training", "largest_model", 520),),
}
"""The limits of a part add up to less than nine minutes."""

_COLUMNS = ("part", "probe", "status", "seconds", "rows")


def run_part(part: int, folder: Path, *, dry: bool) -> list[Row]:
    """Run the probes of a part one after the other, and return a row on how each ended."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, log = folder / f"part-{part}.jsonl", folder / f"part-{part}.log"
    for file in (rows, log):
        file.write_text("")
    ended = []
    for probe in PARTS[part]:
        before, start = len(read_rows([rows])), perf_counter()
        status = _run_probe(probe, rows, log, dry=dry)
        seconds = round(perf_counter() - start, 1)
        found = len(read_rows([rows])) - before
        ended.append(
            {"bench": "gpu", "part": part, "probe": probe.name, "status": status, "seconds": seconds, "rows": found}
        )
        _append(rows, ended[-1])
        print(f"{probe.name}: {status}, {found} rows, {seconds} s", flush=True)
    return ended


def _run_probe(probe: Probe, rows: Path, log: Path, *, dry: bool) -> str:
    """Run one probe in a process group of its own, and tell how it ended."""
    command = [sys.executable, "-m", "bench.gpu", "--probe", probe.name, "--out", str(rows), *["--dry"][: int(dry)]]
    with log.open("a") as output:
        output.write(f"==== {probe.name}\n")
        output.flush()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(probe.seconds)
        except subprocess.TimeoutExpired:
            return f"ended after {probe.seconds:g} s"
        finally:
            end_group(process)
    return "ok" if status == 0 else f"failed with status {status}"


def _append(file: Path, row: Row) -> None:
    with file.open("a") as rows:
        rows.write(json.dumps(row) + "\n")


def device_of(dry: bool) -> torch.device:
    """Return the device of a probe: the GPU, or the CPU if it runs dry."""
    return torch.device("cpu" if dry else "cuda")


def be_probe(name: str, file: Path, *, dry: bool) -> None:
    """Be the process of one probe."""
    probe = next(probe for probes in PARTS.values() for probe in probes if probe.name == name)

    def report(**found: object) -> None:
        row = {"bench": "gpu", "probe": name, "dry": dry, **found, **machine(device_of(dry))}
        _append(file, row)
        print(json.dumps(row), flush=True)

    getattr(importlib.import_module(f"bench.gpu.{probe.module}"), name)(report, dry=dry)


def render(ended: Sequence[Row]) -> str:
    """Return the table of how probes ended."""
    return markdown_table([list(_COLUMNS), *([str(row[key]) for key in _COLUMNS] for row in ended)])


def main(arguments: Sequence[str]) -> int:
    """Run parts and print how their probes ended, or be a probe. The status is 1 if any did not end well."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="correctness and speed on a GPU")
    parser.add_argument("--part", type=int, choices=[*PARTS], help="(all)")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder for rows and logs (%(default)s)")
    parser.add_argument("--dry", action="store_true", help="at toy size on the CPU")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.dry and not torch.cuda.is_available():
        parser.error("there is no GPU that PyTorch can use; --dry runs at toy size on the CPU")
    if options.probe:
        be_probe(options.probe, options.out, dry=options.dry)
        return 0
    parts = [options.part] if options.part else [*PARTS]
    ended = [row for part in parts for row in run_part(part, options.out, dry=options.dry)]
    print(f"\n{render(ended)}", flush=True)
    return int(any(row["status"] != "ok" for row in ended))
