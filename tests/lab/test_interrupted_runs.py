"""Ctrl-C and SIGTERM end all processes of a run before the command returns."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardlite.checkpoint import checkpoints_in
from shardlite.cli import launch
from shardlite.cli.inspect_checkpoint import inspect
from tests.support.patience import seconds, until
from tests.support.ranks.restarts import TINY
from tests.support.ranks.scripts import IMPORTED_FROM

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc for processes")

_MARK = "SHARDLITE_TEST_RUN"


@dataclass(frozen=True)
class Run:
    """A command in its own process group, and its descendants."""

    command: subprocess.Popen[bytes]
    mark: bytes
    log: Path

    def processes(self) -> dict[int, str]:
        """Return the command line of each process that is alive."""
        found = {}
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark in (each / "environ").read_bytes().split(b"\0"):
                    found[int(each.name)] = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def state(self) -> str:
        """Describe the command, its processes and their output, for the report of a failing test."""
        lines = [f"status of the command: {self.command.poll()}"]
        for pid, words in self.processes().items():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                worked = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                where = Path(f"/proc/{pid}/wchan").read_text()
                lines.append(f"{pid} is {fields[0]}, has worked {worked:.1f} s, is in {where!r}: {words[:80]!r}")
        return "\n".join([*lines, "printed:", self.log.read_text(errors="replace")[-4000:]])

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """Send a signal to the process group, as a terminal does, and return the exit status."""
        os.killpg(self.command.pid, number)
        return self.command.wait(seconds(60))

    def assert_nothing_is_left(self) -> None:
        """Check that no rank outlived the command; the snapshot holder ends after it."""
        left = {pid: words for pid, words in self.processes().items() if "in_memory/holder.py" not in words}
        assert not left
        until(lambda: not self.processes(), "the end of the snapshot holder")
        assert not [each.name for each in Path("/dev/shm").iterdir() if "shardlite" in each.name]


@contextmanager
def started(folder: Path, *command: str) -> Iterator[Run]:
    """Run `python COMMAND`; kill its remaining processes at the end."""
    mark = f"{_MARK}={uuid.uuid4()}"
    paths = os.pathsep.join(map(str, IMPORTED_FROM))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", _MARK: mark.partition("=")[2]}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    run = Run(process, mark.encode(), folder / "log")
    try:
        yield run
    except BaseException:
        print(run.state())
        raise
    finally:
        for pid in run.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


# ---- the launcher ---------------------------------------------------------------------------------------------------

# It imports the file of the launcher alone: the package imports PyTorch, and on a busy machine a process may wait for
# minutes to be given those seconds of work.
LAUNCHER = """
import sys
sys.path.append(sys.argv[2])
import launch
launch.torchrun = lambda *_, **__: [sys.executable, "-c", AGENT, sys.argv[1]]
AGENT = '''
import signal, sys, time
from pathlib import Path
came = []
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, lambda number, _: came.append(number))
folder = Path(sys.argv[1])
(folder / "ready").touch()
while not came:
    time.sleep(0.01)
time.sleep(0.5)
(folder / "came").write_text(" ".join(str(int(each)) for each in came))
'''
sys.exit(launch.launch(2, ["train"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_launcher_passes_a_signal_on_once_and_waits(tmp_path, number):
    with started(tmp_path, "-c", LAUNCHER, str(tmp_path), str(Path(launch.__file__).parent)) as run:
        until(lambda: (tmp_path / "ready").exists() or run.command.poll() is not None, "the start of the agent")
        assert run.interrupt(number) == 128 + number
        assert (tmp_path / "came").read_text() == str(int(number))
        run.assert_nothing_is_left()


# ---- whole runs -----------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from shardlite import AdamW, ShardLite, save, save_in_memory

torch.set_num_threads(1)
dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
model = ShardLite(net, transport="shared_memory", timeout=timedelta(seconds=600))
optimizer = AdamW(model.parameters())
for step in range(1_000_000):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    save_in_memory(sys.argv[1], model, optimizer, step=step)
    save(sys.argv[1], model, optimizer, step=step, keep=3)
"""


def torchrun_program(folder: Path) -> list[str]:
    (folder / "program.py").write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launcher, str(folder / "program.py"), str(folder / "run")]


def train(folder: Path) -> list[str]:
    options = ["--ranks", "2", "--steps", "100000", "--out", str(folder), "--checkpoints", str(folder / "run")]
    return ["-m", "shardlite", "train", *TINY, *options, "--save-every", "1", "--redundancy", "neighbour"]


def in_training(_: Path) -> None:
    time.sleep(random.uniform(0, 0.5))


def in_a_save(folder: Path) -> None:
    until(lambda: any(folder.glob(".saving-*")), "a save")


@pytest.mark.slow
@pytest.mark.parametrize("moment", [in_training, in_a_save])
@pytest.mark.parametrize("command", [train, torchrun_program])
def test_an_interrupted_run_leaves_no_process_and_no_half_checkpoint(tmp_path, command, moment):
    folder = tmp_path / "run"
    with started(tmp_path, *command(tmp_path)) as run:
        until(lambda: checkpoints_in(folder) or run.command.poll() is not None, "the first checkpoint")
        assert run.command.poll() is None
        assert len(run.processes()) >= 4  # the launcher, two ranks, and the snapshot holder
        moment(folder)
        assert run.interrupt() != 0
        run.assert_nothing_is_left()
    for place in checkpoints_in(folder).values():
        *_, last = inspect(place)
        assert "have the checksums" in last


@pytest.mark.slow
def test_sigterm_to_the_command_alone_saves_and_leaves_no_process(tmp_path):
    folder = tmp_path / "run"
    with started(tmp_path, *train(tmp_path)) as run:
        until(lambda: checkpoints_in(folder) or run.command.poll() is not None, "the first checkpoint")
        run.command.terminate()
        assert run.command.wait(seconds(60)) == 128 + signal.SIGTERM
        run.assert_nothing_is_left()
    step = max(checkpoints_in(folder))
    assert f"Stopped by SIGTERM. The run can resume after step {step}, from {folder}." in run.log.read_text()
    assert list(inspect(folder))
