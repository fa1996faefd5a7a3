"""Whole models on in-process ranks: each rank is a thread that has a `torch.distributed` of its own.

A body sees what it sees on a process of the cluster: a process group, the default generator seeded with 0, `warnings`,
`dist.new_group` and `DeviceMesh`. It costs no process, so any world size is cheap.

Ranks take turns. One of them runs, until it waits for another: in a collective, for a message, for an operation in
flight, or in `time.sleep`. What a process has only one of (the state of the default generator, the filters of
`warnings`) is put away with the rank that waits, and comes back with it. So a body may construct modules, draw dropout
and catch warnings as on a process of its own, and most interleavings are the same in each run. Lanes run beside.

    rank 0   init --- agree          forward --- wait for a gather        ...
    rank 1                init --- agree         ------           forward ...

A body has no process of its own, so it may not: replace attributes of modules or classes, change the
environment, set PyTorch's global modes (default dtype, deterministic algorithms), register global hooks, expect a
warning that C++ gives once per process, count objects or memory of the whole process, or wait for another rank in any
other way than those above. Such bodies, and the parity of every subject over real processes, are the cluster's.
"""

import os
import secrets
import sys
import threading
import time
import traceback
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from shardlite.comm.streams import HostWork
from tests.support.patience import seconds

TIMEOUT = seconds(240)
"""Seconds for one call. Nothing waits for so long unless ranks wait for each other for good."""

GRACE = seconds(20)
"""Seconds for the others to end after a rank has failed, or a call has hung."""


class RankError(AssertionError):
    """A body failed on a rank; the cause is what it raised, with its traceback."""


def run_in_process(body: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Call `body(group, *args, **kwargs)` on `world_size` in-process ranks and return their results by rank.

    Raises:
        RankError: a rank failed (the error is about the first), or all hang. Ranks that wait for one that has failed
            fail, too.
    """
    world = _World(world_size)
    world.run(body, args, kwargs)
    if world.failed:
        rank, error = world.failed[0]
        raise RankError(f"rank {rank} of {world_size}: {type(error).__name__}: {error}") from error
    return world.results


def check_in_process(body: Callable[..., None], world_size: int, *args: Any, **kwargs: Any) -> None:
    """Like `run_in_process`, for a body that asserts for itself on every rank, and so returns nothing."""
    assert run_in_process(body, world_size, *args, **kwargs) == [None] * world_size


def failures_in_process(
    body: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any
) -> list[tuple[str, str] | None]:
    """Like `run_in_process`, for a body that should fail: return `(type name, message)` by rank, else `None`."""
    world = _World(world_size)
    world.run(body, args, kwargs)
    failed = dict(reversed(world.failed))
    return [(type(failed[r]).__name__, str(failed[r])) if r in failed else None for r in range(world_size)]


# ---- ranks ----------------------------------------------------------------------------------------------------------


_here = threading.local()
"""`rank`: the `_Rank` that a thread is, if it is one."""


class _World:
    """The ranks of one call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()  # held by the rank that runs
        self.changed = threading.Condition()
        self.meetings: dict[bytes, _Meeting] = {}
        self.results: list[Any] = [None] * size
        self.failed: list[tuple[int, BaseException]] = []
        """Ranks and what they raised, the first one first."""

        self.ended = ""
        """Why there is nothing to wait for any more."""

        self.over = 0  # ranks
        self.abandoned = False
        """Whether a rank that still runs must not touch the process any more."""

    def run(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start the ranks and wait for them."""
        assert not hasattr(_here, "rank"), "a rank starts no ranks"
        store = dist.HashStore()
        ranks = [_Rank(self, r, store, lambda group: body(group, *args, **kwargs)) for r in range(self.size)]
        threads = [threading.Thread(target=rank.live, name=f"rank {rank.number}", daemon=True) for rank in ranks]
        before = _globals()
        over_groups = mock.patch.dict(os.environ, SHARDLITE_TRANSPORT="p2p")  # shared memory is for processes
        try:
            with _one_distributed_per_thread(), _waits_give_the_turn_away(), over_groups:
                for thread in threads:
                    thread.start()
                self._wait_for(threads)
        finally:
            _set_globals(before)

    def _wait_for(self, threads: list[threading.Thread]) -> None:
        with self.changed:
            in_time = self.changed.wait_for(lambda: self.failed or self.over == self.size, TIMEOUT)
        stacks = _stacks(threads)
        self._end("the time is up" if not in_time else "all ranks have ended")  # for ranks, and what is left on lanes
        deadline = time.monotonic() + GRACE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.abandoned = True
        if not in_time:
            raise RankError(f"ranks wait for each other:\n{stacks}")

    def _end(self, why: str) -> None:
        with self.changed:
            self.ended = self.ended or why
            self.changed.notify_all()

    def fail(self, rank: int, error: BaseException) -> None:
        """Note that a rank has failed; those that wait for it fail, too."""
        with self.changed:
            self.failed.append((rank, error))
        self._end(f"rank {rank} has failed")

    def leave(self) -> None:
        """Note that a rank has come to its end."""
        with self.changed:
            self.over += 1
            self.changed.notify_all()


def _stacks(threads: list[threading.Thread]) -> str:
    """Say where those threads are that run."""
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )


class _Rank:
    """One rank of a call, and the thread that it is."""

    def __init__(self, world: _World, number: int, store: dist.Store, body: Callable[[Any], Any]) -> None:
        self.world = world
        self.number = number
        self._store = store
        self._body = body
        self._cores = torch.get_num_threads()
        filters, *others = _globals()[1:]
        self._globals = (torch.Generator().manual_seed(0).get_state(), list(filters), *others)

    def live(self) -> None:
        """Run the body."""
        _here.rank = self
        torch.set_num_threads(self._cores)  # the first products of a thread else take all cores, and have other bits
        self.resume()
        try:
            dist.init_process_group(_BACKEND, store=self._store, rank=self.number, world_size=self.world.size)
            self.world.results[self.number] = self._body(dist.group.WORLD)
            dist.destroy_process_group()
        except BaseException as error:
            self.world.fail(self.number, error)
        finally:
            self.pause()
            self.world.leave()

    def pause(self) -> None:
        """Let another rank run."""
        self._globals = _globals()
        self.world.turn.release()

    def resume(self) -> None:
        """Wait for the turn."""
        self.world.turn.acquire()
        if self.world.abandoned:
            raise SystemExit
        _set_globals(self._globals)


@contextmanager
def _others_run() -> Iterator[None]:
    """Let other ranks run while this one, if the thread is one, waits inside."""
    rank = getattr(_here, "rank", None)
    if rank is None:
        yield
        return
    rank.pause()
    try:
        yield
    finally:
        rank.resume()


_WARNINGS = ("filters", "showwarning", "_showwarnmsg_impl")  # what `warnings.catch_warnings` replaces


def _globals() -> tuple[Any, ...]:
    """Return what a process has one of, and each rank shall have."""
    return (torch.get_rng_state(), *(getattr(warnings, name) for name in _WARNINGS))


def _set_globals(values: tuple[Any, ...]) -> None:
    torch.set_rng_state(values[0])
    for name, value in zip(_WARNINGS, values[1:], strict=True):
        setattr(warnings, name, value)


@contextmanager
def _waits_give_the_turn_away() -> Iterator[None]:
    """Let a rank that waits for an operation in flight, or for some time, let others run."""
    result, sleep, ends_within = Future.result, time.sleep, HostWork.ends_within

    def result_of(future: Future[Any], timeout: float | None = None) -> Any:
        if future.done():
            return result(future)
        with _others_run():
            return result(future, timeout)

    def wait(seconds: float) -> None:
        with _others_run():
            sleep(seconds)

    def ends(work: HostWork, seconds: float) -> bool:
        if work.done():
            return ends_within(work, seconds)
        with _others_run():
            return ends_within(work, seconds)

    with (
        mock.patch.object(Future, "result", result_of),
        mock.patch.object(time, "sleep", wait),
        mock.patch.object(HostWork, "ends_within", ends),
    ):
        yield


@contextmanager
def _one_distributed_per_thread() -> Iterator[None]:
    """Let each thread have process groups of its own."""
    before = sys.excepthook  # `init_process_group` puts one around it that names the rank
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with mock.patch.object(c10d, "_world", ThreadLocalWorld()):
            yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.excepthook = before


# ---- process groups -------------------------------------------------------------------------------------------------


_BACKEND = "in_process"


class _Meeting:
    """Where the ranks of one process group exchange values."""

    def __init__(self, world: _World, size: int) -> None:
        self._world = world
        self._size = size
        self._rounds: dict[int, dict[int, Any]] = defaultdict(dict)
        self._sent: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)

    def exchange(self, number: int, rank: int, value: Any) -> list[Any]:
        """Return what all ranks give to their exchange of that number."""
        with self._world.changed:
            values = self._rounds[number]
            values[rank] = value
            if len(values) == self._size:
                self._world.changed.notify_all()
                del self._rounds[number]  # all have it
        self._wait(lambda: len(values) == self._size)
        return [values[r] for r in range(self._size)]

    def send(self, route: tuple[int, int, int], tensor: Tensor) -> None:
        with self._world.changed:
            self._sent[route].append(tensor)
            self._world.changed.notify_all()

    def receive(self, route: tuple[int, int, int], timeout: timedelta | None) -> Tensor:
        # Only who sends adds a queue: a collection of garbage in between would let two add one, and lose a message.
        self._wait(lambda: bool(self._sent.get(route)), timeout)
        with self._world.changed:
            return self._sent[route].popleft()

    def _wait(self, done: Callable[[], bool], timeout: timedelta | None = None) -> None:
        world = self._world
        if not done():
            with _others_run(), world.changed:
                world.changed.wait_for(lambda: done() or world.ended, timeout and timeout.total_seconds())
        if not done():
            raise RuntimeError(world.ended or f"nothing came within {timeout}")


class _Group(dist.ProcessGroup):
    """A process group between in-process ranks. Sums are in the order of ranks."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._meeting = meeting
        self._rounds = 0
        self._name = ""

    def getBackendName(self) -> str:  # noqa: N802 (PyTorch's)
        return _BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """PyTorch's own asks for a backend in C++, which there is none of."""
        return self._name

    def _all(self, value: Any) -> list[Any]:
        self._rounds += 1
        return self._meeting.exchange(self._rounds, self.rank(), value)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        for output, value in zip(outputs[0], self._all(inputs[0].clone()), strict=True):
            output.copy_(value)
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        values = torch.stack(self._all(tensors[0].clone()))
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        match operation:
            case dist.ReduceOp.SUM:
                result = sum(values[1:], values[0])
            case dist.ReduceOp.MAX:
                result = values.amax(0)
            case dist.ReduceOp.MIN:
                result = values.amin(0)
            case _:
                raise NotImplementedError(f"{operation} between in-process ranks")
        tensors[0].copy_(result)
        return _Done()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        tensors[0].copy_(self._all(tensors[0].clone())[opts.rootRank])
        return _Done()

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        values = self._all(inputs[0].clone())
        if self.rank() == opts.rootRank:
            for output, value in zip(outputs[0], values, strict=True):
                output.copy_(value)
        return _Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        self._all(None)
        return _Done()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        self._meeting.send((self.rank(), peer, tag), tensors[0].clone())
        return _Done()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        route = (peer, self.rank(), tag)
        return _Done(lambda timeout: tensors[0].copy_(self._meeting.receive(route, timeout)))


class _Done(dist.Work):
    """What is done at once, or when it is waited for."""

    def __init__(self, finish: Callable[[timedelta | None], object] | None = None) -> None:
        super().__init__()
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._finish is not None:
            self._finish(timeout)
            self._finish = None
        return True


def _create(store: dist.Store, rank: int, size: int, _: timedelta) -> _Group:
    """Create this rank's end of a group. All ranks find each other by a name in the store, which is the group's."""
    world = _here.rank.world
    name = store.compare_set("meeting", "", secrets.token_hex(8))
    return _Group(world.meetings.setdefault(name, _Meeting(world, size)), rank, size)


dist.Backend.register_backend(_BACKEND, _create, devices=["cpu"])
