"""Queues that run operations in order, overlapped with the computation.

On the CPU a queue is a thread. On a GPU a queue is a stream, plus a thread if messages block the host (gloo). Gathers
and reductions have separate queues, so that they do not wait for each other. Only this file and `program_streams.py`
order streams.
"""

import atexit
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from time import monotonic, sleep
from typing import TypeAlias

import torch

from shardlite.comm.control.failure_reports import FailureReports
from shardlite.comm.control.interrupts import SLOW
from shardlite.comm.control.process import Owner
from shardlite.comm.program_streams import ProgramStreams

_FAREWELL = 2.0
"""Maximum seconds that the end of the program waits for final operations. They may wait for a peer that has ended."""

_HANG_UP = 1.0
"""Maximum seconds that the end of the program waits for blocked threads after their waits were ended."""

_LEFT = 1e-3
"""Seconds between two checks whether any threads are still blocked."""

_POLL = 5e-5
"""Seconds between two queries of a GPU event."""

_MOMENT, _LONGEST = 2e-3, 5e-2
"""Seconds between two checks in a wait: the first interval, and the longest interval."""

Moment = torch.cuda.Event
"""A point in the work of a stream."""


def make_queue(
    name: str,
    device: torch.device,
    program: ProgramStreams,
    *,
    blocking: bool,
    reports: FailureReports | None = None,
    high_priority: bool = True,
) -> "StreamQueue":
    """Return a queue for tensors on `device`.

    Args:
        name: name of the queue's thread.
        device: the device of the tensors.
        program: the streams on which the program computes.
        blocking: whether operations block the host while they wait for messages.
        reports: failure reports, which are checked in long waits of the host.
        high_priority: whether a GPU schedules the operations before the work of other streams.
    """
    if device.type != "cuda":
        return ThreadQueue(name, reports)
    thread = ThreadQueue(name, reports) if blocking else None
    return CudaStreamQueue(device, thread, program, high_priority=high_priority)


class HostWork:
    """An operation on the host. A thread of the process `owner` runs it, or the caller if there is no `owner`."""

    def __init__(self, reports: FailureReports | None = None, owner: Owner | None = None) -> None:
        self._owner = owner
        self._reports = reports
        self.succeeded = False
        """Whether the operation has succeeded, so that its results may be used without a wait."""

        self._is_over = False
        self._error: BaseException | None = None
        self._running = Lock()  # held until the operation has ended; `Event` and `Future` take several times as long
        self._running.acquire()

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait for the results, or raise the operation's error. Call `meanwhile` once if the wait is long."""
        if not self._is_over:
            self._check_owner()
            if meanwhile is None or not self.ends_within(_LONGEST):
                if meanwhile is not None:
                    meanwhile()
                while not self.ends_within(SLOW):
                    self._check()
        self._raise_error()

    def done(self) -> bool:
        """Return whether the operation has succeeded or failed."""
        return self._is_over

    def wait_unless(self, obsolete: Callable[[], bool]) -> bool:
        """Wait until the operation has ended or `obsolete()` returns true. Return whether the results may be used."""
        self._check_owner()
        slow = monotonic() + SLOW
        for pause in _pauses():
            if self.ends_within(pause):
                break
            if obsolete():
                return False
            if monotonic() > slow:
                slow = monotonic() + SLOW
                self._check()
        self._raise_error()
        return True

    def _check_owner(self) -> None:
        """Raise an error in a forked child, where operations in flight never end."""
        if self._owner is not None and not self._is_over:
            self._owner.check()

    def ends_within(self, seconds: float) -> bool:
        """Wait at most `seconds` until the operation has ended. Return whether the operation has ended."""
        if not self._is_over:
            if not self._running.acquire(timeout=seconds):
                return False
            self._running.release()  # for other waiting threads
        if self._reports is not None:
            self._reports.record_progress()
        return True

    def _check(self) -> None:
        """Raise an error if this rank will never continue."""
        reports = self._reports
        if reports is not None and not self._is_over and (why := reports.deadlock_reason()):
            reports.abort_wait(why)

    def _raise_error(self) -> None:
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # otherwise the error, its traceback and this frame would be a reference cycle

    def __enter__(self) -> None:
        """Run the operation in this block. The block's success or error becomes the result of the work."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        self._error = error
        self._is_over, self.succeeded = True, error is None  # before waiting threads continue
        self._running.release()
        return True


FINISHED = HostWork()
"""An operation that has succeeded. All operations that the host launches on a stream without an error share it."""

with FINISHED:
    pass

_Job = tuple[HostWork, tuple[Callable[[], None], ...]]


class ThreadQueue:
    """Runs operations on a separate thread, which ends after the final operation of a deleted queue.

    The thread is a daemon, because a process that ends by an error must not wait for a peer that will never answer.
    """

    on_stream = False
    """Whether operations run on a stream of a GPU. The host may then free or reuse their memory in stream order."""

    def __init__(self, name: str, reports: FailureReports | None = None, *, farewell: float = _FAREWELL) -> None:
        """Start the thread. At the end of the program, its final operation has at most `farewell` seconds to end."""
        self._owner = Owner()
        self._reports = reports
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        # Neither the thread nor the finalizer may reference `self`, which would otherwise never be collected.
        thread = Thread(target=_work_off, args=(self._queue,), name=f"shardlite-{name}", daemon=True)
        thread.start()
        _threads[thread] = self._queue, reports, farewell
        # The thread is not joined here: a finalizer runs inside any code, which may hold a lock that the thread needs.
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, *operations: Callable[[], None], behind: Moment | None = None) -> HostWork:
        """Queue `operations`. They start after earlier operations. If an operation fails, the rest are not run.

        Raises:
            CommError: this is a forked child, which does not have the thread.
        """
        del behind
        self._owner.check()
        work = HostWork(self._reports, self._owner)
        self._queue.put((work, operations))
        return work

    def moment(self) -> Moment | None:
        """Return `None`, because the caller's computation on the CPU has already ended."""
        return None

    def stream(self, behind: Moment | None = None) -> AbstractContextManager[object]:
        """Return a context manager without an effect."""
        del behind
        return nullcontext()


_threads: dict[Thread, tuple["SimpleQueue[_Job | None]", FailureReports | None, float]] = {}
"""The threads of all queues until they end, with their jobs, failure reports and farewells."""


def _work_off(queue: "SimpleQueue[_Job | None]") -> None:
    try:
        with torch.no_grad():
            while (job := queue.get()) is not None:
                work, operations = job
                with work:
                    for operation in operations:
                        operation()
                    del operation, operations, job  # these may hold memory that the caller measures afterwards
                del work
    finally:
        _threads.pop(current_thread(), None)


def end_queues() -> None:
    """Stop and join the threads of all queues, because the interpreter must not shut down while they run."""
    threads = list(_threads.items())
    for _, (queue, _, _) in threads:
        queue.put(None)
    began = monotonic()
    for thread, (_, reports, farewell) in threads:
        if reports is None or not reports.failed:
            thread.join(max(0.0, began + farewell - monotonic()))
    end_waits()
    deadline = monotonic() + _FAREWELL
    for thread, _ in threads:
        thread.join(max(0.0, deadline - monotonic()))


def _after_fork() -> None:
    """Forget threads that only the parent has."""
    _threads.clear()
    _hang_ups.clear()


_hang_ups: dict[object, Callable[[], None]] = {}
"""Functions that end the waits of currently blocked threads."""


@contextmanager
def blocked(hang_up: Callable[[], None] | None) -> Iterator[None]:
    """While the `with` block runs, mark this thread as blocked in a wait. `hang_up` ends the wait."""
    mark = object()
    if hang_up is not None:
        _hang_ups[mark] = hang_up
    try:
        yield
    finally:
        _hang_ups.pop(mark, None)


def end_waits() -> None:
    """End the waits of all blocked threads, at the end of the program.

    Otherwise a thread could return from a backend after the interpreter has shut down, which crashes the process
    (SIGABRT).
    """
    deadline = monotonic() + _HANG_UP
    for hang_up in list(_hang_ups.values()):
        hang_up()
    while _hang_ups and monotonic() < deadline:
        sleep(_LEFT)


atexit.register(end_queues)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class CudaStreamQueue:
    """Runs operations on a separate stream. If launches must wait for messages, `thread` launches the operations.

    Memory is safe without `record_stream`. The tensors of an operation are allocated on the caller's stream, and the
    operation waits for the work of this stream. The caller frees or reuses the tensors only after `wait()`, which
    orders the caller's stream after the operation. If the caller is deleted with operations in flight, the caller's
    stream waits for these operations when the queue is freed. Memory that is allocated in `stream()` belongs to the
    queue's stream, so operations may still use the memory after the caller has freed it.
    """

    on_stream = True

    def __init__(
        self, device: torch.device, thread: ThreadQueue | None, program: ProgramStreams, *, high_priority: bool = True
    ) -> None:
        self._device = device
        self._thread = thread
        self._stream = torch.cuda.Stream(device, priority=-int(high_priority))  # type: ignore[no-untyped-call]
        self.has_thread = thread is not None
        """Whether a thread launches the operations."""

        self._free: list[Moment] = []
        """Events for which no operation waits from now on. Recording one again does not change former waits for it."""

        # At the end of the queue, the home stream waits for this stream, before the model's memory is freed.
        weakref.finalize(self, program.wait_outside_captures, self._stream).atexit = False

    def submit(self, *operations: Callable[[], None], behind: Moment | None = None) -> "_StreamWork":
        """Queue `operations`. They start after earlier operations, and after the work of the current stream.

        `behind` is the moment in the current stream's work that the operations wait for. By default, they wait for all
        work submitted until now.
        """
        begin, end = behind or self.event(), self.event()
        if behind is None:
            torch.cuda.current_stream(self._device).record_event(begin)

        def on_stream() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
                self._stream.wait_event(begin)
                if behind is None:
                    self._free.append(begin)
                for operation in operations:
                    operation()
                end.record(self._stream)

        if self._thread is not None:
            return _StreamWork(self._device, end, self._thread.submit(on_stream), self._free)
        host = FINISHED
        try:
            on_stream()
        except BaseException:
            host = HostWork()
            with host:  # stores the error in the work, as a thread does
                raise
        return _StreamWork(self._device, end, host, self._free)

    def event(self) -> Moment:
        """Return an event to record, one of an earlier operation if possible."""
        return self._free.pop() if self._free else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def moment(self) -> Moment:
        """Return the end of the work submitted to the current stream until now."""
        moment: Moment = torch.cuda.current_stream(self._device).record_event()
        return moment

    @contextmanager
    def stream(self, behind: Moment | None = None) -> Iterator[None]:
        """Make the queue's stream current within the block, after the moment `behind` of the caller's computation."""
        if behind is None and torch.cuda.is_current_stream_capturing():
            behind = self.moment()  # memory of a captured graph must be allocated on captured streams
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if behind is not None:
                self._stream.wait_event(behind)
            yield


class _StreamWork:
    """An operation that is done when a stream reaches the event `end`. The operation `host` records the event."""

    succeeded = False
    """As in `HostWork`. The results must not be used without a wait, which orders streams."""

    def __init__(self, device: torch.device, end: Moment, host: HostWork, free: list[Moment]) -> None:
        """Initialize. When nothing refers to this work any more, `end` is added to the events `free`."""
        self._device = device
        self._end = end
        self._host = host
        self._free = free

    def __del__(self) -> None:
        if self._host is FINISHED or self._host.done():  # otherwise a thread will still record the event
            self._free.append(self._end)

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Let the current stream wait for the results, or raise the operation's error.

        The host waits until the operation was launched. In a long wait, the host calls `meanwhile` once.
        """
        if self._host is not FINISHED:
            self._host.wait(meanwhile)
        torch.cuda.current_stream(self._device).wait_event(self._end)

    def at(self, moment: Moment) -> "_StreamWork":
        """Return the part of this work that ends at a moment of the stream. The host has launched the whole work."""
        return _StreamWork(self._device, moment, self._host, self._free)

    def done(self) -> bool:
        """Return whether the operation has ended."""
        return self._host.done() and bool(self._end.query())  # type: ignore[no-untyped-call]

    def wait_unless(self, obsolete: Callable[[], bool]) -> bool:
        """Wait on the host until the operation has ended or `obsolete()` is true. Return whether results may be used.

        A wait of the current stream would not suffice. Such a wait could not end early, and would block gathers that a
        peer needs first.
        """
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
    """Yield the seconds between checks of a wait."""
    pause = _MOMENT
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST)


Work: TypeAlias = HostWork | _StreamWork
"""One operation in flight. The memory that the operation uses must not be touched before `wait()` returns."""

StreamQueue: TypeAlias = ThreadQueue | CudaStreamQueue
"""A queue that runs operations one after the other."""


def submit_in_turn(
    queue: StreamQueue, first: Callable[[], None], then: Callable[[], None], *, behind: Moment | None = None
) -> tuple[Work, Work]:
    """Queue two operations, and return the work of each. If the host launches them at once, they are submitted once."""
    if not isinstance(queue, CudaStreamQueue) or queue.has_thread:
        return queue.submit(first, behind=behind), queue.submit(then, behind=behind)
    between = queue.event()
    both = queue.submit(first, between.record, then, behind=behind)
    return both.at(between), both
