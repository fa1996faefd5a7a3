"""Operations in flight. A lane is to the CPU what a stream is to a GPU: one thread that works off a queue in order.

Gathers and reductions have a lane each, so that neither ever waits for the other.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from threading import Thread, current_thread

import torch

_FAREWELL = 2.0
"""Seconds that the end of a lane waits for its last operation, which may be waiting for a peer that is gone."""


class Flight:
    """One operation in flight. `wait()` returns when it is done, or raises what went wrong in it."""

    def __init__(self) -> None:
        self._outcome: Future[None] = Future()

    def wait(self) -> None:
        """Block until the operation is done."""
        self._outcome.result()

    def done(self) -> bool:
        """Whether `wait()` would return, or raise, at once."""
        return self._outcome.done()

    def wait_up_to(self, seconds: float) -> bool:
        """Block for `seconds` at most; return whether the operation is done."""
        try:
            self._outcome.result(seconds)
        except FutureTimeoutError:
            return False
        return True

    def run(self, operation: Callable[[], None]) -> None:
        """Carry out `operation` and keep its outcome."""
        try:
            operation()
        except BaseException as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(None)


class Lane:
    """Runs operations one after the other on a thread of its own.

    The thread ends with the lane. It is a daemon: a process that dies of an error must not wait for a peer that will
    never answer.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Flight, Callable[[], None]] | None] = SimpleQueue()
        # Neither the thread nor the finalizer holds the lane, or a forgotten lane would never be collected.
        thread = Thread(target=_work_off, args=(self._queue,), name=f"shardlite-{name}", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._queue, thread)

    def submit(self, operation: Callable[[], None]) -> Flight:
        """Queue `operation`; it starts when those before it are done."""
        flight = Flight()
        self._queue.put((flight, operation))
        return flight


def _end(queue: "SimpleQueue[tuple[Flight, Callable[[], None]] | None]", thread: Thread) -> None:
    """Let the thread finish, and see it go: the interpreter must not be taken down under a running thread."""
    queue.put(None)
    if thread is not current_thread():
        thread.join(_FAREWELL)


def _work_off(queue: "SimpleQueue[tuple[Flight, Callable[[], None]] | None]") -> None:
    with torch.no_grad():
        while (job := queue.get()) is not None:
            flight, operation = job
            flight.run(operation)
            del flight, operation, job  # or the last operation's buffers would live until the next one
