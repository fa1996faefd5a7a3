"""Bytes held by this rank, by purpose.

A `Ledger` counts storages, not tensors: all views of a buffer are one entry. The entry is removed when the storage
is freed. The ledger does not know units, ranks or devices. The owner of a buffer names the buffer's purpose.

PyTorch keeps one Python object per storage as long as the storage exists, even if only views or the autograd graph
hold the storage. So a weak reference to that object detects that the storage is freed.
`tests/telemetry/test_ledger.py` tests this behavior of PyTorch.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

import torch
from torch import Tensor


def format_bytes(nbytes: int) -> str:
    """Format `nbytes` in MiB with one decimal: `format_bytes(3 << 19)` is `"1.5 MiB"`."""
    return f"{nbytes / 2**20:.1f} MiB"


def process_memory(device: torch.device) -> Held:
    """Return the memory of this process in bytes, as reported by the CUDA allocator or the operating system.

    On a CPU, `now` is the proportional set size, in which a page that `n` processes share counts as `1/n`. `peak` is
    the largest resident set of the process so far. Sources: `/proc/self/smaps_rollup` and `getrusage(2)`. If
    `smaps_rollup` is not available, both values are the peak.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return Held(stats["reserved_bytes.all.current"], stats["reserved_bytes.all.peak"])
    import resource  # this module does not exist on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return Held(peak, peak)
    now = next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), peak)
    return Held(now, max(now, peak))


def not_on(device: torch.device) -> frozenset[str]:
    """Return the purposes whose bytes `process_memory` of `device` does not include."""
    host = ("offloaded state", "chunks of a step", "messages", "mailboxes", "pinned memory", "idle shared memory")
    return frozenset(host if device.type == "cuda" else ())


@dataclass(frozen=True)
class Held:
    """Bytes that are held for one purpose."""

    now: int
    peak: int
    """The maximum since the latest `reset_peak`. Purposes peak at different moments."""


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a live storage, with the storage's size in bytes. (`weakref.finalize` costs far more.)"""

    __slots__ = ("key", "nbytes", "purpose")
    key: int
    """The id of the storage."""

    purpose: str
    nbytes: int


class Ledger:
    """Current and peak bytes by purpose.

    A storage may be freed at any moment and in any thread. So freeing a storage only queues its entry. The next call
    of the ledger subtracts the queued entries before it adds any bytes, so peaks are exact.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by id(storage): PyTorch reuses an id only after the entry was queued
        self._dead: deque[_Entry] = deque()
        self._current: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._lock = RLock()
        self.awaits_step = False
        """Whether a thread other than the program's waits for the memory counts of the next step."""

    def track(self, purpose: str, *memory: Tensor | torch.UntypedStorage) -> None:
        """Count each storage, or the whole storage of each tensor, under `purpose` until the storage is freed.

        A second call for the same storage updates its purpose and its size.
        """
        with self._lock:
            for each in memory:
                storage = each.untyped_storage() if isinstance(each, Tensor) else each
                key, nbytes = id(storage), storage.nbytes()
                if self._dead:
                    self._settle()
                entry = self._entries.get(key)
                if entry is None:
                    entry = self._entries[key] = _Entry(storage, self._dead.append)
                    entry.key = key
                elif entry.purpose == purpose and entry.nbytes == nbytes:
                    continue
                else:
                    self._move(entry.purpose, -entry.nbytes)
                entry.purpose, entry.nbytes = purpose, nbytes
                self._move(purpose, nbytes)

    def current(self) -> dict[str, int]:
        """Return the current bytes of every purpose ever used."""
        with self._lock:
            self._settle()
            return dict(self._current)

    def peak(self) -> dict[str, int]:
        """Return the peak of each purpose since the latest `reset_peak`. Purposes peak at different moments."""
        with self._lock:
            return dict(self._peak)

    def held(self) -> dict[str, Held]:
        """Return the current and peak bytes of every purpose ever used."""
        with self._lock:
            now = self.current()
            return {purpose: Held(nbytes, self._peak[purpose]) for purpose, nbytes in now.items()}

    def reset_peak(self) -> None:
        """Reset every purpose's peak to its current bytes."""
        with self._lock:
            self._settle()
            self._peak = dict(self._current)

    def _settle(self) -> None:
        """Subtract the storages that were freed since the previous call."""
        while self._dead:
            entry = self._dead.popleft()
            del self._entries[entry.key]
            self._current[entry.purpose] -= entry.nbytes

    def _move(self, purpose: str, nbytes: int) -> None:
        total = self._current.get(purpose, 0) + nbytes
        self._current[purpose] = total
        if total >= self._peak.get(purpose, 0):
            self._peak[purpose] = total
