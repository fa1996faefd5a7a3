"""Start the ranks of a bench: processes on this machine, with one thread each, or one rank per GPU."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlite.cli import add_options, imported, launch, torchrun, usage_errors
from shardlite.lab.table import RESULTS


def start_ranks(module: str, ranks: int, arguments: Sequence[str], *, quiet: bool = False) -> int:
    """Start a module once per rank, and return the exit status. If `quiet`, discard the output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.DEVNULL if quiet else None
    command = torchrun(ranks, arguments, module=module)
    return subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode


def parser_of(module: str) -> ArgumentParser:
    """Return the parser of a bench, which `bench/options.json` describes. Choices may be a variable: `module:NAME`."""
    described = json.loads((RESULTS.parent / "options.json").read_text())[module]
    parser = ArgumentParser(prog=f"python -m {module}", description=described["about"])
    for option in described.values():
        if isinstance(option, dict) and isinstance(option.get("choices"), str):
            option["choices"] = list(imported(*option["choices"].split(":")))
    add_options(parser, described)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the rows (%(default)s)")
    return parser


def run_bench(
    module: str,
    arguments: Sequence[str],
    run: Callable[[Namespace, dist.ProcessGroup], object],
    check: Callable[[Namespace], object] = lambda _: None,
) -> int:
    """Start the ranks of a bench, or call `run` as one of them. Return the exit status.

    `check` gets the options, and raises `ValueError` if one is wrong. It may change them.
    """
    parser = parser_of(module)
    options = parser.parse_args(arguments)
    with usage_errors(parser):
        check(options)
    return on_ranks(module, options.ranks, arguments, partial(run, options))


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
