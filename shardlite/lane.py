"""Operations in flight. A lane is to the CPU what a stream is to a GPU: one thread that works off a queue in order.

Gathers and reductions have a lane each, so that neither ever waits for the other.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from threading import Thread

import torch


class Flight:
    """One operation in flight. `wait()` returns when it is done, or raises what went wrong in it."""

    def __init__(self) -> None:
        self._outcome: Future[None] = Future()

    def wait(self) -> None:
        """Block until the operation is done."""
        self._outcome.result()

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
        weakref.finalize(self, self._queue.put, None)
        Thread(target=_work_off, args=(self._queue,), name=f"shardlite-{name}", daemon=True).start()

    def submit(self, operation: Callable[[], None]) -> Flight:
        """Queue `operation`; it starts when those before it are done."""
        flight = Flight()
        self._queue.put((flight, operation))
        return flight


def _work_off(queue: "SimpleQueue[tuple[Flight, Callable[[], None]] | None]") -> None:
    with torch.no_grad():
        while (job := queue.get()) is not None:
            flight, operation = job
            flight.run(operation)
            del flight, operation, job  # or the last operation's buffers would live until the next one
