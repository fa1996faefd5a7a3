"""What the processes of all ranks hold, sampled while they train: their size, and what `memory()` reports.

A page that `n` processes share counts as `1/n` in each (proportional set size), so sizes can be added. The kernel keeps
no maximum of it, so a thread reads it repeatedly.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardlite import ShardLite
from shardlite.comm import all_gather_json
from shardlite.telemetry import process_memory

_PAUSE = 0.002
"""Seconds between two samples, which take a few milliseconds each."""


class Sample(NamedTuple):
    """What a rank holds at one moment, in bytes."""

    size: int = 0
    """Proportional set size of the process."""

    purposes: dict[str, int] = {}  # noqa: RUF012  # read only
    """What `memory()` reports."""


class Sampler:
    """Samples this process from its construction to `close`. All ranks of the group construct it, and call `take`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._model: ShardLite | None = None
        self._peak = Sample()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._start = 0
        self._start = self.take()[1]

    def watch(self, model: nn.Module) -> None:
        """Include what `memory()` of `model` reports, if it has that method.

        The thread reads counters only: `memory()` itself would read gradients, which the backward may be writing. One
        call of `memory()` registers all tensors with those counters.
        """
        purposes_of(model)
        self._model = model if isinstance(model, ShardLite) else None

    def take(self) -> tuple[int, int, dict[str, int]]:
        """Return the peak size since the last call, the current size, and the bytes by purpose at the peak.

        All are means of the ranks. Sizes count from the size at construction. Collective.
        """
        dist.barrier(self._group)
        now = self._sample()
        with self._lock:
            peak, self._peak = self._peak, Sample()
        of_ranks = all_gather_json(self._group, [*peak, now.size], "what each process holds")
        dist.barrier(self._group)
        mean = [
            sum(values) // len(of_ranks) - self._start for values in zip(*[(p, n) for p, _, n in of_ranks], strict=True)
        ]
        purposes = {name: sum(each.get(name, 0) for _, each, _ in of_ranks) // len(of_ranks) for name in peak.purposes}
        return mean[0], mean[1], purposes

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_PAUSE):
            self._sample()

    def _sample(self) -> Sample:
        """Take one sample, and keep it if it is the largest."""
        held = self._model._context.held() if self._model else {}
        purposes = {purpose: each.now for purpose, each in held.items() if each.now}
        sample = Sample(process_memory(torch.device("cpu")).now, purposes)
        with self._lock:
            self._peak = max(self._peak, sample, key=lambda each: each.size)
        return sample


def purposes_of(model: nn.Module) -> dict[str, int]:
    """Return the bytes that this rank holds now, by purpose. Empty for systems without `memory()`."""
    held = model.memory() if isinstance(model, ShardLite) else {}
    return {purpose: each.now for purpose, each in held.items() if each.now}
