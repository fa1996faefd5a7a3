"""Ranks of a bench: processes on this machine, one thread each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def start_ranks(module: str, ranks: int, arguments: Sequence[str]) -> int:
    """Start a module once per rank, and return the exit status."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, "-m", module, *arguments], env=environment, check=False).returncode
