"""The report of a probe, and functions that time and synchronize the probe's device.

Legend: `S` elements.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.gpu.run import marks
from shardlite.lab.memory.machine import machine
from shardlite.lab.timer import percentile, quantiles


class Report:
    """The report of a probe. Each row is written to the file immediately."""

    def __init__(self, probe: str, file: Path, *, dry: bool, ranks: int = 1) -> None:
        self.probe, self.ranks, self.dry = probe, ranks, dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.failed = False
        self.quiet = False
        """Whether to write only errors. Of the ranks of a probe, only rank 0 writes results."""

        self.file = file
        self._common = {**marks(ranks, dry=dry), "probe": probe}
        self._machine = machine(self.device)
        self._machine["card"] = "none" if dry else torch.cuda.get_device_name()

    def __call__(self, **found: object) -> None:
        """Write a row."""
        if self.quiet and "error" not in found:
            return
        line = json.dumps({**self._common, **found, **self._machine})
        with self.file.open("a") as rows:
            rows.write(line + "\n")
        print(line, flush=True)

    @contextmanager
    def guarded(self, *, frees: bool = True, **what: object) -> Iterator[None]:
        """Report an exception in the block as a row with the keys `what`, and continue after the block.

        If `frees`, unused memory is freed after the block, so that the next block does not find it in a cache.
        """
        try:
            yield
        except Exception as error:
            self.failed = True
            traceback.print_exc()
            self(**what, error=f"{type(error).__name__}: {error}".splitlines()[0][:300])
        with suppress(RuntimeError):  # raised if an illegal access has destroyed the CUDA context
            if frees:
                free()


def free() -> None:
    """Free unused memory, including cached memory of the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Times:
    """Times of calls in milliseconds."""

    steps: list[list[float]] = field(default_factory=list)
    """For each turn, the times between the ends of two calls on the current stream."""

    hosts: list[float] = field(default_factory=list)
    """For each call, the time that the host spends in it, including waits."""

    works: list[float] = field(default_factory=list)
    """For each call, the CPU time of all threads, including the thread on which autograd runs a backward on a GPU."""

    ahead: list[float] = field(default_factory=list)
    """For each turn, how long the device works on after the host has returned from the last call."""

    def summary(self) -> dict[str, float]:
        """Return `ms_p20`, `ms_p50` and `ms_p80` of all calls, and the median of the host's times."""
        steps = [each for turn in self.steps for each in turn]
        return {**quantiles("ms", steps, 4), "host_ms_p50": round(percentile(self.hosts, 50), 4)}


def milliseconds(call: Callable[[], object], device: torch.device, rounds: int) -> dict[str, float]:
    """Return the summary of `rounds` consecutive calls, as in a training loop."""
    times = Times()
    take_turn(call, device, rounds, times)
    return times.summary()


def take_turn(call: Callable[[], object], device: torch.device, rounds: int, times: Times) -> None:
    """Add the times of `rounds` consecutive calls. The device is idle before the first."""
    synchronize(device)
    ends = [_mark(device)]
    for _ in range(rounds):
        begin, work = time.perf_counter(), time.process_time()
        call()
        times.works.append(1e3 * (time.process_time() - work))
        times.hosts.append(1e3 * (time.perf_counter() - begin))
        ends.append(_mark(device))
    begin = time.perf_counter()
    synchronize(device)
    times.ahead.append(1e3 * (time.perf_counter() - begin))
    times.steps.append([_span(before, after) for before, after in pairwise(ends)])


AGAIN = "again"


def in_turns(
    report: Report, names: Mapping[str, object], steps: Mapping[str, Callable[[], object]], turns: int, rounds: int
) -> dict[str, Times]:
    """Time several systems in rotation, and the first one again at the end, as "FIRST, again".

    A turn is an untimed step and `rounds` timed ones. A change of the host's speed affects neighbouring turns alike,
    and the last turn shows the change. A system that fails has no more turns, but a row with the keys `names`.
    """
    going, found = dict(steps), dict[str, Times]()
    first = next(iter(steps), "")
    for name in [*[*steps] * turns, f"{first}, {AGAIN}"]:
        system = name.removesuffix(f", {AGAIN}")
        if (step := going.pop(system, None)) is not None:
            with report.guarded(**names, system=system, frees=False):
                step()
                take_turn(step, report.device, rounds, found.setdefault(name, Times()))
                going[system] = step
    return {name: times for name, times in found.items() if name.removesuffix(f", {AGAIN}") in going}


def _mark(device: torch.device) -> Any:
    """Return the current moment of the current stream: an event, or on the CPU a time in milliseconds."""
    if device.type == "cpu":
        return 1e3 * time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _span(before: Any, after: Any) -> float:
    return float(after - before if isinstance(before, float) else before.elapsed_time(after))
