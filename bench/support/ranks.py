"""Ranks of a bench: processes on this machine, one thread each; on GPUs, one rank for each GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardlite.apps.launch import place


def start_ranks(module: str, ranks: int, arguments: Sequence[str]) -> int:
    """Start a module once per rank, and return the exit status."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, "-m", module, *arguments], env=environment, check=False).returncode


@contextmanager
def one_of_them() -> Iterator[dist.ProcessGroup]:
    """Be a rank that was started so, with the group of all. After an error the others are left to their timeouts."""
    torch.set_num_threads(1)
    device, backend = place(torch.cuda.device_count())
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@contextmanager
def default_group(backend: str, **where: Any) -> Iterator[dist.ProcessGroup]:
    """Make the default process group, and destroy it at the end. `where` is for `init_process_group`."""
    dist.init_process_group(backend, **where)
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
    finally:
        dist.destroy_process_group()


@contextmanager
def only_rank(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Be the only rank of a process group for tensors on a device, without a launcher."""
    _, backend = place(int(device.type == "cuda"), {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    with (
        tempfile.NamedTemporaryFile() as store,
        default_group(backend, init_method=f"file://{store.name}", rank=0, world_size=1) as group,
    ):
        yield group


def device_of_rank() -> torch.device:
    """Return the GPU of this rank, or the CPU without GPUs. Within `one_of_them`."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
