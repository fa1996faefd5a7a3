"""What the processes of all ranks hold, sampled while they train: their size, and what `memory()` reports."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from bisect import bisect
from operator import itemgetter
from pathlib import Path

import torch.distributed as dist
from torch import nn

from shardlite import ShardLite
from shardlite.comm import all_gather_json
from shardlite.model import ModelState

_PAUSE = 0.002
"""Seconds between two samples of `memory()`."""


class Sampler:
    """Mean proportional set size of the ranks of a group, above that at the start. All ranks call its methods."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        processes = all_gather_json(group, os.getpid(), "the numbers of the processes")
        self._program = None
        if group.rank() == 0:
            command = [sys.executable, "-S", "-E", str(Path(__file__).parent / "pss.py"), *map(str, processes)]
            self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._start = self.when = 0
        self._start = self.sample()[1]

    def sample(self) -> tuple[int, int]:
        """Return the peak since the last call, and the current size, in bytes.

        `when` is then the moment of the peak, in nanoseconds of the monotonic clock.
        """
        dist.barrier(self._group)
        answer = [0, 0, 0]
        if self._program is not None:
            assert self._program.stdin is not None
            assert self._program.stdout is not None
            print(file=self._program.stdin, flush=True)
            answer = [int(word) for word in self._program.stdout.readline().split()]
        peak, now, self.when = all_gather_json(self._group, answer, "what the processes hold")[0]
        return peak // self._group.size() - self._start, now // self._group.size() - self._start

    def close(self) -> None:
        """End the program that samples."""
        if self._program is not None:
            self._program.communicate()


class Account:
    """What `memory()` of this rank reports, sampled while the block runs. Other systems report nothing.

    Another thread takes the samples, so it reads counters only: `memory()` itself would read gradients, which the
    backward may be writing. One call of `memory()` registers all tensors with those counters.
    """

    def __init__(self, model: nn.Module) -> None:
        purposes_of(model)
        self._context = ModelState(model).context if isinstance(model, ShardLite) else None
        self._samples: list[tuple[int, dict[str, int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Account:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def mean_at(self, when: int, group: dist.ProcessGroup) -> dict[str, int]:
        """Return the bytes by purpose at a moment of the monotonic clock, as means of the ranks. Collective."""
        own = self._samples[max(0, bisect(self._samples, when, key=itemgetter(0)) - 1)][1]
        of_ranks = all_gather_json(group, own, "what memory() reports")
        return {purpose: sum(each.get(purpose, 0) for each in of_ranks) // len(of_ranks) for purpose in own}

    def _sample(self) -> None:
        over = False
        while not over:  # at least once, however short the block is
            held = self._context.held() if self._context else {}
            now = {purpose: each.now for purpose, each in held.items() if each.now}
            self._samples.append((time.monotonic_ns(), now))
            over = self._over.wait(_PAUSE)


def purposes_of(model: nn.Module) -> dict[str, int]:
    """Return the bytes that this rank holds now, by purpose. Empty for systems without `memory()`."""
    held = model.memory() if isinstance(model, ShardLite) else {}
    return {purpose: each.now for purpose, each in held.items() if each.now}
