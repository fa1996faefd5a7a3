"""What `torch.distributed` works on, and its failures in our words. For the transports over process groups."""

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import current_thread, main_thread
from time import monotonic, sleep

import torch.distributed as dist

from shardlite.comm.control.failure_reports import Notes, watching
from shardlite.comm.control.interrupts import SLOW
from shardlite.comm.control.worker import Worker
from shardlite.comm.transport.base import Message
from shardlite.errors import CommError, LayoutError


@dataclass(frozen=True)
class Posted:
    """Messages with what an error has to say: who exchanges what with whom, under which tag, within what time.

    Without a `timeout` it is the process group that decides how long a message may take.
    """

    rank: int
    messages: Sequence[Message]
    tag: int
    timeout: timedelta | None = None

    def failed(self, why: str) -> CommError:
        """Return the error of these messages."""
        doing = " and ".join(dict.fromkeys(message.route for message in self.messages))
        nbytes = sum(message.tensor.nbytes for message in self.messages)
        limit = "" if self.timeout is None else f", timeout {self.timeout.total_seconds():g} s"
        return CommError(f"rank {self.rank} {doing} failed: {nbytes} bytes, tag {self.tag}{limit}. {why}")

    def refused(self, error: RuntimeError) -> CommError:
        """Return what the backend has raised in our words."""
        return self.failed(f"The peer died, is late or does another operation. The backend says: {error}")


@dataclass(frozen=True)
class InFlight:
    """Messages that the backend is working on; holds their tensors, because gloo keeps only the addresses."""

    works: Sequence[dist.Work]
    posted: Posted
    hang_up: Callable[[], None] | None = None
    """Closes the connections, so that all waits over them end."""

    def wait(self) -> None:
        """Wait for all of them, each for at most the timeout.

        The backend blocks the thread that waits in it. That of the program can be interrupted, and looks at whether
        other ranks have failed: so it has another one wait there.
        """
        watch = watching()
        if watch is None or self.posted.timeout is None or current_thread() is not main_thread():
            self._wait(watch)
            return
        waiting = _waiter().submit(partial(self._wait, watch))
        while True:
            try:
                waiting.result(SLOW)
                return watch.goes_on()
            except FutureTimeoutError:
                if not waiting.done() and (why := watch.hopeless()):
                    raise self.posted.failed(why) from None

    def _wait(self, watch: Notes | None) -> None:
        limit = () if self.posted.timeout is None else (self.posted.timeout,)
        mark = object()
        if self.hang_up is not None:
            _waits[mark] = self.hang_up
        try:
            for work in self.works:
                if not work.wait(*limit):
                    raise RuntimeError("the operation was aborted")
                if watch is not None:
                    watch.goes_on()
        except RuntimeError as error:
            raise self.posted.refused(error) from error
        finally:
            _waits.pop(mark, None)


def joined(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default one for `None`.

    Raises:
        LayoutError: this process is not a member.
    """
    if dist.get_rank(group) < 0:
        raise LayoutError("this process is not a member of the process group that it was given")
    everyone = dist.group.WORLD
    assert everyone is not None, "the rank was asked for above"
    return everyone if group is None else group


_waits: dict[object, Callable[[], None]] = {}
"""How to end each wait that blocks a thread now."""

_FAREWELL = 1.0
"""Seconds in which threads leave waits that have ended."""

_LOOK = 1e-3
"""Seconds between two looks at whether they have."""


def end_waits() -> None:
    """End all waits that block a thread, at the end of the program.

    A thread that comes back from the backend when the interpreter is gone would take the process down (SIGABRT).
    """
    deadline = monotonic() + _FAREWELL
    for hang_up in list(_waits.values()):
        hang_up()
    while _waits and monotonic() < deadline:
        sleep(_LOOK)


weakref.finalize(Posted, end_waits)  # when the interpreter ends, after lanes, which were made later, have waited


_waiters = [Worker("shardlite-waiter")]


def _waiter() -> Worker:
    """Return who waits in the backend for the thread of the program: a new one, if the last one is still at it."""
    if not _waiters[0].is_idle:
        _waiters[0] = Worker("shardlite-waiter")
    return _waiters[0]


def _forget() -> None:
    """Forget threads and waits in a forked child: they are its parent's."""
    _waits.clear()
    _waiters[0] = Worker("shardlite-waiter")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
