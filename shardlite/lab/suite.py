"""Run all benches one after the other, each with a time limit, and collect their rows in one file.

A bench is a child process that writes its rows to its own folder. When the bench ends, its rows are added to
`MACHINE-DATE.jsonl`, together with a row `"suite"` that has the status of the bench. A bench that fails,
hangs or is missing does not affect the other benches.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import torch

from shardlite.lab.launch import ROOT as ROOT
from shardlite.lab.launch import run_limited
from shardlite.lab.memory.machine import machine
from shardlite.lab.table import RESULTS, Row, read_rows, replace_rows

BUDGET = 19 * 60.0
"""Time limit in seconds for all benches on a machine without a GPU."""

MISSING = "skipped: not in this checkout"
"""Status of a bench that this checkout lacks. This status is not a failure."""


@dataclass(frozen=True)
class Part:
    """One run of one bench."""

    name: str
    command: str
    """Arguments of `python`, to which `--out FOLDER` is appended."""

    seconds: float
    """Time limit."""

    dry: str
    """Arguments of `python` for a run at toy size."""

    on_gpu: bool = False
    """Whether the part uses GPUs. Other parts run on CPUs on any machine."""

    @property
    def is_there(self) -> bool:
        """Whether this checkout has the bench."""
        module = re.match(r"-m (\S+)", self.command)
        return module is None or find_spec(module[1]) is not None


_ALL = [Part(**described) for described in json.loads((RESULTS.parent / "suite.json").read_text())]

PARTS = [part for part in _ALL if not part.on_gpu]
"""Parts in order of importance, because on a busy machine the budget may be too small for the last parts."""

ON_GPU = [part for part in _ALL if part.on_gpu]
"""Additional parts on a machine with a GPU: kernels, and steps compared with FSDP2."""


def parts() -> list[Part]:
    """Return the parts that this machine supports."""
    return [*PARTS, *(ON_GPU if torch.cuda.is_available() else ())]


NAMES = [part.name for part in parts()]
"""Names of the parts."""


def file_name() -> str:
    """Return the name of the file with the rows of this machine and day."""
    here = machine(torch.device("cuda") if torch.cuda.is_available() else None)
    return f"{re.sub(r'[^a-z0-9]+', '-', here['machine'].lower()).strip('-')}-{here['date']}.jsonl"


def commit() -> str:
    """Return the abbreviated commit of this checkout, with `-dirty` if tracked files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def run(chosen: Sequence[Part], file: Path, budget: float, *, dry: bool) -> list[Row]:
    """Run the parts, add their rows to the file, and return a status row for each.

    Args:
        chosen: parts to run, in order. Their earlier rows in `file` are replaced.
        file: file to which all rows are added.
        budget: time limit in seconds for all parts together.
        dry: whether to run at toy size.
    """
    began, measured = perf_counter(), commit()  # before rows change files
    ended: list[Row] = []
    for number, part in enumerate(chosen, 1):
        left = budget - (perf_counter() - began)
        print(
            f"bench {number}/{len(chosen)}: {part.name}, {left:.0f} s of the budget left", file=sys.stderr, flush=True
        )
        with tempfile.TemporaryDirectory() as folder:
            start = perf_counter()
            status = _run_part(part, Path(folder), left, dry=dry)
            rows = [row | {"suite": part.name, "commit": measured} for row in read_rows(Path(folder).rglob("*.jsonl"))]
        seconds = round(perf_counter() - start, 1)
        told = {"bench": "suite", "suite": part.name, "status": status, "seconds": seconds, "rows": len(rows)}
        ended.append({**told, "command": part.dry if dry else part.command, **machine()})
        replace_rows(file, "suite", {part.name}, [*rows, ended[-1]])
        print(f"  {status}, {len(rows)} rows, {seconds:.0f} s", file=sys.stderr, flush=True)
    return ended


def _run_part(part: Part, folder: Path, left: float, *, dry: bool) -> str:
    """Run one part in a new process group, and return its status."""
    if not part.is_there:
        return MISSING
    limit = left if dry else min(part.seconds, left)
    if limit < 1:
        return "skipped: the budget is spent"
    command = [sys.executable, *(part.dry if dry else part.command).split(), "--out", str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1"}
    if not part.on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    log = folder / "log.txt"
    with log.open("w") as output:
        status = run_limited(command, limit, environment, output)
    if status.startswith("failed"):
        print(log.read_text()[-20_000:], file=sys.stderr, flush=True)
    return status
