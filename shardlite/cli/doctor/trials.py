"""Print this machine's properties, and select and test each transport.

In: the ranks that a launcher has started. Out: text on rank 0.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from textwrap import wrap
from typing import get_args

import torch
import torch.distributed as dist

from shardlite import comm
from shardlite.cli import launch
from shardlite.comm.transport.select import choose
from shardlite.config import Route, TransportName
from shardlite.errors import LayoutError, ShardLiteError

_TIMEOUT = timedelta(seconds=30)
_NBYTES = 1 << 20
_WARM_UP = 3
"""Number of warm-up calls. They open connections and allocate pages, and their results are checked."""

_REPEATS = 31
_AHEAD = 300e-6  # seconds from the agreement on a start time until the start
_FAILED = "FAILED"


Findings = Mapping[str, Mapping[str, Sequence[str]]]
"""Two texts for each device and transport: the selected transport with the reason, and the result of the trial.

If a transport is not available, the only text is the reason.
"""


@dataclass(frozen=True)
class Call:
    """A collective over one transport, on buffers with known values."""

    device: torch.device
    fill: Callable[[], object]
    """Fill the buffers."""

    make: Callable[[int], object]
    """Call the collective for the `i`-th time."""

    is_right: Callable[[], bool]
    """Return whether the result is correct on this rank."""


def run_trials() -> bool:
    """Examine this machine as one of the ranks. Rank 0 prints. Return `True` if no trial has failed."""
    with launch.process_group() as device:
        devices = dict.fromkeys((torch.device("cpu"), device))
        findings = {str(each): {name: _examine(name, each) for name in get_args(TransportName)} for each in devices}
        if dist.get_rank() == 0:
            print(report(machine(), findings, dist.get_world_size()))
        lines = [line for of_device in findings.values() for found in of_device.values() for line in found]
        return not any(line.startswith(_FAILED) for line in lines)


def machine() -> list[tuple[str, str]]:
    """Return the machine's properties as pairs of name and value."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    backends = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    restarts = (
        f"set {launch.OWN_STORE}=1 before torchrun --max-restarts: otherwise gloo finds addresses of dead processes"
    )
    if os.environ.get(launch.OWN_STORE) == "1":
        restarts = f"{launch.OWN_STORE}=1 is set: each attempt of torchrun --max-restarts has its own store"
    return [
        ("system", f"{platform.system()} {platform.release()} on {platform.machine()}"),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("triton", triton),
        ("backends", ", ".join(backends) or "none"),
        ("GPUs", ", ".join(gpus) or "none"),
        ("threads per rank", str(torch.get_num_threads())),
        ("restarts", restarts),
    ]


def report(facts: Sequence[tuple[str, str]], findings: Findings, ranks: int) -> str:
    """Format facts and findings for a terminal, in lines of at most 80 columns."""
    width = max(len(name) for name, _ in facts) + 2
    lines = ["This machine"]
    for name, value in facts:
        lines += _wrapped(f"  {name:<{width}}", value)
    for device, transports in findings.items():
        lines += ["", f"Messages between {ranks} ranks: {device} tensors"]
        for name, found in transports.items():
            lines += [f'  transport="{name}"', *(line for text in found for line in _wrapped("      ", text))]
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> list[str]:
    return wrap(text, 80, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def _examine(name: TransportName, device: torch.device) -> list[str]:
    """Select a transport as the library does, check its results, and time it. Collective."""
    try:
        choice = choose(None, device, _TIMEOUT, route=Route(transport=name))
    except LayoutError as error:
        return [f"not available: {error}"]
    calls = _calls(choice.transport, device, name)
    if failed := failure(calls):
        return [choice.words, failed]
    words = "correct results with 1 MiB: all-gather {:.2f} ms, reduce-scatter {:.2f} ms"
    return [choice.words, words.format(*map(milliseconds, calls))]


def _calls(transport: comm.Transport, device: torch.device, name: str) -> list[Call]:
    """Return an all-gather and a reduce-scatter of 1 MiB."""
    world_size, rank = transport.world_size, transport.rank
    numel = _NBYTES // 4 // world_size * world_size
    mine = torch.arange(numel, device=device, dtype=torch.float32) % 97 + rank
    full = transport.empty(numel * 4, device).view(torch.float32)
    shard = torch.empty(numel // world_size, device=device)
    staging = full.new_empty(comm.staging_numel(numel, transport, full.dtype))
    own = slice(rank * len(shard), (rank + 1) * len(shard))
    owners = torch.arange(world_size, device=device).repeat_interleave(len(shard))
    total = (mine[own] - rank) * world_size + sum(range(world_size))

    def gather(i: int) -> None:
        comm.all_gather(full, transport, operation=comm.Operation(f"trial of {name}, gather", i))

    def reduce(i: int) -> None:
        operation = comm.Operation(f"trial of {name}, reduction", i)
        comm.reduce_scatter(full, transport, last=comm.StoreMean(shard), staging=staging, operation=operation)

    return [
        Call(device, lambda: full.fill_(-1.0)[own].fill_(rank), gather, lambda: bool((full == owners).all())),
        Call(device, lambda: full.copy_(mine), reduce, lambda: bool((shard == total).all())),
    ]


def failure(calls: Sequence[Call]) -> str:
    """Make the warm-up calls. Return the first failure of any rank, or an empty string. Collective."""
    own = ""
    try:
        for call in calls:
            for i in range(_WARM_UP):
                call.fill()
                call.make(i)
            own = own if call.is_right() else "the result has wrong numbers"
    except ShardLiteError as error:
        own = str(error)
    # The timeout is doubled, because another rank may first wait for a timeout of its trial.
    of_ranks = comm.all_gather_json(None, own, "results of a trial", 2 * _TIMEOUT)
    return next((f"{_FAILED}: {each}" for each in of_ranks if each), "")


def milliseconds(call: Call) -> float:
    """Return the median duration of a call on the slowest rank. Collective.

    All ranks start a call together, as in `bench.ring`. Filling the buffers is not timed.
    """
    times = []
    for i in range(_WARM_UP, _WARM_UP + _REPEATS):
        call.fill()
        _synchronize(call.device)
        start_together()
        start = time.perf_counter()
        call.make(i)
        _synchronize(call.device)
        times.append(time.perf_counter() - start)
    of_ranks = comm.all_gather_json(None, times, "durations of a trial", _TIMEOUT)
    slowest: list[float] = [max(each) for each in zip(*of_ranks, strict=True)]
    return 1e3 * statistics.median(slowest)


def start_together(group: dist.ProcessGroup | None = None) -> None:
    """Return at the same moment on all ranks of one machine, because these ranks share a clock. Collective.

    A barrier is not enough: ranks return from it one after the other, with delays that may be as long as a short call.
    Ranks of several machines, whose clocks differ, start as they would after a barrier.
    """
    moment = torch.tensor(time.perf_counter() + _AHEAD, dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX, group=group)
    start = min(moment.item(), time.perf_counter() + _AHEAD)
    while time.perf_counter() < start:
        os.sched_yield()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
