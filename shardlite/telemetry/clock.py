"""Clocks that add up durations on one device. On a GPU, a clock times the current stream without synchronizing."""

import time
from collections import deque
from threading import Lock

import torch

_OPEN = 256
"""Number of pending GPU intervals. If more are pending, the intervals that the GPU has finished are added up."""


class Clock:
    """Sum of the durations of `with clock:` blocks, in host time or, on a GPU, in time of the current stream.

    Blocks of one clock must not overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._start = 0.0
        self._begin: torch.cuda.Event | None = None
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._adding = Lock()  # another thread may ask for the sum

    def __enter__(self) -> None:
        """Start an interval. Do nothing during the capture of a CUDA graph, in which events cannot be timed."""
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
                self._add_up()

    def seconds(self) -> float:
        """Return the sum in seconds. On a GPU, the host waits for the ends of pending intervals."""
        for _, end in self._open.copy():
            end.synchronize()
        self._add_up()
        return self._seconds

    def _add_up(self) -> None:
        """Add up the pending intervals, oldest first, until the first that the GPU has not finished.

        Do nothing if another thread, or code that a signal handler has interrupted, is already adding them up.
        """
        if not self._adding.acquire(blocking=False):
            return
        try:
            while self._open and self._open[0][1].query():  # type: ignore[no-untyped-call]
                start, end = self._open.popleft()
                self._seconds += start.elapsed_time(end) / 1000
        finally:
            self._adding.release()


def _timing_event() -> torch.cuda.Event:
    """Record an event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
