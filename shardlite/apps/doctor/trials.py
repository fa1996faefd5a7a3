"""This machine's capabilities and the selected transports with reasons, each tried.

In: the ranks that a launcher has started. Out: text on rank 0.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import get_args

import torch
import torch.distributed as dist

from shardlite.apps import launch
from shardlite.comm import Operation, Transport, all_gather, choose, reduce_scatter
from shardlite.config import Route, TransportName
from shardlite.errors import LayoutError, ShardLiteError

_TIMEOUT = timedelta(seconds=30)
_NBYTES = 1 << 20
_REPEATS = 11


@dataclass(frozen=True)
class Finding:
    """Result for one transport."""

    name: str
    device: str
    words: str
    """Transport, algorithm and reason; or why it is not available."""

    trial: str = ""
    """Result of the trial, or `""` if it is not available."""


def examine() -> bool:
    """Examine this machine as one of the ranks; rank 0 prints. Return whether no trial has failed."""
    with launch.process_group() as device:
        findings = [
            _ask(name, each)
            for each in dict.fromkeys((torch.device("cpu"), device))
            for name in get_args(TransportName)
        ]
        if dist.get_rank() == 0:
            print(report(machine(), findings, dist.get_world_size()))
        return not any(finding.trial.startswith(_WRONG) for finding in findings)


def machine() -> list[tuple[str, str]]:
    """Return the machine's properties as pairs of name and value."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    backends = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    return [
        ("system", f"{platform.system()} {platform.release()} on {platform.machine()}"),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("triton", _version("triton")),
        ("backends", ", ".join(backends) or "none"),
        ("GPUs", ", ".join(gpus) or "none"),
        ("threads per rank", str(torch.get_num_threads())),
        ("restarts", _restarts()),
    ]


def _restarts() -> str:
    """Return whether `torchrun --max-restarts` can restart ranks that use gloo."""
    if os.environ.get(launch.OWN_STORE) == "1":
        return f"{launch.OWN_STORE}=1 is set: each attempt of torchrun --max-restarts has a store of its own"
    return f"set {launch.OWN_STORE}=1 before torchrun --max-restarts: else gloo finds the addresses of dead processes"


def report(facts: Sequence[tuple[str, str]], findings: Sequence[Finding], ranks: int) -> str:
    """Format facts and findings for a terminal."""
    width = max(len(name) for name, _ in facts) + 2
    lines = ["This machine", *(f"  {name:<{width}}{value}" for name, value in facts)]
    for device in dict.fromkeys(finding.device for finding in findings):
        lines += ["", f"Messages between {ranks} ranks: {device} tensors"]
        for finding in findings:
            if finding.device == device:
                lines.append(f'  transport="{finding.name}"')
                lines += [f"      {line}" for line in (finding.words, finding.trial) if line]
    return "\n".join(lines)


def _ask(name: TransportName, device: torch.device) -> Finding:
    """Select a transport as the library would, and try it. Collective."""
    try:
        choice = choose(None, device, _TIMEOUT, route=Route(transport=name))
    except LayoutError as error:
        return Finding(name, str(device), f"not here: {error}")
    return Finding(name, str(device), choice.words, _try(choice.transport, device, name))


_WRONG = "FAILED"


def _try(transport: Transport, device: torch.device, name: str) -> str:
    """Gather and reduce known values. Return the result and the durations."""
    world_size, rank = transport.world_size, transport.rank
    numel = _NBYTES // 4 // world_size * world_size
    mine = torch.arange(numel, device=device, dtype=torch.float32) % 97 + rank
    full = transport.empty(numel * 4, device).view(torch.float32)
    shard = torch.empty(numel // world_size, device=device)
    own = slice(rank * len(shard), (rank + 1) * len(shard))

    def gather(i: int) -> None:
        full.fill_(-1.0)[own] = rank
        all_gather(full, transport, operation=Operation(f"trial of {name}, gather", i))

    def reduce(i: int) -> None:
        full.copy_(mine)
        reduce_scatter(full, transport, out=shard, operation=Operation(f"trial of {name}, reduction", i))

    try:
        gathering = _milliseconds(gather, device)
        owners = torch.arange(world_size, device=device).repeat_interleave(len(shard))
        right = bool((full == owners).all())
        reducing = _milliseconds(reduce, device)
        right &= bool((shard == (mine[own] - rank) * world_size + sum(range(world_size))).all())
    except ShardLiteError as error:
        return f"{_WRONG}: {error}"
    if not right:
        return f"{_WRONG}: wrong numbers have come"
    return f"tried with 1 MiB: all-gather {gathering:.2f} ms, reduce-scatter {reducing:.2f} ms, results right"


def _milliseconds(call: Callable[[int], None], device: torch.device) -> float:
    """Return the median duration of some calls on this rank, with buffers filled each time."""
    times = []
    for i in range(_REPEATS):
        start = time.perf_counter()
        call(i)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return f"not installed (Python {sys.version_info.major}.{sys.version_info.minor})"
