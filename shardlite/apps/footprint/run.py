"""Systems measured one after the other, each by new processes. A system that fails is a row with its error.

The program that measures is started once per rank, with the name of a system and a file for its row added to its
arguments; `be_rank` is what it does then.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardlite.apps.footprint.measure import Row, compared, measure
from shardlite.apps.footprint.predict import Predictor
from shardlite.apps.footprint.systems import SYSTEMS
from shardlite.apps.launch import environment_for, run_agent, torchrun
from shardlite.apps.plan.source import Source

RETURNS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}
"""Makes malloc map larger blocks (bytes) by themselves, and so return them to the system when they are freed."""

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
_TIMEOUT = timedelta(minutes=10)
_SIGNALLED = 128  # exit statuses above it are those of signals
_LINES = 3
"""Of the standard error of ranks that left no message, shown in its place."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is started once per rank: `python -m MODULE ARGUMENTS --systems SYSTEM --row FILE`."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: RETURNS)
    facts: Row = field(default_factory=lambda: {"malloc": "returns", "busy": 0})
    """Keys of every row that say how the program was run."""

    def run(self, system: str, ranks: int) -> Row:
        """Measure one system, and return its row, or one with `error` only.

        Raises:
            SystemExit: a signal has ended the ranks, and is to end this process.
        """
        with tempfile.TemporaryDirectory() as folder:
            file, told = Path(folder) / "row.json", Path(folder) / "stderr"
            arguments = [*self.arguments, "--systems", system, "--row", str(file)]
            environment = environment_for(ranks, {**os.environ, **_ENVIRONMENT, **self.environment})
            with told.open("w") as output:
                status = run_agent(torchrun(ranks, arguments, module=self.module), environment, output)
            if status > _SIGNALLED:
                raise SystemExit(status)
            if file.exists():
                row: Row = json.loads(file.read_text())
                return row
            return {"error": _cause(status, told.read_text())}


def be_rank(find: Callable[[], Source], system: str, file: Path, *, steps: int) -> int:
    """Measure one system as one of its ranks. Rank 0 writes the row; a rank that fails writes its error first.

    Return the exit status.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    try:
        row = measure(find(), system, group, steps=steps)
    except Exception as error:
        _write({"error": f"{type(error).__name__}: {error}"}, file)
        raise
    if group.rank() == 0:
        _write(row, file)
    dist.destroy_process_group()
    return 0


def measure_all(
    source: Source,
    program: Program,
    systems: Sequence[str],
    ranks: Sequence[int],
    *,
    progress: Callable[[str], None],
) -> Iterator[list[Row]]:
    """Measure all systems at each number of ranks, and yield the rows of one number at a time.

    Args:
        source: the model, for the predictions and the rows of systems that fail.
        program: measures a system of the same model.
        systems: names of `SYSTEMS`. Those whose package is missing are left out, with a line of progress.
        ranks: processes on this machine.
        progress: called with one line for each system.
    """
    known = _prediction(source, progress)
    present = [name for name in systems if not SYSTEMS[name].missing]
    for name in systems:
        if SYSTEMS[name].missing:
            progress(f"{name} is left out: {SYSTEMS[name].missing}")
    for world_size in ranks:
        rows = []
        for i, name in enumerate(present, 1):
            begin = time.monotonic()
            row = program.run(name, world_size)
            row = {
                "bench": "footprint",
                "model": source.name,
                "ranks": world_size,
                "system": name,
                **row,
                **program.facts,
            }
            rows.append(row | known(name, world_size))
            took = time.monotonic() - begin
            progress(f"[{i}/{len(present)}, {world_size} ranks] {name}: {_result(row)}, {took:.0f} s")
        yield compared(rows)


def _prediction(source: Source, progress: Callable[[str], None]) -> Callable[[str, int], Row]:
    """Return a function that predicts a system's bytes. Where the model cannot be traced, it says so, and has none."""
    try:
        predictor = Predictor(source, progress=progress)
    except ValueError as error:
        progress(f"nothing is predicted: {error}")
        return lambda name, ranks: {}

    def known(name: str, ranks: int) -> Row:
        try:
            bounds = predictor.bounds(name, ranks)
        except ValueError as error:
            progress(f"{name} is not predicted: {error}")
            return {}
        return {} if bounds is None else {"predicted_least_bytes": bounds[0], "predicted_bytes": bounds[1]}

    return known


def _write(row: Row, file: Path) -> None:
    """Write a row, unless another rank has written its error."""
    if not file.exists():
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(row))
        temporary.replace(file)


def _result(row: Row) -> str:
    if "error" in row:
        return f"failed, {row['error'].splitlines()[0]}"
    return f"{row['pss_bytes'] / 2**20:.0f} MiB"


def _cause(status: int, told: str) -> str:
    """Say why ranks ended without a message."""
    if "SIGKILL" in told:
        return "a rank was killed (SIGKILL), as Linux does when memory runs out"
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    return " | ".join([f"the ranks ended with status {status}", *lines[-_LINES:]])
