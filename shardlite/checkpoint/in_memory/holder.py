"""Processes that hold the memory of snapshots while ranks end and are restarted.

A process, the *snapshot holder*, holds the memory of one rank's snapshots. The rank starts the holder in a new session,
so that the holder does not end with the ranks. The holder ends when the agent of `torchrun` has ended, even if the
agent was killed. The memory has no name in a file system, so it is freed when the holder ends. The holder neither maps
the memory nor answers requests.

Ranks find a holder by its command line, which names the agent and the memory. They open the memory as
`/proc/PROCESS/fd/DESCRIPTOR`. Linux allows only processes of the same user to open this file (`PTRACE_MODE_READ`).

This file is also executed as a script. It imports the standard library only, to start in about 20 ms.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_RUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that `torchrun` sets for ranks. It is not set in `torchrun` itself."""


class HolderError(OSError):
    """A holder cannot be started or found."""


@dataclass(frozen=True)
class Agent:
    """The process that restarts the ranks of this host."""

    pid: int
    start: int
    """Start time of the process in ticks since boot, needed because a later process may get the same `pid`."""

    @classmethod
    def of_this_process(cls) -> Agent:
        """Return the agent that has started this rank: the nearest ancestor that is not part of the run.

        Raises:
            HolderError: `torchrun` did not start this process.
        """
        run = os.environ.get(_RUN)
        if run is None:
            raise HolderError("torchrun did not start this process, so nothing would restart it")
        mark, pid = f"{_RUN}={run}".encode(), os.getppid()
        while pid > 1 and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            pid = parent_and_start(pid)[0]
        if pid == 1 and b"torch" not in Path("/proc/1/cmdline").read_bytes():
            raise HolderError("torchrun has ended before this process")
        return cls(pid, parent_and_start(pid)[1])

    def command(self, name: str, descriptor: int) -> list[str]:
        """Return the command line of a holder. It names the PID namespace, because PIDs differ by namespace."""
        namespace = os.readlink("/proc/self/ns/pid")
        return ["-I", "-S", __file__, str(self.pid), str(self.start), namespace, name, str(descriptor)]

    def hold(self, name: str, descriptor: int) -> Holder:
        """Start a process that holds memory under a name until this agent has ended.

        Raises:
            HolderError: the process cannot be started.
        """
        done = subprocess.run(
            [sys.executable, *self.command(name, descriptor)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            pass_fds=[descriptor],
            start_new_session=True,
            check=False,
        )
        reason = done.stderr.strip().rpartition("\n")[2]  # the last line of a traceback
        found = self.holders(name).get(name)
        if found is None or reason:
            raise HolderError(f"the process that holds copies could not be started: {reason}")
        return found

    def holders(self, prefix: str) -> dict[str, Holder]:
        """Return the holders of memory whose name begins with `prefix`, by name."""
        found: dict[str, Holder] = {}
        command = self.command("", 0)[:-2]
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                words = _command_of(folder)
                if words[:-2] == command and words[-2].startswith(prefix):
                    found[words[-2]] = Holder(folder, words)
        return found


class Holder:
    """A process that holds memory.

    Raises:
        OSError: the process has ended, or another user owns it.
    """

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.pid = int(folder.name)
        self._process = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._process).atexit = False
        if folder.stat().st_uid != os.geteuid() or _command_of(folder) != words:
            raise HolderError(f"process {self.pid} is not a holder of this user")
        self._memory = folder / "fd" / words[-1]

    def open(self) -> int:
        """Return a new descriptor of the memory.

        Raises:
            OSError: the process has ended.
        """
        descriptor = os.open(self._memory, os.O_RDWR | os.O_CLOEXEC)
        if not self.is_alive:  # another process may have the same ID now
            os.close(descriptor)
            raise HolderError(f"process {self.pid} has ended")
        return descriptor

    @property
    def is_alive(self) -> bool:
        """Whether the process still holds the memory."""
        return not self._has_ended(0)

    def end(self) -> None:
        """End the process. The memory is freed as soon as no rank has it open."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        self._has_ended(20_000)

    def _has_ended(self, milliseconds: int) -> bool:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(milliseconds))


def parent_and_start(pid: int) -> tuple[int, int]:
    """Return the parent of a process, and the start time of the process in ticks since boot."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])


def _command_of(folder: Path) -> list[str]:
    """Return the command-line arguments of a process."""
    return [os.fsdecode(word) for word in (folder / "cmdline").read_bytes().split(b"\0")[1:-1]]


def _main(pid: str, start: str, *_: str) -> None:
    """Continue in a child that belongs to no rank, and end when the agent has ended. Print errors for the rank."""
    agent = os.pidfd_open(int(pid))
    if parent_and_start(int(pid))[1] != int(start):
        raise HolderError(f"process {pid} is not the agent")
    if os.fork():
        return
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)  # the rank waits until these pipes are closed
    select.select([agent], [], [])


if __name__ == "__main__":
    _main(*sys.argv[1:])
