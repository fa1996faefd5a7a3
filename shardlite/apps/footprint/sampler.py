"""What ranks hold, sampled while they train: the size of their processes, and the purposes that `memory()` reports."""

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
from shardlite.model import state_of

_PAUSE = 0.002
"""Seconds between two looks at `memory()`."""


class Sampler:
    """The proportional set size of all ranks of a group, above what it was at the start. All ranks call its methods."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        processes = all_gather_json(group, os.getpid(), "the numbers of the processes")
        self._program = None
        if group.rank() == 0:
            command = [sys.executable, "-S", "-E", str(Path(__file__).parent / "pss.py"), *map(str, processes)]
            self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._start = self.when = 0
        self._start = self.take()[1]

    def take(self) -> tuple[int, int]:
        """Return the most since the last call and what is held now, in bytes, means of the ranks.

        `when` is the moment of the most, in nanoseconds of the monotonic clock.
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
        """End the program."""
        if self._program is not None:
            self._program.communicate()


class Account:
    """What `memory()` of this rank says while the block runs, again and again. Systems without it say nothing.

    It looks from another thread, and so at the counters alone: `memory()` itself reads gradients, which the backward
    may be writing. Those counters know all tensors that one call of it has seen.
    """

    def __init__(self, model: nn.Module) -> None:
        purposes_of(model)
        self._context = state_of(model).context if isinstance(model, ShardLite) else None
        self._said: list[tuple[int, dict[str, int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Account:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def mean_at(self, when: int, group: dist.ProcessGroup) -> dict[str, int]:
        """Return the bytes by purpose at a moment of the monotonic clock, means of the ranks. All ranks call it."""
        own = self._said[max(0, bisect(self._said, when, key=itemgetter(0)) - 1)][1]
        said = all_gather_json(group, own, "what memory() says")
        return {purpose: sum(each.get(purpose, 0) for each in said) // len(said) for purpose in own}

    def _watch(self) -> None:
        over = False
        while not over:  # at least once, however short the block is
            held = self._context.held() if self._context else {}
            now = {purpose: each.now for purpose, each in held.items() if each.now}
            self._said.append((time.monotonic_ns(), now))
            over = self._over.wait(_PAUSE)


def purposes_of(model: nn.Module) -> dict[str, int]:
    """Return the bytes by purpose that this rank holds now. Systems without `memory()` have none."""
    held = model.memory() if isinstance(model, ShardLite) else {}
    return {purpose: each.now for purpose, each in held.items() if each.now}
