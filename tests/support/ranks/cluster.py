"""Ranks for tests: threads for breadth, and clusters of gloo processes that are kept between tests.

The processes are forked from a server that has imported everything, so a cluster that has to be started again costs a
fraction of a second. It is started again when it may be broken: a rank hung, died, or failed alone (the others may be
waiting for it).
"""

import contextlib
import faulthandler
import gc
import io
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.patience import seconds
from tests.support.ranks.forkserver import ForkServer, find, name_of
from tests.support.ranks.frozen import freeze

SMALL, LARGE = 2, 4
_GROUPS = 1000  # more than a body makes
SEED = 0
"""Of each test, in its own process and on each of its ranks."""

GLOO_TIMEOUT = timedelta(seconds=seconds(60))
GRACE = seconds(20)  # that the other ranks get once one has failed
CLOSING = seconds(10)  # that idle ranks get to end by themselves
STARTING = seconds(60)

HANG = "Hang"
"""The kind of failure of a rank that gave no answer."""

_PRINTED = 12_000  # characters of what a rank printed that are shown


class RemoteError(AssertionError):
    """A body failed on a rank of the cluster; the message holds the rank and the remote traceback."""


@dataclass(frozen=True)
class Failure:
    """An exception on a rank. `lost` means that the rank itself is unusable."""

    kind: str
    message: str
    traceback: str
    lost: bool = False
    printed: str = ""
    """What the rank printed during the call."""

    def report(self, rank: int) -> str:
        printed = f"\nrank {rank} printed:\n{self.printed}" if self.printed else ""
        return f"rank {rank}:\n{self.traceback}{printed}"


def run_local(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    delays: Sequence[float] = (),
    timeout: timedelta | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run `body(transport, *args, **kwargs)` on in-process ranks and return their results, or raise the first error."""
    from tests.support.ranks.local_world import local_world

    with ThreadPoolExecutor(world_size) as pool:
        ranks = local_world(world_size, timeout=timeout or timedelta(seconds=seconds(20)), delays=delays)
        return [future.result() for future in [pool.submit(body, rank, *args, **kwargs) for rank in ranks]]


class Cluster:
    """Processes with gloo groups over the first 1, 2, ... of them.

    One world of `SMALL` processes serves the small world sizes, one of `LARGE` all others. Each is started at its first
    use, so that no more processes sit idle than the tests of a run need. Ranks are forked from these servers by turns.
    """

    def __init__(self, *servers: ForkServer, sizes: Sequence[int] = (SMALL, LARGE), timeout: float = 120.0) -> None:
        self.timeout = seconds(timeout)
        self._worlds = [_World(servers, size) for size in sizes]

    def run(self, body: Callable[..., Any], world_size: int, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `body(group, *args, **kwargs)` on the first `world_size` ranks and return their results by rank.

        `body` is a top-level function. Arguments and results are pickled by value. All randomness is seeded alike.

        Raises:
            RemoteError: some rank failed, died or hung.
        """
        return self._results(self._call(_Task("group", body, args, kwargs), world_size))

    def check(self, body: Callable[..., None], world_size: int, /, *args: Any, **kwargs: Any) -> None:
        """Like `run`, for a body that asserts for itself on every rank, and so returns nothing."""
        assert self.run(body, world_size, *args, **kwargs) == [None] * world_size

    def run_transport(self, body: Callable[..., Any], world_size: int, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Like `run`, for a body that sees only a transport: `body(transport, *args, **kwargs)`."""
        return self._results(self._call(_Task("transport", body, args, kwargs), world_size))

    def failures(
        self, body: Callable[..., Any], world_size: int, /, *args: Any, **kwargs: Any
    ) -> list[tuple[str, str] | None]:
        """Like `run`, for a body that should fail: return `(type name, message)` by rank, `None` where it did not.

        Raises:
            RemoteError: some rank hung, which is never expected.
        """
        answers = self._call(_Task("group", body, args, kwargs), world_size)
        if any(isinstance(answer, Failure) and answer.kind == HANG for answer in answers):
            self._results(answers)
        return [(a.kind, a.message) if isinstance(a, Failure) else None for a in answers]

    def close(self) -> None:
        """Stop the processes; the next call starts new ones."""
        for world in self._worlds:
            world.close()

    def _call(self, task: "_Task", world_size: int) -> list[Any]:
        world = next((world for world in self._worlds if world_size <= world.size), None)
        assert world is not None, f"this cluster has {self._worlds[-1].size} ranks"
        try:
            answers = world.exchange(task.encoded(world_size), world_size, self.timeout)
        except BaseException:
            world.kill()  # answers may be left unread
            raise
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        alike = len(failures) == world_size and not any(f.lost or f.kind == "CommError" for f in failures)
        if failures and not alike:
            world.kill()  # a rank may still be waiting, or a gloo connection be closed for good
        return answers

    @staticmethod
    def _results(answers: list[Any]) -> list[Any]:
        failed = [answer.report(rank) for rank, answer in enumerate(answers) if isinstance(answer, Failure)]
        if failed:
            raise RemoteError("\n".join(failed))
        return answers


@dataclass(frozen=True)
class _Task:
    """A body by name, because its module may not be importable in a worker under the name that pytest gave it."""

    takes: str
    body: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def encoded(self, world_size: int) -> bytes:
        arguments = _pack((self.args, self.kwargs))  # read only after the module of the body was imported
        return _pack((self.takes, name_of(self.body), arguments, world_size, next(_numbers)))


_numbers = count(1)
"""Numbers of the tasks of this session."""


class _World:
    """Processes that share one default process group. They start together and end together."""

    def __init__(self, servers: Sequence[ForkServer], size: int) -> None:
        self.size = size
        self._servers = [servers[rank % len(servers)] for rank in range(size)]
        self._workers: list[_Worker] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def exchange(self, task: bytes, world_size: int, timeout: float) -> list[Any]:
        """Run a task on the first `world_size` ranks and return their answers."""
        if not self._workers:
            self._directory = tempfile.TemporaryDirectory(prefix="shardlite-cluster-")
            self._workers = _start_workers(self._servers, Path(self._directory.name))
        ranks = self._workers[:world_size]
        before = [worker.log.stat().st_size for worker in ranks]
        for worker in ranks:
            worker.send(task)
        answers = _collect(ranks, timeout)
        for worker, answer in zip(ranks, answers, strict=True):
            if isinstance(answer, Failure) and answer.kind == HANG:
                worker.say_where()
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failure):
                text = ranks[rank].log.read_bytes()[before[rank] :].decode(errors="replace")
                answers[rank] = replace(answer, printed=without_repetition(text)[:_PRINTED])
        return answers

    def close(self) -> None:
        """Let idle processes end by themselves."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.server.join([worker.pid], CLOSING)
        self.kill()

    def kill(self) -> None:
        """End the processes, whatever they wait for."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.server.kill([worker.pid])
        self._workers = []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


@dataclass(frozen=True)
class _Worker:
    server: ForkServer
    pid: int
    connection: Connection
    log: Path

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it died since the last call: receiving will say so
            self.connection.send_bytes(message)

    def receive(self) -> Any:
        try:
            return _unpack(self.connection.recv_bytes())
        except (EOFError, OSError):
            text = f"the worker died with exit code {self.server.join([self.pid], seconds(5))[0]}"
            return Failure("WorkerDied", text, text, lost=True)

    def say_where(self) -> None:
        """Have every thread's traceback in the log."""
        before = size = self.log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + seconds(2)
        while time.monotonic() < deadline:
            time.sleep(seconds(0.2))
            size, known = self.log.stat().st_size, size
            if before < known == size:  # a report is written thread by thread, the main one last
                return


def without_repetition(text: str) -> str:
    """Return what faulthandler wrote with the main thread first, and each stack once, under how many threads have it.

    A rank has dozens of threads that only wait for work, and the end of a long report is cut off.
    """
    said, *threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE)
    stacks = Counter(thread.split("\n", 1)[1].strip() for thread in reversed(threads))
    return said[-_PRINTED // 2 :] + "\n".join(
        f"{count} thread{'s'[: count > 1]}:\n  {stack}" for stack, count in stacks.items()
    )


def _start_workers(servers: Sequence[ForkServer], directory: Path) -> list[_Worker]:
    size = len(servers)
    logs = [directory / f"log-{rank}" for rank in range(size)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "socket"))
        listener.listen(size)
        listener.settimeout(STARTING)
        forks = enumerate(zip(servers, logs, strict=True))
        pids = [server.fork(_serve, rank, size, str(directory), log=log) for rank, (server, log) in forks]
        connections: dict[int, Connection] = {}
        while len(connections) < size:
            connection = Connection(listener.accept()[0].detach())
            assert connection.poll(STARTING), "a rank has connected, and does not say which it is"
            connections[connection.recv()] = connection
    return [_Worker(servers[rank], pids[rank], connections[rank], logs[rank]) for rank in range(size)]


def _collect(ranks: list[_Worker], timeout: float) -> list[Any]:
    """Wait for every rank's answer. Once one has failed the others get `GRACE` seconds, since they may wait for it."""
    answers: list[Any] = [Failure(HANG, "no answer in time", "no answer in time", lost=True)] * len(ranks)
    waiting = {worker.connection: rank for rank, worker in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            rank = waiting.pop(connection)
            answers[rank] = ranks[rank].receive()
            if isinstance(answers[rank], Failure):
                deadline = min(deadline, time.monotonic() + GRACE)
    return answers


def _serve(rank: int, size: int, directory: str) -> None:
    """Be a worker: join the groups, then answer calls until the other end is closed."""
    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.connect(f"{directory}/socket")
        connection = Connection(connecting.detach())
    connection.send(rank)
    warnings.simplefilter("error")
    faulthandler.register(signal.SIGUSR1)  # for ranks that hang
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else each group asks for the address of this host's name
    dist.distributed_c10d.default_pg_timeout = GLOO_TIMEOUT  # of groups that a body makes; PyTorch's is half an hour
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=GLOO_TIMEOUT)
    groups = {n: dist.new_group(list(range(n)), timeout=GLOO_TIMEOUT) for n in range(1, size + 1)}
    own, imported = set(dist.distributed_c10d._world.pg_map), len(sys.modules)
    with contextlib.suppress(EOFError):
        while True:
            request = connection.recv_bytes()  # so all ranks have answered the last one
            if made := set(dist.distributed_c10d._world.pg_map) - own:
                _destroy(made)
                del made
            # Models of the last body go: their ends take time, and tensors, which another body may measure.
            if len(sys.modules) > imported:  # else each of these collections walks over what bodies have imported
                freeze()
                imported = len(sys.modules)
            else:
                gc.collect()
            connection.send_bytes(_answer(request, groups))
    os._exit(0)  # gloo's threads may still be waiting


def _destroy(groups: Iterable[dist.ProcessGroup]) -> None:
    """End groups that a body has made: each has a thread of gloo that wakes up a hundred times a second."""
    for group in groups:
        dist.destroy_process_group(group)


def _answer(request: bytes, groups: dict[int, dist.ProcessGroup]) -> bytes:
    """Run one body; the answer is its result or its failure, pickled by value."""
    takes, name, arguments, world_size, number = _unpack(request)
    # PyTorch names a new group by the number of groups that this process has made. A rank that made fewer, because a
    # body ran without it, would find the addresses of an earlier group under the name of the next one.
    dist.distributed_c10d._world.group_count = _GROUPS * number
    try:
        body = find(*name)
        args, kwargs = _unpack(arguments)
        torch.manual_seed(SEED)
        group = groups[world_size]
        with _nothing_ignored():
            return _pack(body(group if takes == "group" else _transport(group), *args, **kwargs))
    except BaseException as error:
        return _pack(Failure(type(error).__name__, str(error), traceback.format_exc()))


@contextlib.contextmanager
def _nothing_ignored() -> Iterator[None]:
    """Raise what Python only prints: an exception (so a warning, too) in a finalizer."""
    ignored: list[str] = []

    def note(unraisable: Any) -> None:
        ignored.append("".join(traceback.format_exception(unraisable.exc_value)))

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        yield
    finally:
        sys.unraisablehook = before
    assert not ignored, f"ignored in a finalizer: {ignored[0]}"


def _transport(group: dist.ProcessGroup) -> Any:
    from shardlite.comm.transport.gloo import GlooTransport

    return GlooTransport(group, GLOO_TIMEOUT)


def _pack(value: Any) -> bytes:
    """Pickle by value, tensors of every dtype included (a multiprocessing queue would send file descriptors)."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)
