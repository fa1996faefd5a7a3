"""Start the ranks of a bench: processes on this machine, with one thread each, or one rank per GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from shardlite.cli import launch, torchrun
from shardlite.lab.table import RESULTS, Row, write_rows

_GRACE = 35.0
"""Seconds between SIGTERM and SIGKILL. `torchrun` itself kills ranks 30 s after it has sent SIGTERM."""


def start_ranks(module: str, ranks: int, arguments: Sequence[str], *, quiet: bool = False) -> int:
    """Start a module once per rank, and return the exit status. If `quiet`, discard the output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.DEVNULL if quiet else None
    command = torchrun(ranks, arguments, module=module)
    return subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process group, and wait until all of its processes have ended.

    Ranks are in separate sessions, and only their launcher can end them. So the launcher gets SIGTERM and has time to
    react, even if the leader of the process group has already ended.
    """
    with suppress(ProcessLookupError):  # no process of the group is left
        os.killpg(process.pid, signal.SIGTERM)
        deadline = monotonic() + _GRACE
        while monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def options_of_ranks(module: str, description: str, ranks: int | Sequence[int] = 2) -> ArgumentParser:
    """Return a parser with the options `--ranks` and `--out`. If `ranks` is a list, `--ranks` takes several numbers."""
    parser = ArgumentParser(prog=f"python -m {module}", description=description)
    several = None if isinstance(ranks, int) else "+"
    parser.add_argument(
        "--ranks", type=int, nargs=several, default=ranks, help="processes on this machine (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the rows (%(default)s)")
    return parser


def report(rows: Sequence[Row], file: Path, render: Callable[[Sequence[Row]], str] | None = None) -> None:
    """Write rows to a file, and print them and their table."""
    write_rows(rows, file)
    print(*map(json.dumps, rows), sep="\n")
    if render is not None:
        print(f"\n{render(rows)}", flush=True)


def on_ranks(
    module: str, ranks: int | Sequence[int], arguments: Sequence[str], run: Callable[[dist.ProcessGroup], object]
) -> int:
    """Call `run` if a launcher started this process. Otherwise start the ranks, with one run per number in `ranks`.

    Returns:
        The exit status of the launcher, or the result of `run`.
    """
    if "RANK" in os.environ:
        with one_of_them() as group:
            return int(bool(run(group)))
    counts = [ranks] if isinstance(ranks, int) else ranks
    return next((status for count in counts if (status := start_ranks(module, count, arguments))), 0)


@contextmanager
def one_of_them() -> Iterator[dist.ProcessGroup]:
    """Initialize the process group in a process of `start_ranks`. If the block raises, do not destroy the group."""
    torch.set_num_threads(1)
    device, backend = launch.place(torch.cuda.device_count())
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@contextmanager
def default_group(backend: str, **where: Any) -> Iterator[dist.ProcessGroup]:
    """Initialize the default process group, and destroy it on exit. `init_process_group` gets the options `where`."""
    dist.init_process_group(backend, **where)
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group()


@contextmanager
def only_rank(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Initialize a process group of one rank for tensors on a device, without a launcher."""
    _, backend = launch.place(int(device.type == "cuda"), {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    with (
        tempfile.NamedTemporaryFile() as store,
        default_group(backend, init_method=f"file://{store.name}", rank=0, world_size=1) as group,
    ):
        yield group


def device_of_rank() -> torch.device:
    """Return the GPU of this rank, or the CPU. Call it within `one_of_them`."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
