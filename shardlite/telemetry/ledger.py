"""What this rank holds, in bytes, by purpose.

A `Ledger` counts storages, not tensors: views of one buffer are one entry, and an entry ends with the storage itself,
however many views came and went before. It knows nothing of units, ranks or devices; the owner of a buffer says what
it is for.

PyTorch keeps one Python object per storage for as long as the storage lives, even while only views or the autograd
graph hold it, so a weak reference to that object tells the storage's end. `tests/telemetry/test_ledger.py` checks that.
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
    """`nbytes` in MiB with one decimal: `format_bytes(3 << 19)` is `"1.5 MiB"`."""
    return f"{nbytes / 2**20:.1f} MiB"


def process_memory(device: torch.device) -> Held:
    """Return what this process holds, in bytes, according to the CUDA allocator or the operating system.

    On a CPU: the proportional set size, in which a page that `n` processes share counts as `1/n` of it, and as its peak
    the largest resident set of the process so far. Source: `/proc/self/smaps_rollup` and `getrusage(2)`. Where Linux
    does not tell the former, both are the latter.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return Held(stats["reserved_bytes.all.current"], stats["reserved_bytes.all.peak"])
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return Held(peak, peak)
    now = next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), peak)
    return Held(now, max(now, peak))


def not_on(device: torch.device) -> frozenset[str]:
    """Return the purposes whose bytes are not in what `process_memory` tells of a device."""
    host = ("chunks of a step", "messages", "mailboxes", "pinned memory", "idle shared memory")
    return frozenset(host if device.type == "cuda" else ())


@dataclass(frozen=True)
class Held:
    """Bytes for one purpose."""

    now: int
    peak: int
    """The most since the last `reset_peak`; purposes peak at different moments."""


@dataclass(frozen=True)
class _Entry:
    """One living storage."""

    purpose: str
    nbytes: int


class Ledger:
    """Bytes by purpose, now and at most.

    Storages that died are queued by their finalizers, which may run at any moment and in any thread, and are
    subtracted at the start of the next call: no addition ever meets a stale total, so peaks are exact.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}  # by id(storage): an id returns only after its death was queued
        self._dead: deque[int] = deque()
        self._current: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._lock = RLock()

    def track(self, purpose: str, tensor: Tensor) -> None:
        """Count the whole storage of `tensor` under `purpose` until the storage is freed.

        Tracking it again changes nothing, except that a resized storage counts with its new size, and that a storage
        which got another purpose moves there.
        """
        self.track_storage(purpose, tensor.untyped_storage())

    def track_storage(self, purpose: str, storage: torch.UntypedStorage) -> None:
        """`track` for a storage at hand."""
        entry = _Entry(purpose, storage.nbytes())
        with self._lock:
            self._settle()
            known = self._entries.get(id(storage))
            if known == entry:
                return
            if known is None:
                weakref.finalize(storage, self._dead.append, id(storage))
            else:
                self._move(known.purpose, -known.nbytes)
            self._entries[id(storage)] = entry
            self._move(purpose, entry.nbytes)

    def current(self) -> dict[str, int]:
        """Bytes held now, for every purpose ever used."""
        with self._lock:
            self._settle()
            return dict(self._current)

    def peak(self) -> dict[str, int]:
        """The most bytes each purpose has held since the last `reset_peak`; purposes peak at different moments."""
        with self._lock:
            return dict(self._peak)

    def held(self) -> dict[str, Held]:
        """Both, for every purpose ever used."""
        with self._lock:
            now = self.current()
            return {purpose: Held(nbytes, self._peak[purpose]) for purpose, nbytes in now.items()}

    def reset_peak(self) -> None:
        """Let every purpose's peak start again from what it holds now."""
        with self._lock:
            self._settle()
            self._peak = dict(self._current)

    def _settle(self) -> None:
        """Subtract the storages that died since the last call."""
        while self._dead:
            entry = self._entries.pop(self._dead.popleft())
            self._move(entry.purpose, -entry.nbytes)

    def _move(self, purpose: str, nbytes: int) -> None:
        total = self._current.get(purpose, 0) + nbytes
        self._current[purpose] = total
        self._peak[purpose] = max(self._peak.get(purpose, 0), total)
