"""Start a command once per rank: `torchrun` does the starting, this says how."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def world_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks the launcher of this process started, `None` if no launcher did."""
    return int(environment["WORLD_SIZE"]) if "RANK" in environment else None


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Run `shardlite ARGUMENTS` on `ranks` processes of this machine and return the exit status."""
    try:
        return subprocess.run(torchrun(ranks, arguments), env=shared_cores(ranks), check=False).returncode
    except KeyboardInterrupt:  # the terminal told the ranks as well
        return 130


def torchrun(ranks: int, arguments: Sequence[str]) -> list[str]:
    """The command that starts `shardlite ARGUMENTS` on `ranks` processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", "shardlite", *arguments]


def shared_cores(ranks: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`environment` with the cores divided among the ranks, unless `OMP_NUM_THREADS` already says otherwise."""
    threads = max(1, _usable_cores() // ranks)
    return {"OMP_NUM_THREADS": str(threads), **environment}


def _usable_cores() -> int:
    """The cores that this process may use: in a container fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
