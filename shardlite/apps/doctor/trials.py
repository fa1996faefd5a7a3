"""This machine's capabilities, and the selected transports with reasons, each tried.

In: the ranks that a launcher has started. Out: text on rank 0.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from textwrap import wrap
from typing import get_args

import torch
import torch.distributed as dist

from shardlite.apps import launch
from shardlite.comm import (
    Operation,
    StoreMean,
    Transport,
    all_gather,
    all_gather_json,
    choose,
    reduce_scatter,
    staging_numel,
)
from shardlite.config import Route, TransportName
from shardlite.errors import LayoutError, ShardLiteError

_TIMEOUT = timedelta(seconds=30)
_NBYTES = 1 << 20
_WARM_UP = 3
"""Calls before those that are timed. They make connections and get pages, and their results are checked."""

_REPEATS = 31
_AHEAD = 300e-6  # seconds from the agreement on a start to the start


@dataclass(frozen=True)
class Finding:
    """Result for one transport."""

    name: str
    device: str
    words: str
    """Transport, algorithm and reason; or why it is not available."""

    trial: str = ""
    """Result of the trial, or `""` if it is not available."""


@dataclass(frozen=True)
class Call:
    """A collective over one transport, on buffers with known values."""

    device: torch.device
    fill: Callable[[], object]
    make: Callable[[int], object]
    """Make it for the `i`-th time."""

    is_right: Callable[[], bool]
    """Return whether the result is right on this rank."""


def run_trials() -> bool:
    """Examine this machine as one of the ranks; rank 0 prints. Return whether no trial has failed."""
    with launch.process_group() as device:
        devices = dict.fromkeys((torch.device("cpu"), device))
        findings = examine([(name, each) for each in devices for name in get_args(TransportName)])
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
    lines = ["This machine"]
    for name, value in facts:
        lines += _wrapped(f"  {name:<{width}}", value)
    for device in dict.fromkeys(finding.device for finding in findings):
        lines += ["", f"Messages between {ranks} ranks: {device} tensors"]
        for finding in findings:
            if finding.device == device:
                lines += [f'  transport="{finding.name}"', *_wrapped("      ", finding.words)]
                lines += _wrapped("      ", finding.trial)
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> list[str]:
    """Return lines of at most 80 columns."""
    return wrap(text, 80, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def examine(wanted: Sequence[tuple[TransportName, torch.device]]) -> list[Finding]:
    """Select each transport as the library would, check its results, and time all that are right. Collective."""
    asked = [_ask(*each) for each in wanted]
    taken = iter(milliseconds([call for _, calls in asked for call in calls]))
    words = "right results with 1 MiB: all-gather {:.2f} ms, reduce-scatter {:.2f} ms"
    return [
        replace(finding, trial=words.format(*(next(taken) for _ in calls))) if calls else finding
        for finding, calls in asked
    ]


def _ask(name: TransportName, device: torch.device) -> tuple[Finding, list[Call]]:
    """Return the finding for a transport, and the calls to time if it works. Collective."""
    try:
        choice = choose(None, device, _TIMEOUT, route=Route(transport=name))
    except LayoutError as error:
        return Finding(name, str(device), f"not here: {error}"), []
    calls = _calls(choice.transport, device, name)
    wrong = failure(calls)
    return Finding(name, str(device), choice.words, wrong), [] if wrong else calls


_WRONG = "FAILED"


def _calls(transport: Transport, device: torch.device, name: str) -> list[Call]:
    """Return an all-gather and a reduce-scatter of 1 MiB."""
    world_size, rank = transport.world_size, transport.rank
    numel = _NBYTES // 4 // world_size * world_size
    mine = torch.arange(numel, device=device, dtype=torch.float32) % 97 + rank
    full = transport.empty(numel * 4, device).view(torch.float32)
    shard = torch.empty(numel // world_size, device=device)
    staging = full.new_empty(staging_numel(numel, transport, full.dtype))
    own = slice(rank * len(shard), (rank + 1) * len(shard))
    owners = torch.arange(world_size, device=device).repeat_interleave(len(shard))
    total = (mine[own] - rank) * world_size + sum(range(world_size))

    def gather(i: int) -> None:
        all_gather(full, transport, operation=Operation(f"trial of {name}, gather", i))

    def reduce(i: int) -> None:
        operation = Operation(f"trial of {name}, reduction", i)
        reduce_scatter(full, transport, last=StoreMean(shard), staging=staging, operation=operation)

    return [
        Call(device, lambda: full.fill_(-1.0)[own].fill_(rank), gather, lambda: bool((full == owners).all())),
        Call(device, lambda: full.copy_(mine), reduce, lambda: bool((shard == total).all())),
    ]


def failure(calls: Sequence[Call]) -> str:
    """Warm up. Return what has failed on a rank, or `""`. Collective."""
    here = ""
    try:
        for call in calls:
            for i in range(_WARM_UP):
                call.fill()
                call.make(i)
            here = here if call.is_right() else "wrong numbers have come"
    except ShardLiteError as error:
        here = str(error)
    of_ranks = all_gather_json(None, here, "results of a trial", 2 * _TIMEOUT)  # others may time out first
    return next((f"{_WRONG}: {said}" for said in of_ranks if said), "")


def milliseconds(calls: Sequence[Call]) -> list[float]:
    """Return the median duration of each call on the slowest rank, as `bench.ring` measures it. Collective.

    Calls are made in turn, so each finds the caches as the others left them. Filling the buffers is not timed.
    """
    times: list[list[float]] = [[] for _ in calls]
    for i in range(_REPEATS):
        for call, taken in zip(calls, times, strict=True):
            call.fill()
            _synchronize(call.device)
            start_together()
            start = time.perf_counter()
            call.make(_WARM_UP + i)
            _synchronize(call.device)
            taken.append(time.perf_counter() - start)
    of_ranks = all_gather_json(None, times, "durations of the trials", _TIMEOUT)
    slowest = [[max(each) for each in zip(*taken, strict=True)] for taken in zip(*of_ranks, strict=True)]
    return [1e3 * statistics.median(taken) for taken in slowest]


def start_together(group: dist.ProcessGroup | None = None) -> None:
    """Return at the same moment on all ranks of one machine, which have one clock. Collective.

    After a barrier, ranks start one after the other, and a short call would take as long as that. Ranks whose clocks
    differ, on several machines, start no better than after a barrier.
    """
    moment = torch.tensor(time.perf_counter() + _AHEAD, dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX, group=group)
    start = min(moment.item(), time.perf_counter() + _AHEAD)
    while time.perf_counter() < start:
        os.sched_yield()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return f"not installed (Python {sys.version_info.major}.{sys.version_info.minor})"
