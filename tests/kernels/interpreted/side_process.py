"""Run the items of one folder in a second pytest, in a process of its own with another environment.

A variable that a library reads at import cannot be changed later, so its tests need a process. Here the items stay
items of the outer session: it collects, selects, orders and reports them. Only the three phases of an item run there:

    outer session                                     side process
    SideProcess.pytest_runtest_protocol   item ---->  _Server.pytest_runtestloop: runs setup, call and teardown
    logs the reports                    <---- reports

The side process starts with the first item and ends with the session, or as soon as the outer process is gone. If it
dies, the item that it ran fails with its exit code and output, and the next item starts a new one. If it dies before it
has collected, all items fail with what it printed.

Options of the command line that shape reports (`--tb`, `--showlocals`, `-v`, `--capture`, `-W`, `-o`) hold in the side
process too. Debuggers (`--pdb`, `--trace`), `--setup-show` and its relatives, and plugins loaded with `-p` do not reach
it: to use them, set the environment by hand and run the folder alone. Warnings that are no errors are not summarised.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

PATIENCE = 300.0
"""Seconds that a process gets to end by itself, so that what it measures (coverage) is written, before it is killed."""
LONGEST = 10_000
"""Bytes of output that are quoted."""


# ---- the outer session --------------------------------------------------------------------------------------------


class SideProcess:
    """A plugin that has items under `folder` run by a process with `environment` on top of this one's."""

    def __init__(self, config: pytest.Config, folder: Path, environment: Mapping[str, str]) -> None:
        self._config, self._folder, self._environment = config, folder, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self._output: Any = None
        self._collected = False
        self._broken = ""  # why the process cannot be started

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Do for an item of the folder what pytest's own hook does for others."""
        if not self._runs(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in (*self._reports(item, nextitem), *_teardown_here(item, nextitem)):
            report.nodeid = item.nodeid  # xdist appends the name of the group
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """End the process. A session that is green so far fails if the process does not end well."""
        if self._process is not None:
            code, printed = self._stop()
            if code != 0 and exitstatus == pytest.ExitCode.OK:
                raise RuntimeError(f"the side process ended with exit code {code} and printed:\n{printed}")

    def _runs(self, item: pytest.Item) -> bool:
        return item.path.is_relative_to(self._folder)

    def _reports(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterable[pytest.TestReport]:
        if self._broken:  # and would be after each of many starts
            return [_failed(item, self._broken)]
        printed, seconds = _size(self._output) if self._output else 0, 0.0
        following = _node_id(nextitem) if nextitem is not None and self._runs(nextitem) else None
        answer = None
        with suppress(EOFError, OSError):
            if self._process is None:
                seconds = self._start()
            self._connection.send((_node_id(item), following))
            answer = self._connection.recv()
        if answer is None:
            code, text = self._stop(printed)
            text = f"the side process died with exit code {code} and printed:\n{text}"
            self._broken = "" if self._collected else text
            return [_failed(item, text)]
        from_serializable = self._config.hook.pytest_report_from_serializable
        reports = [from_serializable(config=self._config, data=data) for data in answer]
        reports[0].duration += seconds
        return reports

    def _start(self) -> float:
        """Start the process and wait until it has collected. Return the seconds that this took."""
        began = time.perf_counter()
        self._connection, theirs = Pipe()
        shared = self._config.option.capture == "no"
        self._output = None if shared else tempfile.TemporaryFile()  # noqa: SIM115 (closed in _stop)
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), *self._arguments()],
            cwd=self._config.rootpath,
            env={**environment, **self._environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=None if shared else subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()  # so that its death is an end of file here
        self._collected = False
        self._collected = self._connection.recv()
        return time.perf_counter() - began

    def _arguments(self) -> Iterable[str]:
        """A command line that collects the whole folder in any case: node ids are looked up, whatever is selected."""
        config, option = self._config, self._config.option
        yield from (f"--rootdir={config.rootpath}", "-qq", "--no-header", "--disable-warnings")
        yield from ("-p", "no:cacheprovider", "-p", "no:randomly")
        yield from (f"--tb={option.tbstyle}", f"--capture={option.capture}", f"--assert={option.assertmode}")
        yield from ["--showlocals"] * option.showlocals
        yield from (f"-W{each}" for each in option.pythonwarnings or ())
        yield from (f"--override-ini={each}" for each in option.override_ini or ())
        verbosity = config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS)
        yield from (f"--override-ini=verbosity_assertions={verbosity}", "--override-ini=addopts=")
        if config.inipath is not None:
            yield f"--config-file={config.inipath}"
        if option.basetemp is not None:
            yield f"--basetemp={option.basetemp}-{self._folder.name}"  # pytest empties the outer one at its first use
        yield str(self._folder)

    def _stop(self, since: int = 0) -> tuple[int, str]:
        """Return the exit code and what was printed after the first `since` bytes."""
        process, self._process = self._process, None
        assert process is not None
        self._connection.close()  # an end of file on the other side
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output, self._output = self._output, None
        if output is None:
            return process.returncode, "(see above)"
        with output:
            output.seek(max(since, _size(output) - LONGEST))
            return process.returncode, output.read().decode(errors="replace")


def _size(file: Any) -> int:
    """Return the bytes in `file`. Seeking would move it under the process that writes."""
    return os.fstat(file.fileno()).st_size


def _node_id(item: pytest.Item) -> str:
    """Return the node id without the group that xdist appends."""
    assert item.parent is not None
    return f"{item.parent.nodeid}::{item.name}"


def _failed(item: pytest.Item, text: str) -> pytest.TestReport:
    call = pytest.CallInfo.from_call(lambda: pytest.fail(text, pytrace=False), when="call")
    return item.ihook.pytest_runtest_makereport(item=item, call=call)


def _teardown_here(item: pytest.Item, nextitem: pytest.Item | None) -> Iterable[pytest.TestReport]:
    """Tear down what earlier items of this process left for `item`, unless `nextitem` needs it. Yield a failure."""
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), when="teardown")
    if call.excinfo is not None:
        yield item.ihook.pytest_runtest_makereport(item=item, call=call)


# ---- the side process ---------------------------------------------------------------------------------------------


class _Server:
    """A plugin that runs items as they are asked for, until the outer process closes the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._requests: SimpleQueue[tuple[str, str | None] | None] = SimpleQueue()
        self._reports: list[pytest.TestReport] = []
        self._running = False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run instead of pytest's own loop."""
        if session.testsfailed:
            raise session.Interrupted("errors during collection")
        items, hook = {item.nodeid: item for item in session.items}, session.config.hook
        threading.Thread(target=self._receive, daemon=True).start()
        self._connection.send(True)
        for node_id, following in iter(self._requests.get, None):
            self._running = True
            hook.pytest_runtest_protocol(item=items[node_id], nextitem=items.get(following))
            self._running = False
            to_serializable = hook.pytest_report_to_serializable
            self._connection.send([to_serializable(config=session.config, report=each) for each in self._reports])
            self._reports.clear()
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what the outer session logs."""
        self._reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self) -> tuple[str, str, str]:
        """Print nothing here: the outer session does."""
        return "", "", ""

    def _receive(self) -> None:
        """Receive beside the item that runs, and interrupt it once its result is not awaited any more."""
        with suppress(EOFError, OSError):
            while True:
                self._requests.put(self._connection.recv())
        self._requests.put(None)
        if self._running:
            os.kill(os.getpid(), signal.SIGINT)


def _main(descriptor: str, *arguments: str) -> int:
    os.set_inheritable(int(descriptor), False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell started in the background
    return pytest.main(list(arguments), plugins=[_Server(Connection(int(descriptor)))])


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
