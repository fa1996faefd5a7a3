"""Waits of the program in collectives of `torch.distributed`, such as a barrier that one rank never reaches.

    rank 0   if rank == 0: validate(model) ... waits for rank 1 in a gather
    others   dist.barrier() .................. wait for rank 0, outside of this library

A thread looks once per second at the function that the program's thread is in. The thread publishes the wait only if
this function is a collective of all ranks of a model, and was the same a second ago. So a steady step costs one look
per second, and no message. A rank that computes, reads data or writes a file is in no collective, so other ranks wait
for it.
"""

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread
from types import FrameType

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardlite.comm.control.frames import frame_of
from shardlite.comm.control.interrupts import line_of_program
from shardlite.comm.control.threads import start_thread
from shardlite.errors import ShardLiteError

log = logging.getLogger("shardlite")

PERIOD = 1.0
"""Seconds between two looks."""

_COLLECTIVES = ("barrier", "monitored_barrier", "all_", "reduce", "broadcast", "gather", "scatter")
"""First words of the collectives."""

_ENDS_TOGETHER = ("barrier", "monitored_barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""First words of the collectives that end on no rank before all ranks have called them."""

_ENDS_LAST = ("gather", "reduce")
"""First words of the other collectives that do not end on their destination before all ranks have called them."""

NAMED = "torch.distributed."
"""First words of the names of collectives."""

_looks: "list[weakref.WeakMethod[Callable[[], None]]]" = []
"""The methods that are called once per `PERIOD`."""

_starting, _end = Lock(), Event()
_thread: Thread | None = None


def collective_of(thread: int, ranks: frozenset[int]) -> tuple[str, str]:
    """Return the collective of exactly `ranks` that a thread waits in, and the line that called it, or two `""`."""
    frame = frame_of(thread)
    if frame is None or frame.f_code.co_filename != distributed_c10d.__file__:
        return "", ""
    name = frame.f_code.co_name
    with suppress(Exception):  # the frame runs meanwhile
        if (
            name.lstrip("_").startswith(_COLLECTIVES)
            and {*dist.get_process_group_ranks(frame.f_locals["group"])} == ranks
        ):
            return f"{NAMED}{name}", f", called in {_line_of_program(frame)}"
    return "", ""


def may_end_alone(operation: str) -> bool:
    """Return whether the operation is a collective that ends on a rank although other ranks have not called it."""
    return operation.startswith(NAMED) and not operation.removeprefix(NAMED).lstrip("_").startswith(_ENDS_TOGETHER)


def needs_all(operation: str) -> bool:
    """Return whether the operation is a collective whose destination waits until all ranks have called it."""
    return operation.startswith(NAMED) and operation.removeprefix(NAMED).startswith(_ENDS_LAST)


def collectives_started(ranks: frozenset[int]) -> int:
    """Return the number of collectives that this rank has started over process groups of exactly `ranks`."""
    started = 0
    for group in list(distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # the backend does not count
            if {*dist.get_process_group_ranks(group)} == ranks:
                started += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return started


def _line_of_program(frame: FrameType | None) -> str:
    found = line_of_program(frame)
    return "" if found is None else f"{found.f_code.co_filename}, line {found.f_lineno}"


def watch_collectives(look: Callable[[], None]) -> None:
    """Call the bound method `look` once per `PERIOD`, on another thread, while its object exists."""
    global _thread
    with _starting:
        _looks.append(weakref.WeakMethod(look))
        if _thread is None or not _thread.is_alive():
            _thread = start_thread("collectives", _watch, _end.set)


def _watch() -> None:
    while not _end.wait(PERIOD):
        _look()


def _look() -> None:
    """Look once. No reference to an object is kept afterwards, so that a deleted model's memory is freed."""
    with _starting:
        _looks[:] = [each for each in _looks if each() is not None]
        methods = [each() for each in _looks]
    for look in methods:
        if look is not None:
            try:
                look()
            except (RuntimeError, OSError, ShardLiteError) as error:  # the store may have ended
                log.debug("the program's collective is not published: %s", error)
            except Exception:
                log.exception("the program's collective is not published")
