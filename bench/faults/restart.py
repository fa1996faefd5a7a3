"""Measure the time from the kill of a rank to the first new step after a restart, from memory and from disk.

    python -m bench.faults.restart --ranks 2

starts two ranks with `torchrun --max-restarts 1`. Rows go to `bench/results/restart-MODEL-Nranks.jsonl`.

| way | the program calls |
|---|---|
| `memory` | `shardlite.save_in_memory` after each step |
| `disk` | `shardlite.save` after every `--save-every` steps |

The rank with the highest number kills itself in step `--fatal`. So the run that resumes from disk repeats as many
steps as the remainder of `--fatal` divided by `--save-every`. At the end, the weights of both runs are compared with
those of an uninterrupted run.

| key | meaning |
|---|---|
| `resumed` | number of steps after which the loaded checkpoint was saved |
| `lost` | number of repeated steps |
| `seconds` | seconds from the kill to the end of the first new step |
| `started` | the part of `seconds` before the call of `load`; in this part the ranks restart |
| `loaded` | the part of `seconds` that `load` takes |
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from shardlite import AdamW, ShardLite, load, save, save_in_memory
from shardlite.cli.launch import OWN_STORE, torchrun
from shardlite.lab.compared.systems import SYSTEMS
from shardlite.lab.compared.workloads import WORKLOADS
from shardlite.lab.ranks import one_of_them, parser_of
from shardlite.lab.table import Row, report

WAYS = ("memory", "disk")
AFTER = 2
"""Number of steps after the fatal step."""


def train(way: str, folder: Path, options: argparse.Namespace) -> None:
    """Train as one of the ranks, save, and record the times. In the fatal step of the first attempt, kill one rank."""
    with one_of_them() as group:
        workload, rank = WORKLOADS[options.model], group.rank()
        trainer = SYSTEMS["stage3"](workload, group)
        model, optimizer = trainer.model, trainer.optimizer
        assert isinstance(model, ShardLite)
        assert isinstance(optimizer, AdamW)
        times = {"started": time.time()}
        found = load(folder / "run", model, optimizer, missing_ok=True)
        times["loaded"] = time.time()
        assert found.step is not None
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        for step in range(found.step, options.fatal + AFTER):
            if step == options.fatal and first and way != "straight" and rank == group.size() - 1:
                (folder / "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.step(workload.batch(rank, step))
            if step == options.fatal:
                times["new"] = time.time()
            if way == "memory" and not save_in_memory(folder / "run", model, optimizer, step=step + 1):
                raise RuntimeError("there are no copies in memory")
            if way == "disk" and (step + 1) % options.save_every == 0:
                save(folder / "run", model, optimizer, step=step + 1, keep=2)
        weights = model.full_state_dict(rank=0)
        dist.barrier(group)
        if rank == 0:
            torch.save(weights, folder / "weights.pt")
            (folder / "times").write_text(json.dumps({**times, "resumed": found.step}))


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Run both ways and an uninterrupted run, compare their weights, and return a row for each way."""
    times = {way: run(way, folder / way, options) for way in ("straight", *WAYS)}
    expected = torch.load(folder / "straight" / "weights.pt")
    rows: list[Row] = []
    for way in WAYS:
        for name, value in torch.load(folder / way / "weights.pt").items():
            assert torch.equal(value, expected[name]), f"{way}: {name} differs from an uninterrupted run"
        killed, found = float((folder / way / "killed").read_text()), times[way]
        rows.append(
            {
                **WORKLOADS[options.model].row("restart", options.ranks),
                "way": way,
                "resumed": found["resumed"],
                "lost": options.fatal - found["resumed"],
                "seconds": round(found["new"] - killed, 3),
                "started": round(found["started"] - killed, 3),
                "loaded": round(found["loaded"] - found["started"], 3),
            }
        )
    return rows


def run(way: str, folder: Path, options: argparse.Namespace) -> Row:
    """Train once under `torchrun`, and return the times that rank 0 recorded."""
    folder.mkdir()
    arguments = ["--way", way, "--folder", str(folder), "--model", options.model]
    arguments += ["--fatal", str(options.fatal), "--save-every", str(options.save_every)]
    command = torchrun(options.ranks, arguments, module="bench.faults.restart", restarts=1)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", OWN_STORE: "1"}
    done = subprocess.run(command, env=environment, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr[-4000:]}")
    noted: Row = json.loads((folder / "times").read_text())
    return noted


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or train if `torchrun` started this process as a rank. Return the exit status."""
    options = parser_of("bench.faults.restart").parse_args(arguments)
    if options.way:
        train(options.way, options.folder, options)
    else:
        with tempfile.TemporaryDirectory(prefix="shardlite-bench-", dir=options.folder) as folder:
            rows = measure(options, Path(folder))
        report(rows, options.out / f"restart-{options.model}-{options.ranks}ranks.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
