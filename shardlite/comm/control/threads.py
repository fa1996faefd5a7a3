"""Threads that end before the interpreter shuts down.

A thread that returns from C++ while the interpreter shuts down is not given the GIL but unwound, and C++ answers that
with `std::terminate` (SIGABRT). So every thread that calls PyTorch ends by a message, and is joined at exit.
"""

import atexit
from collections.abc import Callable
from threading import Thread, current_thread
from time import monotonic

_FAREWELL = 1.0
"""Maximum seconds that the end of the program waits for the threads. A store that never answers blocks one of them."""

_ends: dict[Thread, Callable[[], object]] = {}
"""The threads that run, with the messages that end them."""


def start_thread(name: str, work: Callable[[], None], end: Callable[[], object]) -> Thread:
    """Run `work` on a new thread, to which `end` sends the message to return.

    The thread is a daemon, because the process must not wait for a peer that will never answer.
    """
    thread = Thread(target=_run, args=(work,), name=f"shardlite-{name}", daemon=True)
    _ends[thread] = end
    thread.start()
    return thread


def _run(work: Callable[[], None]) -> None:
    try:
        work()
    finally:
        _ends.pop(current_thread(), None)


def end_threads() -> None:
    """End and join all threads. A forked child has none of them, and Python knows it."""
    running = list(_ends.items())
    for _, end in running:
        end()
    deadline = monotonic() + _FAREWELL
    for thread, _ in running:
        thread.join(max(0.0, deadline - monotonic()))


atexit.register(end_threads)
