"""Ranks that may die: `Doomed.run(body, world_size, *args)` starts processes for one scenario and sees them all end.

A server imports everything once and forks the ranks, so that a start costs little; a rank is a Python process with one
thread that ends as every other does. Whatever happens, `run` returns: who has not ended in time is killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest  # noqa: F401 (the modules of the bodies import it)
import torch
import torch.distributed as dist

from shardlite.transport import meeting
from tests.cluster import _find

ROOT = Path(__file__).parent.parent
JOIN = 45.0  # seconds that ranks have to end

_POLL = 0.02


@dataclass(frozen=True)
class Ended:
    """What became of a rank."""

    status: int
    """Its exit status; negative: the signal that ended it."""

    kind: str = ""
    """The type of the exception that ended its body, if one did."""

    text: str = ""
    seconds: float = 0.0
    """From when all ranks were connected."""

    result: Any = None
    log: str = ""
    """The end of what it has printed: a process that was aborted says there why."""


class Doomed:
    """A server that starts ranks."""

    def __init__(self) -> None:
        paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.doomed"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )

    def close(self) -> None:
        """End the server."""
        with self._server:
            assert self._server.stdin is not None
            self._server.stdin.close()

    def run(
        self,
        body: Callable[..., Any],
        world_size: int,
        *args: Any,
        directory: Path,
        limit: float = JOIN,
        killed: int | None = None,
    ) -> list[Ended]:
        """Run `body(group, *args)` on each of some ranks; return what became of them. `args` are what JSON can say.

        Rank `killed` is killed once all others have ended. Nothing may be left behind by any of them.
        """
        for name in ("tmp", "said", "sockets"):
            (directory / name).mkdir()
        module = sys.modules[body.__module__]
        names = body.__module__, module.__file__, body.__qualname__
        pids = self._ask("start", str(directory), world_size, names, args)
        others = [pid for rank, pid in enumerate(pids) if rank != killed]
        self._await(others, limit)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # most have ended
                os.kill(pid, signal.SIGKILL)
        statuses = self._await(pids, limit)
        _nothing_is_left(directory, pids)
        return [_ended(directory, rank, status) for rank, status in enumerate(statuses)]

    def _await(self, pids: list[int], limit: float) -> list[Any]:
        """Wait until all have ended, at most so many seconds, and return their exit statuses."""
        deadline = time.monotonic() + limit
        while None in (statuses := self._ask("statuses", pids)) and time.monotonic() < deadline:
            time.sleep(_POLL)
        return statuses

    def _ask(self, *request: Any) -> list[Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        answer: list[Any] = json.loads(self._server.stdout.readline())
        return answer


def _ended(directory: Path, rank: int, status: int | None) -> Ended:
    assert status is not None, "it was killed"
    said = directory / "said" / str(rank)
    log = (directory / f"log-{rank}").read_text(errors="replace")[-2000:]
    return Ended(status, log=log, **(json.loads(said.read_text()) if said.exists() else {}))


def _nothing_is_left(directory: Path, pids: list[int]) -> None:
    """Check that the ranks have left no process, no file and no socket with a name."""
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not list((directory / "tmp").iterdir())
    shared = Path("/dev/shm")
    if shared.is_dir():
        marks = ["shardlite", *map(str, pids)]
        assert not [each for each in shared.iterdir() if any(mark in each.name for mark in marks)]
    bound = Path("/proc/net/unix").read_text()
    assert not [each for each in (directory / "sockets").iterdir() if each.name in bound]


# ---- the server and its ranks -------------------------------------------------------------------------------------


def _serve() -> None:
    """Answer requests until there are no more."""
    running: dict[int, int | None] = {}
    for line in sys.stdin.buffer:
        match json.loads(line):
            case "start", directory, world_size, names, args:
                answer: list[Any] = []
                for rank in range(world_size):
                    if (pid := os.fork()) == 0:
                        _be(rank, world_size, Path(directory), names, args)
                        return  # and end as a program does
                    answer.append(pid)
                    running[pid] = None
            case "statuses", pids:
                answer = [_status(pid, running) for pid in pids]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid, status in running.items():
        if status is None:
            os.kill(pid, signal.SIGKILL)


def _status(pid: int, running: dict[int, int | None]) -> int | None:
    """Return the exit status of a rank, if it has ended."""
    if running[pid] is None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        running[pid] = os.waitstatus_to_exitcode(status) if ended else None
    return running[pid]


def _be(rank: int, world_size: int, directory: Path, names: tuple[str, str, str], args: list[Any]) -> None:
    """Be a rank."""
    log = os.open(directory / f"log-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("error")
    tempfile.tempdir = os.environ["TMPDIR"] = str(directory / "tmp")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _note_sockets(directory / "sockets")
    store = f"file://{directory / 'store'}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world_size, timeout=timedelta(seconds=JOIN))
    dist.barrier()
    begun = time.monotonic()
    outcome: dict[str, Any] = {}
    try:
        outcome["result"] = _find(*names)(dist.group.WORLD, *args)
    except Exception as error:
        traceback.print_exc()
        outcome |= {"kind": type(error).__name__, "text": str(error)}
    outcome["seconds"] = time.monotonic() - begun
    (directory / "said" / str(rank)).write_text(json.dumps(outcome))


def _note_sockets(directory: Path) -> None:
    """Keep the names of the sockets that this rank makes, as names of files."""
    listen = meeting._listen

    def noted(world_size: int) -> Any:
        listener = listen(world_size)
        (directory / listener.getsockname().lstrip(b"\0").decode()).touch()
        return listener

    meeting._listen = noted


@contextlib.contextmanager
def server() -> Iterator[Doomed]:
    """Start a server, and end it."""
    doomed = Doomed()
    try:
        yield doomed
    finally:
        doomed.close()


if __name__ == "__main__":
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports much
    _serve()
