"""Clocks that add up durations on one device. On a GPU they time its streams without synchronizing with them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_OPEN = 256
"""Number of GPU intervals that are kept before the finished ones are added up."""


class Clock:
    """Sum of the durations of `running` blocks."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the duration of the block: host time or, on a GPU, time of the current stream."""
        if not self._on_gpu:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - start
        elif torch.cuda.is_current_stream_capturing():
            yield  # timing events cannot be captured
        else:
            start_event, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start_event.record()
            try:
                yield
            finally:
                end.record()
                self._open.append((start_event, end))
                if len(self._open) > _OPEN:
                    self._add_up(wait=False)

    def seconds(self) -> float:
        """Return the sum in seconds. On a GPU the host waits for open intervals."""
        self._add_up(wait=True)
        return self._seconds

    def _add_up(self, *, wait: bool) -> None:
        still: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for start, end in self._open:
            if wait:
                end.synchronize()
            if end.query():  # type: ignore[no-untyped-call]
                self._seconds += start.elapsed_time(end) / 1000
            else:
                still.append((start, end))
        self._open = still
