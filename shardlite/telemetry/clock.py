"""Clocks that add up durations on one device. On a GPU they time its streams without synchronizing with them."""

import time

import torch

_OPEN = 256
"""Number of GPU intervals that are kept before the finished ones are added up."""


class Clock:
    """Sum of the durations of `with clock:` blocks: host time or, on a GPU, time of the current stream.

    Blocks of one clock must not overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._start = 0.0
        self._begin: torch.cuda.Event | None = None
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        """Start an interval. None is counted while a CUDA graph is captured: timing events cannot be."""
        if not self._on_gpu:
            self._start = time.perf_counter()
        elif not torch.cuda.is_current_stream_capturing():
            self._begin = _timing_event()

    def __exit__(self, *_: object) -> None:
        """End the interval."""
        if not self._on_gpu:
            self._seconds += time.perf_counter() - self._start
        elif self._begin is not None:
            self._open.append((self._begin, _timing_event()))
            self._begin = None
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


def _timing_event() -> torch.cuda.Event:
    """Record an event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
