"""Ranks for tests: threads for breadth, one session-long cluster of gloo processes for the real thing.

Starting three gloo processes costs seconds on a small machine, so the cluster is started at its first use and kept. It
is restarted when it may be broken: a rank hung, died, or failed alone (the others may still be waiting for it).
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

GLOO_TIMEOUT = timedelta(seconds=60)
GRACE = 20.0  # seconds that the other ranks get once one has failed


class RemoteError(AssertionError):
    """A body failed on a rank of the cluster; the message holds the rank and the remote traceback."""


@dataclass(frozen=True)
class Failure:
    """What a rank says about an exception. `lost` means that the rank itself is of no more use."""

    kind: str
    message: str
    traceback: str
    lost: bool = False


def run_local(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    delays: Sequence[float] = (),
    timeout: timedelta = timedelta(seconds=20),
    **kwargs: Any,
) -> list[Any]:
    """Run `body(transport, *args, **kwargs)` on in-process ranks and return their results, or raise the first error."""
    from shardlite.transport import local_world

    with ThreadPoolExecutor(world_size) as pool:
        ranks = local_world(world_size, timeout=timeout, delays=delays)
        return [future.result() for future in [pool.submit(body, rank, *args, **kwargs) for rank in ranks]]


class Cluster:
    """`size` worker processes with gloo groups over the first 1, 2, ..., `size` of them."""

    def __init__(self, size: int = 4, timeout: float = 120.0) -> None:
        self.size = size
        self.timeout = timeout
        self._workers: list[_Worker] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, body: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `body(group, *args, **kwargs)` on the first `world_size` ranks and return their results by rank.

        `body` is a top-level function. Arguments and results are pickled by value. All randomness is seeded alike.

        Raises:
            RemoteError: some rank failed, died or hung.
        """
        return self._results(self._call(_Task("group", body, args, kwargs), world_size))

    def check(self, body: Callable[..., None], world_size: int, *args: Any, **kwargs: Any) -> None:
        """Like `run`, for a body that asserts for itself on every rank, and so returns nothing."""
        assert self.run(body, world_size, *args, **kwargs) == [None] * world_size

    def run_transport(self, body: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Like `run`, for a body that sees only a transport: `body(transport, *args, **kwargs)`."""
        return self._results(self._call(_Task("transport", body, args, kwargs), world_size))

    def failures(
        self, body: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any
    ) -> list[tuple[str, str] | None]:
        """Like `run`, for a body that should fail: return `(type name, message)` by rank, `None` where it did not."""
        answers = self._call(_Task("group", body, args, kwargs), world_size)
        return [(a.kind, a.message) if isinstance(a, Failure) else None for a in answers]

    def close(self) -> None:
        """Stop the workers; the next call starts new ones."""
        for worker in self._workers:
            worker.stop()
        if self._directory is not None:
            self._directory.cleanup()
        self._workers, self._directory = [], None

    def _call(self, task: "_Task", world_size: int) -> list[Any]:
        assert world_size <= self.size, f"this cluster has {self.size} ranks"
        try:
            answers = self._exchange(task, world_size)
        except BaseException:
            self.close()  # answers may be left unread
            raise
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        alike = len(failures) == world_size and not any(f.lost or f.kind == "CommError" for f in failures)
        if failures and not alike:
            self.close()  # a rank may still be waiting, or a gloo connection be closed for good
        return answers

    def _exchange(self, task: "_Task", world_size: int) -> list[Any]:
        if not self._workers:
            self._directory = tempfile.TemporaryDirectory(prefix="shardlite-cluster-")
            self._workers = _start_workers(self.size, str(Path(self._directory.name) / "store"))
        ranks = self._workers[:world_size]
        for worker in ranks:
            worker.send(task.encoded(world_size, self.timeout))
        return _collect(ranks, self.timeout)

    @staticmethod
    def _results(answers: list[Any]) -> list[Any]:
        failed = [f"rank {r}:\n{a.traceback}" for r, a in enumerate(answers) if isinstance(a, Failure)]
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

    def encoded(self, world_size: int, timeout: float) -> bytes:
        path = sys.modules[self.body.__module__].__file__
        arguments = _pack((self.args, self.kwargs))  # read only after the module of the body was imported
        name = self.body.__module__, path, self.body.__qualname__
        return _pack((self.takes, name, arguments, world_size, timeout))


@dataclass(frozen=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it died since the last call: receiving will say so
            self.connection.send_bytes(message)

    def receive(self) -> Any:
        try:
            return _unpack(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(5)
            text = f"the worker died with exit code {self.process.exitcode}"
            return Failure("WorkerDied", text, text, lost=True)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.process.close()


def _start_workers(size: int, store: str) -> list[_Worker]:
    context = multiprocessing.get_context("spawn")
    workers = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
        process.start()
        theirs.close()  # so that a worker's death is an end of file here
        workers.append(_Worker(process, ours))
    return workers


def _collect(ranks: list[_Worker], timeout: float) -> list[Any]:
    """Wait for every rank's answer. Once one has failed the others get `GRACE` seconds, since they may wait for it."""
    answers: list[Any] = [Failure("Hang", "no answer in time", "no answer in time (see stderr)", lost=True)] * len(
        ranks
    )
    waiting = {worker.connection: rank for rank, worker in enumerate(ranks)}
    deadline = time.monotonic() + timeout
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            rank = waiting.pop(connection)
            answers[rank] = ranks[rank].receive()
            if isinstance(answers[rank], Failure):
                deadline = min(deadline, time.monotonic() + GRACE)
    return answers


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    """Be a worker: join the groups, then answer calls until the other end is closed."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=GLOO_TIMEOUT)
    groups = {n: dist.new_group(list(range(n)), timeout=GLOO_TIMEOUT) for n in range(1, size + 1)}
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(request, groups))


def _answer(request: bytes, groups: dict[int, dist.ProcessGroup]) -> bytes:
    """Run one body; the answer is its result or its failure, pickled by value."""
    takes, name, arguments, world_size, timeout = _unpack(request)
    faulthandler.dump_traceback_later(timeout * 0.9)  # says where a body hangs, before the call is given up
    try:
        body = _find(*name)
        args, kwargs = _unpack(arguments)
        torch.manual_seed(0)
        group = groups[world_size]
        with _nothing_ignored():
            return _pack(body(group if takes == "group" else _transport(group), *args, **kwargs))
    except BaseException as error:
        return _pack(Failure(type(error).__name__, str(error), traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _nothing_ignored() -> Iterator[None]:
    """Raise what Python only prints: an exception (so a warning, too) in a finaliser."""
    ignored: list[str] = []

    def note(unraisable: Any) -> None:
        ignored.append("".join(traceback.format_exception(unraisable.exc_value)))

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        yield
    finally:
        sys.unraisablehook = before
    assert not ignored, f"ignored in a finaliser: {ignored[0]}"


def _transport(group: dist.ProcessGroup) -> Any:
    from shardlite.transport import GroupTransport

    return GroupTransport(group, GLOO_TIMEOUT)


def _pack(value: Any) -> bytes:
    """Pickle by value, tensors of every dtype included (a multiprocessing queue would send file descriptors)."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)


def _find(module: str, path: str, qualname: str) -> Callable[..., Any]:
    found: Any = _module(module, path)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _module(name: str, path: str) -> ModuleType:
    """Import a test module by name if that gives the right file, else from its file under that name."""
    with contextlib.suppress(ImportError):
        module = importlib.import_module(name)
        if module.__file__ and os.path.samefile(module.__file__, path):
            return module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
