"""A process that imports everything once and forks others from itself, so that a rank starts in milliseconds.

`ForkServer.fork` runs a function in a new process. The process has one thread at first, and ends as every other Python
program does when the function returns. The server ends when its input is closed, and kills what still runs.
"""

import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.patience import seconds
from tests.support.ranks.frozen import freeze

ROOT = Path(__file__).parents[3]

_ANSWER = seconds(300)  # of the server, which has to import everything first
_POLL = 0.01


class ForkServer:
    """The server, as seen by the process that asks it for others. It is started at the first use."""

    def __init__(self, **environment: str) -> None:
        self._environment = environment
        self._server: subprocess.Popen[bytes] | None = None

    def fork(self, entry: Callable[..., None], *args: Any, log: Path) -> int:
        """Call `entry(*args)` in a new process and return its process id.

        `entry` is a top-level function. `args` are what JSON can hold. Standard output and error go to the file `log`.
        """
        return int(self._ask("fork", name_of(entry), args, str(log)))

    def join(self, pids: list[int], timeout: float) -> list[int | None]:
        """Wait until all of these have ended, at most so many seconds, and return their exit statuses.

        A status is negative for a signal, and `None` while a process runs.
        """
        deadline = time.monotonic() + timeout
        while None in (statuses := self._statuses(pids)) and time.monotonic() < deadline:
            time.sleep(_POLL)
        return statuses

    def kill(self, pids: list[int]) -> list[int | None]:
        """Kill what still runs of these, wait for it, and return the exit statuses."""
        for pid, status in zip(pids, self._statuses(pids), strict=True):
            if status is None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return self.join(pids, seconds(60))

    def close(self) -> None:
        """End the server and all processes that it has forked."""
        if self._server is not None:
            server, self._server = self._server, None
            try:
                server.communicate(timeout=_ANSWER)
            except subprocess.TimeoutExpired:
                _end(server)
                raise

    def _statuses(self, pids: list[int]) -> list[int | None]:
        return list(self._ask("statuses", pids)) if pids else []

    def _ask(self, *request: Any) -> Any:
        if self._server is None:
            self._server = _start(self._environment)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()
        if not wait([self._server.stdout], _ANSWER):
            _end(self._server)
            raise AssertionError(f"the fork server does not answer to {request[0]!r}")
        answer = self._server.stdout.readline()
        assert answer, f"the fork server has ended with status {self._server.wait()}"
        return json.loads(answer)


def name_of(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return what `find` takes. A module may not be importable elsewhere under the name that pytest gave it."""
    module = sys.modules[function.__module__]
    assert module.__file__ is not None
    return function.__module__, module.__file__, function.__qualname__


def find(module: str, path: str, qualname: str) -> Callable[..., Any]:
    """Return a function by its name."""
    found: Any = _module(module, path)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _module(name: str, path: str) -> ModuleType:
    """Import a test module by name if that gives the right file, else from its file under that name."""
    with suppress(ImportError):
        module = importlib.import_module(name)
        if module.__file__ and os.path.samefile(module.__file__, path):
            return module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the server -----------------------------------------------------------------------------------------------------


def _start(environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    paths = os.pathsep.join(path for path in sys.path if path)  # arguments may name what pytest has made importable
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.ranks.forkserver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
    )


def _end(server: "subprocess.Popen[bytes]") -> None:
    """End a server that hangs. It says first where, on the standard error of the tests."""
    server.send_signal(signal.SIGUSR1)
    time.sleep(1.0)
    server.kill()
    server.wait()


def _import_everything() -> None:
    import pytest  # noqa: F401 (the modules of the bodies import it)
    import torch

    import shardlite  # noqa: F401
    import tests.support.twins.sharded  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports much
    freeze()  # or each collection in a child would copy the pages of all that is imported


def _serve() -> Callable[[], None] | None:
    """Answer requests until there are no more. In a forked process, return what it has to run."""
    running: dict[int, int | None] = {}
    for line in sys.stdin.buffer:
        match json.loads(line):
            case "fork", name, args, log:
                if (pid := os.fork()) == 0:
                    _redirect(log)
                    return lambda name=name, args=args: find(*name)(*args)
                running[pid] = None
                answer: Any = pid
            case "statuses", pids:
                answer = [_status(pid, running) for pid in pids]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid, status in running.items():
        if status is None:
            os.kill(pid, signal.SIGKILL)
    return None


def _redirect(log: str) -> None:
    """Take this process off the server's pipes."""
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _status(pid: int, running: dict[int, int | None]) -> int | None:
    if running[pid] is None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        running[pid] = os.waitstatus_to_exitcode(status) if ended else None
    return running[pid]


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    _import_everything()
    warnings.simplefilter("error")
    entry = _serve()
    if entry is None:
        os._exit(0)  # or nanobind would tell of all that is frozen as leaked
    entry()
