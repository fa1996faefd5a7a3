"""Threads that end before the interpreter shuts down.

If a thread returns from C++ while the interpreter shuts down, Python unwinds the thread instead of giving it the GIL,
and C++ then calls `std::terminate` (SIGABRT). So every thread that calls PyTorch ends by a message, and is joined at
exit.

The same happens to PyTorch's own threads, which are not joined while an object holds their process group. A thread of
gloo first tells the waiting program that a collective has ended, and then takes the GIL to free the tensors of the
collective. On a busy machine the program may have ended by then. So the exit waits for these threads to rest.
"""

import atexit
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread, current_thread
from time import monotonic, sleep

_FAREWELL = 1.0
"""Maximum seconds that the end of the program waits for the threads. A store that never answers blocks one of them."""

_LOOK = 1e-3
"""Seconds between two looks at the threads of gloo. Meanwhile any thread may take the GIL."""

_STATE = re.compile(r"^(?:State|\w*ctxt_switches):\s*(\w+)", re.MULTILINE)
"""The lines of a thread's status on Linux that change whenever the thread runs."""

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
    """End and join all threads, and let gloo's threads rest. A forked child has none of them, and Python knows it."""
    running = list(_ends.items())
    for _, end in running:
        end()
    deadline = monotonic() + _FAREWELL
    for thread, _ in running:
        thread.join(max(0.0, deadline - monotonic()))
    _let_gloo_rest()


def _let_gloo_rest() -> None:
    """Wait until no thread of gloo runs or waits for the GIL.

    A thread that has slept from one look to the next waits for work or for a peer. A thread that waits for the GIL
    would have woken meanwhile.
    """
    before: list[list[str]] = []
    deadline = monotonic() + _FAREWELL
    while (now := _gloo_threads()) and not (now == before and all(state == "S" for state, *_ in now)):
        if monotonic() > deadline:
            return
        before = now
        sleep(_LOOK)


def _gloo_threads() -> list[list[str]]:
    """Return state and context switches of each thread on which gloo runs collectives; `[]` without /proc."""
    found = []
    for status in sorted(Path("/proc/self/task").glob("*/status")):
        with suppress(OSError):  # the thread has ended
            text = status.read_text()
            if text.startswith("Name:\tpt_gloo_runloop\n"):
                found.append(_STATE.findall(text))
    return found


atexit.register(end_threads)
