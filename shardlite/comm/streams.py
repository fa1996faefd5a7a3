"""Operations beside the computation. A stream queue runs them in order.

On the CPU it is a thread. On a GPU it is a stream, and a thread as well if messages block the host (gloo). Gathers and
reductions have a queue each, so that neither ever waits for the other. Only this file orders streams.
"""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from time import monotonic, sleep
from typing import Protocol

import torch

from shardlite.comm.control.failure_reports import FailureReports
from shardlite.comm.control.interrupts import SLOW
from shardlite.comm.control.process import Owner
from shardlite.comm.transport.process_group import end_waits

_FAREWELL = 2.0
"""Seconds that the end of a queue waits for its last operation, which may be waiting for a peer that is gone."""


_POLL = 5e-5
"""Seconds between two looks at a GPU."""

_MOMENT, _LONGEST = 2e-3, 5e-2
"""Seconds between the first looks at what is waited for, and between later ones."""


class Work(Protocol):
    """One operation in flight, and the memory that it uses: do not touch that before `wait()`."""

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Let what follows see the results, or raise what went wrong. On a GPU only the stream waits, not the host.

        A host that waits for long calls `meanwhile`, once.
        """

    def done(self) -> bool:
        """Whether `wait()` has nothing to wait for."""

    def wait_unless(self, obsolete: Callable[[], bool]) -> bool:
        """Wait, the host too, and return whether what follows may use the results: not if it became `obsolete`."""


class StreamQueue(Protocol):
    """Runs operations one after the other."""

    def submit(self, operation: Callable[[], None]) -> Work:
        """Queue `operation`; it starts when those before it are done, and what the caller has computed so far."""


def make_queue(name: str, device: torch.device, *, blocking: bool, watch: FailureReports | None = None) -> StreamQueue:
    """Return a queue for tensors on `device`; `blocking` says that operations make the host wait for messages.

    `watch` is asked about waits of the host that are long.
    """
    if device.type != "cuda":
        return ThreadQueue(name, watch)
    return CudaStreamQueue(device, ThreadQueue(name, watch) if blocking else None)


class _HostWork:
    """An operation that is done when a thread has done it."""

    def __init__(self, watch: FailureReports | None = None, owner: Owner | None = None) -> None:
        self._owner = owner or Owner()
        self._outcome: Future[None] = Future()
        self._is_over = False
        self._watch = watch

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        self._check_owner()
        if meanwhile is not None and not self._ends_within(_LONGEST):
            meanwhile()
        watch = self._watch
        while watch is not None and not self._ends_within(SLOW):
            self._check(watch)
        self._outcome.result()

    def done(self) -> bool:
        return self._is_over  # a future would take a lock to say so

    def wait_unless(self, obsolete: Callable[[], bool]) -> bool:
        self._check_owner()
        slow = monotonic() + SLOW
        for pause in _pauses():
            if self._ends_within(pause):
                break
            if obsolete():
                return False
            if self._watch is not None and monotonic() > slow:
                slow = monotonic() + SLOW
                self._check(self._watch)
        self._outcome.result()
        return True

    def _check_owner(self) -> None:
        """Raise in a forked child, where nothing will end that is under way."""
        if not self._is_over:
            self._owner.check()

    def _ends_within(self, seconds: float) -> bool:
        """Wait so long at most, for success or failure."""
        try:
            self._outcome.result(seconds)
        except FutureTimeoutError:
            return self._is_over  # it may be the operation's own
        except BaseException:
            if not self._is_over:  # Ctrl-C
                raise
        if self._watch is not None:
            self._watch.goes_on()
        return True

    def _check(self, watch: FailureReports) -> None:
        """Raise if this rank will never go on."""
        if not self._is_over and (why := watch.hopeless()):
            watch.give_up(why)

    def __enter__(self) -> None:
        """Run the operation in this block; its outcome is the work's."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        self._is_over = True  # before anybody who waits goes on
        if error is None:
            self._outcome.set_result(None)
        else:
            self._outcome.set_exception(error)
        return True


class ThreadQueue:
    """Runs operations on a thread of its own.

    The thread ends with the queue. It is a daemon: a process that dies of an error must not wait for a peer that will
    never answer.
    """

    def __init__(self, name: str, watch: FailureReports | None = None) -> None:
        self._owner = Owner()
        self._watch = watch
        self._queue: SimpleQueue[tuple[_HostWork, Callable[[], None]] | None] = SimpleQueue()
        # Neither the thread nor the finalizer holds the queue, or a forgotten queue would never be collected.
        thread = Thread(target=_work_off, args=(self._queue,), name=f"shardlite-{name}", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._queue, thread, watch)

    def submit(self, operation: Callable[[], None]) -> Work:
        """Queue `operation`; it starts when those before it are done.

        Raises:
            CommError: this is a forked child, which has no such thread.
        """
        self._owner.check()
        work = _HostWork(self._watch, self._owner)
        self._queue.put((work, operation))
        return work


def _end(
    queue: "SimpleQueue[tuple[_HostWork, Callable[[], None]] | None]", thread: Thread, watch: FailureReports | None
) -> None:
    """Let the thread finish, and see it go: the interpreter must not be taken down under a running thread."""
    queue.put(None)
    if thread is current_thread():
        return
    if watch is None or not watch.failed:
        thread.join(_FAREWELL)
    if thread.is_alive() and not main_thread().is_alive():  # the interpreter ends
        end_waits()
        thread.join(_FAREWELL)


def _work_off(queue: "SimpleQueue[tuple[_HostWork, Callable[[], None]] | None]") -> None:
    with torch.no_grad():
        while (job := queue.get()) is not None:
            work, operation = job
            with work:
                operation()
            del work, operation, job  # or the last operation's buffers would live until the next one


class CudaStreamQueue:
    """Runs operations on a stream of its own; `thread` hands them to the GPU where that takes waiting for messages.

    Memory is safe without further marks. A tensor that an operation uses was allocated on the caller's stream, whose
    work so far the operation waits for; and the caller frees or reuses it only after `wait()`, from when on its stream
    is behind the operation.
    """

    def __init__(self, device: torch.device, thread: ThreadQueue | None) -> None:
        self._device = device
        self._thread = thread
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def submit(self, operation: Callable[[], None]) -> Work:
        """Queue `operation` behind what the current stream has been given so far."""
        begin = torch.cuda.current_stream(self._device).record_event()
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]

        def on_stream() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
                self._stream.wait_event(begin)
                operation()
                end.record(self._stream)

        if self._thread is not None:
            return _StreamWork(self._device, end, self._thread.submit(on_stream))
        host = _HostWork()
        with host:  # an error is the work's, as on a thread
            on_stream()
        return _StreamWork(self._device, end, host)


class _StreamWork:
    """An operation that is done when a stream has come to an event, which `host` records, or has recorded."""

    def __init__(self, device: torch.device, end: torch.cuda.Event, host: Work) -> None:
        self._device = device
        self._end = end
        self._host = host

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        self._host.wait(meanwhile)
        torch.cuda.current_stream(self._device).wait_event(self._end)

    def done(self) -> bool:
        return self._host.done() and bool(self._end.query())  # type: ignore[no-untyped-call]

    def wait_unless(self, obsolete: Callable[[], bool]) -> bool:
        """Wait on the host: a stream would wait for good, and with it the gathers that a peer may need first."""
        if not self._host.wait_unless(obsolete):
            return False
        for pause in _pauses():
            look = monotonic() + pause
            while not (over := bool(self._end.query())) and monotonic() < look:  # type: ignore[no-untyped-call]
                sleep(_POLL)
            if over:
                break
            if obsolete():
                return False
        self.wait()
        return True


def _pauses() -> Iterator[float]:
    """Yield the seconds between one look and the next."""
    pause = _MOMENT
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST)
