"""Run programs with a time limit, each as the leader of a process group. Does not import PyTorch."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import IO

ROOT = Path(__file__).parents[2]

GRACE = 35.0
"""Seconds between SIGTERM and SIGKILL. `torchrun` itself kills ranks 30 s after it has sent SIGTERM."""


def start_group(command: Sequence[str], environment: Mapping[str, str], output: IO[str]) -> subprocess.Popen[bytes]:
    """Start a program in the root of the repository as the leader of a process group."""
    options = {"env": environment, "stdout": output, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options)  # type: ignore[call-overload,no-any-return]


def run_limited(
    command: Sequence[str], limit: float, environment: Mapping[str, str], output: IO[str], grace: float = GRACE
) -> str:
    """Run a program, end its process group, and return `"ok"`, or how it failed."""
    process = start_group(command, environment, output)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"ended after {limit:.0f} s"
    finally:
        end_group(process, grace)
    return "ok" if status == 0 else f"failed with status {status}"


def end_group(process: subprocess.Popen[bytes], grace: float = GRACE) -> None:
    """Terminate a process group, and wait until all of its processes have ended.

    Ranks of `torchrun` are in separate sessions, and only their launcher can end them. So the launcher gets SIGTERM and
    has time to react, even if the leader of the process group has already ended.
    """
    with suppress(ProcessLookupError):  # no process of the group is left
        os.killpg(process.pid, signal.SIGTERM)
        deadline = monotonic() + grace
        while monotonic() < deadline:
            process.poll()  # reaps the leader, which would otherwise keep the group alive as a zombie
            os.killpg(process.pid, 0)
            sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver is left behind
        process.wait(grace)
