"""Probes of the machine, and of the properties that the library requires of NCCL's collectives.

Legend: `n` elements in a buffer.
"""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu.report import Report, synchronize
from bench.kernels.run import version_of
from shardlite.comm.chunking import Cut, cut_up
from shardlite.comm.operation import UNNAMED
from shardlite.comm.transport.gloo import reconnect
from shardlite.comm.transport.group_collectives import GlooCollectives, GroupCollectives, NcclCollectives, as_bytes
from shardlite.comm.transport.nccl import communicator
from shardlite.config import Route
from shardlite.lab.ranks import only_rank

CALLS = 100
_PACKAGES = ("triton", "einops", "numpy", "transformers")


def environment(report: Report) -> None:
    """Report hardware and versions of the machine."""
    found: dict[str, Any] = {name: version_of(name) for name in _PACKAGES} | {"kernel": platform.release()}
    if not report.dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpus": torch.cuda.device_count(),
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _driver(),
        }
    if report.ranks > 1:
        found["topology"] = _said_by("nvidia-smi", "topo", "-m")
    report(**found)


def _driver() -> str | None:
    return (_said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").partition("\n")[
        0
    ] or None


def _said_by(*command: str) -> str | None:
    """Return what a command prints, or `None` if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def nccl(report: Report) -> None:
    """Call each collective on one rank, over the program's process group and over a communicator of the library.

    The collective runs on a busy side stream. The call must return while the stream is still busy, and later work on
    the stream must see the result. With one rank no data is sent, so times are those of the call alone.
    """
    with only_rank(report.device) as group:
        for connection in ("group", "own"):
            with report.guarded(connection=connection):
                transport = _transport(group, connection, dry=report.dry)
                for name, call in _collectives(transport).items():
                    with report.guarded(connection=connection, collective=name):
                        _check(report, connection, name, call)


def _transport(group: dist.ProcessGroup, connection: str, *, dry: bool) -> GroupCollectives:
    """Return the library's transport over NCCL, or over gloo if `dry`."""
    timeout, own = timedelta(seconds=20), connection == "own"
    if dry:
        return GlooCollectives(reconnect(group, timeout) if own else group, timeout)
    return NcclCollectives(communicator(group, torch.device("cuda"), timeout, Route()) if own else group)


Collective = Callable[[Tensor, Tensor], None]


def _collectives(transport: GroupCollectives) -> dict[str, Collective]:
    """For each collective, return a function that uses the collective to copy a source [n] to a target [n]."""

    def gather(source: Tensor, target: Tensor) -> None:
        target.copy_(source)  # the gather is in place, so the target must already contain this rank's segment
        transport.all_gather(target, _cut(target, transport), UNNAMED)

    def exchange(source: Tensor, target: Tensor) -> None:
        transport.all_to_all(target, source, [len(source) // transport.world_size] * transport.world_size)

    def split_exchange(source: Tensor, target: Tensor) -> None:
        GroupCollectives._trade(transport, {0: as_bytes(source)}, {0: as_bytes(target)})

    def reduce_scatter(source: Tensor, target: Tensor) -> None:
        transport.sum_scattered(source, target)

    def all_reduce(source: Tensor, target: Tensor) -> None:
        target.copy_(source)
        transport.add_integers(target)

    def broadcast(source: Tensor, target: Tensor) -> None:
        target.copy_(source)
        transport.copy_from(0, target)

    return {
        "all-gather": gather,
        "all-to-all": exchange,
        "all-to-all, split": split_exchange,
        "reduce-scatter": reduce_scatter,
        "all-reduce": all_reduce,
        "broadcast": broadcast,
    }


def _cut(full: Tensor, transport: GroupCollectives) -> Cut:
    return cut_up(full.numel(), full.dtype, transport, None, None)


def _check(report: Report, connection: str, name: str, call: Collective) -> None:
    """Check that a call gives the right values in stream order, and report the time of a call."""
    device, n = report.device, 1 << 20
    source, target, read = torch.randn(n, device=device), torch.zeros(n, device=device), torch.zeros(n, device=device)
    expected = source + 1
    call(source, target)  # creates the communicator
    source.add_(0)  # loads the kernel of an addition now, because loading may synchronize the device
    read.copy_(target)
    synchronize(device)
    target.zero_()
    stream, busy = nullcontext(), False
    if device.type == "cuda":
        side = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        stream = torch.cuda.stream(side)  # type: ignore[assignment]
    with stream:
        if device.type == "cuda":
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # about 25 ms
        source.add_(1)
        call(source, target)
        read.copy_(target)
        if device.type == "cuda":
            busy = not side.query()
    synchronize(device)
    assert torch.equal(read, expected), f"{int((read != expected).sum())} of {n} values are wrong"
    assert busy or report.dry, "the host waited for the stream"
    begin = time.perf_counter()
    for _ in range(1 if report.dry else CALLS):
        call(source, target)
    host = time.perf_counter() - begin
    synchronize(device)
    whole = time.perf_counter() - begin
    calls = 1 if report.dry else CALLS
    us = {"host_us": round(1e6 * host / calls, 1), "us": round(1e6 * whole / calls, 1)}
    report(connection=connection, collective=name, nbytes=source.nbytes, backend=_backend(connection), **us)


def _backend(connection: str) -> str:
    return "the program's process group" if connection == "group" else "a connection of the library's own"
