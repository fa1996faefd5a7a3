"""Start a probe once per rank, and be one of these ranks.

The ranks are child processes in the probe's process group, so all of them end together. `torchrun` would start each
rank in a session of its own, which the runner could not end at the time limit. This file imports little at first, so
that the ranks start soon.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bench.gpu import ROOT
from shardlite.cli.launch import environment_for

if TYPE_CHECKING:
    from bench.gpu.run import Probe

REPORTED = 9
"""Exit status of a rank that has reported its error."""

GRACE = 5.0
"""Seconds in which the other ranks may report their errors after one has failed."""


def lead(probe: Probe, rows: Path, dry: bool, ranks: int) -> int:
    """Start the ranks of a probe, and return 1 if one of them failed. If a rank crashed, write a row with the error."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "bench.gpu", "--probe", probe.name, "--out", str(rows), "--ranks", str(ranks)]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    world |= {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    world |= {"TORCHINDUCTOR_COMPILE_THREADS": "4"}  # of each rank
    processes = []
    for rank in range(ranks):
        environment = environment_for(ranks) | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen([*command, *["--dry"][: int(dry)]], cwd=ROOT, env=environment))
    statuses = statuses_of(processes)
    if any(statuses) and REPORTED not in statuses:
        from bench.gpu.report import Report

        Report(probe.name, rows, dry=dry, ranks=ranks)(error=f"the ranks ended with {statuses}; see the log")
    return int(any(statuses))


def statuses_of(processes: Sequence[subprocess.Popen[bytes]], seconds: float = float("inf")) -> list[int]:
    """Wait for ranks, and return their exit statuses. Kill ranks that outlast the time limit or a rank that failed."""
    deadline = time.monotonic() + seconds
    failed = False
    while None in (statuses := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if any(statuses) and not failed:
            failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        time.sleep(0.02)
    for process in processes:
        process.kill()
    return [process.wait() for process in processes]


def be_rank(probe: Probe, rows: Path, dry: bool, ranks: int) -> int:
    """Be a rank of a probe. On an error, report it and exit at once, because a cleanup could wait for other ranks."""
    from bench.gpu.report import Report
    from shardlite.lab.ranks import one_of_them

    rank = int(os.environ["RANK"])
    if not dry:
        torch.cuda.set_device(rank)  # so that this process uses no memory of the first GPU
    report = Report(probe.name, rows, dry=dry, ranks=ranks)
    report.quiet = rank > 0
    try:
        with one_of_them() as group:
            importlib.import_module(f"bench.gpu.{probe.module}").run(report, group)
    except Exception as error:
        traceback.print_exc()
        report(rank=rank, error=f"{type(error).__name__}: {error}".splitlines()[0][:300])
        sys.stdout.flush()
        os._exit(REPORTED)
    return 0
