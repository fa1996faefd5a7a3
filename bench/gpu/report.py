"""The report of a probe, and functions that time and synchronize the probe's device.

Legend: `S` elements.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.gpu.run import marks
from bench.support.measure import percentile, quantiles
from shardlite.apps.memory.machine import machine


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
    def guarded(self, **what: object) -> Iterator[None]:
        """Report an exception in the block as a row with the keys `what`, and continue after the block."""
        try:
            yield
        except Exception as error:
            self.failed = True
            traceback.print_exc()
            self(**what, error=f"{type(error).__name__}: {error}".splitlines()[0][:300])
        with suppress(RuntimeError):  # raised if an illegal access has destroyed the CUDA context
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


def milliseconds(call: Callable[[], object], device: torch.device, rounds: int) -> dict[str, float]:
    """Return the times of `rounds` consecutive calls, as in a training loop.

    `ms_p20`, `ms_p50` and `ms_p80` are times between the ends of two calls on the current stream. `host_ms_p50` is the
    time that the host spends in a call, including waits.
    """
    synchronize(device)
    ends, hosts = [_mark(device)], []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        hosts.append(1e3 * (time.perf_counter() - begin))
        ends.append(_mark(device))
    synchronize(device)
    spans = [_span(before, after) for before, after in pairwise(ends)]
    return {**quantiles("ms", spans, 4), "host_ms_p50": round(percentile(hosts, 50), 4)}


def _mark(device: torch.device) -> Any:
    """Return the current moment of the current stream: an event, or on the CPU a time in milliseconds."""
    if device.type == "cpu":
        return 1e3 * time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _span(before: Any, after: Any) -> float:
    return float(after - before if isinstance(before, float) else before.elapsed_time(after))
