"""The store of the process group, through which ranks communicate when they have no transports.

The server of the store is rank 0 or the agent of `torchrun`. If the server is stopped or unreachable, PyTorch's calls
block forever. So PyTorch's calls run on a separate thread, and callers wait for them with a time limit.

    rank 0      sets its entry, waits for the entries of the other ranks, and sets the list of all entries
    others      set their entries, and wait for the list
"""

import json
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shardlite.comm.control.interrupts import SLOW, raise_pending_interrupt
from shardlite.comm.control.process import Owner
from shardlite.comm.control.threads import start_thread
from shardlite.errors import CommError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""Default time that ranks wait for each other."""

_FIRST_LOOK, _LAST_LOOK = 2e-4, 2e-2
"""Seconds between two checks for a key: the first interval, and the longest interval."""

_ANSWER = 1.0
"""Minimum seconds that a check waits for an answer, even near the deadline. The store is slow on a busy machine."""


Watch = Callable[[str], AbstractContextManager[Callable[[], str]]]
"""A function that begins to watch a wait, given its name. Inside the context, the yielded function returns why the wait
will never end, or `""`.
"""

_Call = tuple["Future[Any]", Callable[[Store], Any]]


class BoundedStore:
    """A store whose calls end within a limit. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self.calls: Counter[str] = Counter()
        """Number of `all_gather_json` calls, by the names of group and thread."""

        self._owner = Owner()
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._late: Future[Any] | None = None
        end = partial(self._queue.put, None)
        start_thread("store", partial(_answer, store, self._queue), end)
        weakref.finalize(self, end).atexit = False

    def ask(self, call: Callable[[Store], T], limit: float) -> T:
        """Return `call(store)`.

        Raises:
            CommError: the store did not answer within `limit` seconds, or has not answered an earlier call; the store's
                process has ended; or the current process is a forked child.
        """
        self._owner.check()
        late = self._late
        if late is not None and not late.done():
            raise CommError(_SILENT)
        future: Future[T] = Future()
        self._queue.put((future, call))
        try:
            return future.result(limit)
        except FutureTimeoutError:
            self._late = future
            raise CommError(f"{_SILENT} (waited {limit:g} s)") from None
        except RuntimeError as error:  # the connection is lost
            raise CommError(f"the process that keeps the store of the process group has ended: {error}") from error


def _answer(store: Store, calls: "SimpleQueue[_Call | None]") -> None:
    """Run calls one after the other, on a separate thread."""
    while (each := calls.get()) is not None:
        future, call = each
        try:
            future.set_result(call(store))
        except BaseException as error:
            future.set_exception(error)
        del each, future, call


_stores: "weakref.WeakKeyDictionary[dist.ProcessGroup, BoundedStore]" = weakref.WeakKeyDictionary()


def bounded_store() -> BoundedStore:
    """Return the store of the default process group."""
    world = dist.group.WORLD
    assert world is not None, "there is a process group"
    if world not in _stores:
        _stores[world] = BoundedStore(dist.distributed_c10d._get_default_store())
    return _stores[world]


def all_gather_json(
    group: dist.ProcessGroup | None,
    mine: Any,
    what: str,
    timeout: timedelta = TIMEOUT,
    *,
    thread: str = "",
    watch: Watch = lambda _: nullcontext(str),
) -> list[Any]:
    """Return `mine` of every rank of `group`, converted to JSON types. Collective; `what` names the call in errors.

    Threads that may call this concurrently must pass different names as `thread`. A long wait ends early if `watch`
    finds that it will never end.

    Raises:
        CommError: a rank did not arrive within `timeout`, or made another call, or the store does not answer.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    # The store may still contain the list of an earlier group with the same name. The random number in each
    # entry distinguishes the lists.
    entry = json.dumps([secrets.token_hex(8), what, mine])
    if world_size == 1:
        return [json.loads(entry)[2]]
    everyone = dist.group.WORLD if group is None else group
    assert everyone is not None, "there is a process group"
    store, limit = bounded_store(), timeout.total_seconds()
    place = f"{everyone.group_name}/{thread}" if thread else everyone.group_name
    number = store.calls[place] = store.calls[place] + 1
    where = f"shardlite/{place}"
    entries = [f"{where}/{number}/{each}" for each in range(world_size)]
    deadline = time.monotonic() + limit
    try:
        store.ask(lambda given: given.set(entries[rank], entry), limit)
        with watch(f"{what} ({number})") as never:
            if rank > 0:
                rows = _await(store, lambda given: _list_with(given, f"{where}/{number}", rank, entry), deadline, never)
            else:
                rows = _await(store, lambda given: _all_of(given, entries), deadline, never)
        if rank == 0:
            store.ask(lambda given: given.set(f"{where}/{number}", json.dumps(rows)), limit)
            # All ranks have read the previous list, since they have set their entries for this list.
            store.ask(lambda given: [given.delete_key(key) for key in (*entries, f"{where}/{number - 1}")], limit)
        found = [json.loads(row) for row in rows]
        other = next((each for each, (_, theirs, _) in enumerate(found) if theirs != what), None)
        if other is not None:
            raise CommError(f"rank {other} has called {found[other][1]} instead: every rank must make the same call")
        return [value for _, _, value in found]
    except TimeoutError as others:
        absent = [each for each, key in enumerate(entries) if not store.ask(partial(_all_of, entries=[key]), limit)]
        who = "rank" if len(absent) == 1 else "ranks"
        raise CommError(
            f"{what}: rank {rank} timed out after {limit:g} s waiting for {who} {', '.join(map(str, absent)) or '0'}. "
            f"Every rank of the group must call it; if one is late, pass a longer timeout={others}"
        ) from None
    except CommError as error:
        raise CommError(f"{what}: rank {rank}: {error}") from error


def _await(
    store: BoundedStore, look: Callable[[Store], Sequence[str]], deadline: float, never: Callable[[], str] = str
) -> Sequence[str]:
    """Call `look` repeatedly, and return the first result that is not empty.

    Raises:
        CommError: `never()` has returned a reason.
        TimeoutError: all results before the deadline were empty.
        KeyboardInterrupt: Ctrl-C is pending.
    """
    pause, slow = _FIRST_LOOK, time.monotonic() + SLOW
    while not (rows := store.ask(look, max(_ANSWER, deadline - time.monotonic()))):
        if time.monotonic() > deadline:
            raise TimeoutError
        if time.monotonic() > slow:
            raise_pending_interrupt("an exchange through the store")
            slow = time.monotonic() + SLOW
            if (why := never()) and not (rows := store.ask(look, _ANSWER)):
                raise CommError(why)
            if rows:
                break
        time.sleep(pause)
        pause = min(2 * pause, _LAST_LOOK)
    return rows


def _all_of(store: Store, entries: Sequence[str]) -> Sequence[str]:
    """Return all entries if all are set, else `[]`."""
    return [row.decode() for row in store.multi_get(list(entries))] if store.check(list(entries)) else []


def _list_with(store: Store, key: str, rank: int, entry: str) -> Sequence[str]:
    """Return the list under `key` if the list is set and contains this rank's entry, else `[]`."""
    rows: list[str] = json.loads(store.get(key)) if store.check([key]) else []
    return rows if len(rows) > rank and rows[rank] == entry else []


_SILENT = (
    "the store of the process group does not answer: the process that keeps it, rank 0 or the agent of torchrun, is "
    "stopped or cannot be reached"
)
