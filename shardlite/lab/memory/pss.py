"""Sample the proportional set size of some processes together, from outside: `python pss.py PID...`.

A page that `n` processes share counts as `1/n` in each, so the sum over the processes is their memory together. The
kernel keeps no maximum of this size, so this program reads the size repeatedly. The program imports only small modules.

The program answers each line of its input with `peak now when apart`: the peak since the previous line and the current
size, both in bytes, the moment of the peak in nanoseconds of the monotonic clock, which all processes share, and the
sum of the processes' own peaks, which are at different moments.
"""

import os
import select
import sys
import time

_PAUSE = 0.002
"""Seconds between two samples. A sample takes a few milliseconds."""


def _read(descriptor: int) -> int:
    """Return the size of one process in bytes."""
    lines = os.pread(descriptor, 4096, 0).splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(b"Pss:"))


def _sample(processes: list[str]) -> None:
    """Sample until the input or a process ends."""
    descriptors = [os.open(f"/proc/{process}/smaps_rollup", os.O_RDONLY) for process in processes]
    peak = when = 0
    apart = [0] * len(descriptors)
    while True:
        before = time.monotonic_ns()
        try:
            each = [*map(_read, descriptors)]
        except ProcessLookupError:
            return
        now, apart = sum(each), [*map(max, apart, each)]
        if now > peak:
            peak, when = now, (before + time.monotonic_ns()) // 2
        if select.select([sys.stdin], [], [], _PAUSE)[0]:
            if not sys.stdin.readline():
                return
            print(peak, now, when, sum(apart), flush=True)
            peak, apart = 0, each


if __name__ == "__main__":
    _sample(sys.argv[1:])
