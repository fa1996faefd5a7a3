"""A thread for calls that may never return, so that their callers need not wait for them."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple["Future[Any]", Callable[[], Any]]


class Worker:
    """Runs calls one after the other, on a thread that the first one starts. The thread ends with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._latest: Future[Any] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all calls have returned."""
        return self._latest is None or self._latest.done()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Run `call` when the calls before it have returned."""
        future: Future[T] = Future()
        with self._lock:
            if self._thread is None:
                # A daemon: a process must not wait for a call that never returns.
                self._thread = Thread(target=_work_off, args=(self._jobs,), name=self._name, daemon=True)
                self._thread.start()
                weakref.finalize(self, self._jobs.put, None).atexit = False
        self._latest = future
        self._jobs.put((future, call))
        return future


def _work_off(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        future, call = job
        del job
        try:
            result = call()
        except BaseException as error:
            del call
            future.set_exception(error)
        else:
            del call  # who waited for the result may measure memory: what only the call held is gone
            future.set_result(result)
            del result
        del future
