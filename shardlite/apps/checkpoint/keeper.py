"""The keeper: a process that holds the memory of ranks while they end and are started again.

Each host has one per agent of `torchrun`. A rank starts it. It belongs to no rank's process group, so that it is not
ended with the ranks, and ends by itself when the agent has ended, in whatever way: then the memory, which has no name
in a file system, is gone with it. It holds descriptors only and maps nothing.

    rank      connects, and asks the system which process listens: one of this user
    keeper    asks the system which process has connected: one of this user that descends from the agent
    rank      a request {"do": ..., ...}, with a descriptor for `keep`
    keeper    an answer, with the descriptor for `give`

What the system says of a process needs no key, which would have to outlive the store of an attempt.

This file is executed as a script, too, and imports the standard library only: the process starts in some 20 ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CREDENTIALS = struct.Struct("iII")  # process, user, group
_LONGEST = 1 << 16
"""Bytes of a message."""

_MOST = 1024
"""Maximum number of ranks that are connected."""

_PATIENCE = 20.0
"""Seconds for an answer."""

_RUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that `torchrun` gives to ranks, and does not have itself."""


class KeeperError(OSError):
    """There is no keeper, or it does not answer as one."""


# ---- processes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agent:
    """The process that starts the ranks of this host again when one of them has failed."""

    pid: int
    start: int
    """When it was started, in ticks since the system was: another process may get its number later."""

    @classmethod
    def of_this_process(cls) -> Agent:
        """Return the agent that has started this rank: the nearest ancestor outside of the run.

        Raises:
            KeeperError: `torchrun` has not started this process.
        """
        run = os.environ.get(_RUN)
        if run is None:
            raise KeeperError("torchrun has not started this process, so nothing would start it again")
        mark, pid = f"{_RUN}={run}".encode(), os.getppid()
        while pid > 1 and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            pid = _stat(pid)[0]
        if pid == 1 and b"torch" not in Path("/proc/1/cmdline").read_bytes():
            raise KeeperError("torchrun has ended before this process")
        return cls(pid, _stat(pid)[1])

    @property
    def address(self) -> bytes:
        """Where its keeper listens. Abstract: there is no file. Numbers of processes are those of a namespace."""
        space = os.readlink("/proc/self/ns/pid")
        return f"\0shardlite-keeper-{os.geteuid()}-{space}-{self.pid}-{self.start}".encode()

    def has_started(self, pid: int) -> bool:
        """Return whether a process descends from it."""
        with contextlib.suppress(OSError):
            while pid > 1 and pid != self.pid:
                pid = _stat(pid)[0]
        return pid == self.pid


def _stat(pid: int) -> tuple[int, int]:
    """Return the parent of a process, and when it was started, in ticks since the system was."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(said)
    return pid, user


# ---- as a rank sees it ----------------------------------------------------------------------------------------------


class Keeper:
    """The keeper of this rank's agent.

    Args:
        agent: the agent.

    Raises:
        KeeperError: there is none.
    """

    def __init__(self, agent: Agent) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.settimeout(_PATIENCE)
            self._connection.connect(agent.address)
            pid, user = _peer(self._connection)
            if user != os.geteuid() or pid == 0:
                raise KeeperError(f"process {pid} of user {user} answers in the place of the keeper")
        except OSError as error:
            self._connection.close()
            raise error if isinstance(error, KeeperError) else KeeperError(f"there is no keeper: {error}") from error
        self.pid = pid
        weakref.finalize(self, self._connection.close)

    @classmethod
    def start(cls, agent: Agent) -> Keeper:
        """Return the keeper, after starting one if there is none."""
        with contextlib.suppress(KeeperError):
            return cls(agent)
        command = [sys.executable, "-I", "-S", __file__, str(agent.pid), str(agent.start)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True, check=False
        )
        why = done.stderr.strip().rpartition("\n")[2]  # of a traceback
        if done.returncode or why:
            raise KeeperError(f"the keeper could not be started: {why}")
        return cls(agent)

    @property
    def is_alive(self) -> bool:
        """Whether it holds what it was given."""
        if self._connection.fileno() < 0:
            return False
        self._connection.setblocking(False)
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self._connection.settimeout(_PATIENCE)

    def names(self) -> list[str]:
        """Return the names of what it holds."""
        return list(self._ask({"do": "names"})[0])

    def keep(self, name: str, descriptor: int) -> None:
        """Let it hold memory under a name, in the place of what had that name."""
        self._ask({"do": "keep", "name": name}, descriptor)

    def give(self, name: str) -> int | None:
        """Return a descriptor of memory that it holds, or `None` if there is none of that name."""
        return self._ask({"do": "give", "name": name})[1]

    def keep_only(self, names: Collection[str], prefix: str) -> None:
        """Let it drop everything whose name begins with `prefix`, except `names`."""
        self._ask({"do": "keep_only", "names": list(names), "prefix": prefix})

    def _ask(self, request: dict[str, Any], *descriptors: int) -> tuple[Any, int | None]:
        try:
            socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
            said, given, _, _ = socket.recv_fds(self._connection, _LONGEST, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise KeeperError(f"the keeper does not answer: {error}") from error
        if not said:
            raise KeeperError("the keeper is gone, or takes this process for one that the agent has not started")
        return json.loads(said), next(iter(given), None)

    def close(self) -> None:
        """Disconnect. It goes on."""
        self._connection.close()


# ---- the process ----------------------------------------------------------------------------------------------------


class _Serving:
    """What the keeper holds, and its connections."""

    def __init__(self, agent: Agent, listener: socket.socket, ended: int) -> None:
        self._agent = agent
        self._listener = listener
        self._ended = ended
        self._held: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(ended, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Answer until the agent has ended."""
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._ended in ready:
                return
            for each in ready:
                if each is self._listener:
                    self._welcome()
                elif isinstance(each, socket.socket):
                    self._answer(each)

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            connection = self._listener.accept()[0]
            pid, user = _peer(connection)
            full = len(self._selector.get_map()) > _MOST
            if user != os.geteuid() or full or not self._agent.has_started(pid):
                connection.close()
                return
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> None:
        """Do what a rank asks for, or disconnect it."""
        descriptors: list[int] = []
        try:
            said, descriptors, _, _ = socket.recv_fds(connection, _LONGEST, 1, socket.MSG_CMSG_CLOEXEC)
            if not said:
                raise EOFError
            self._do(connection, json.loads(said), descriptors)
        except BlockingIOError:
            return
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            self._selector.unregister(connection)
            connection.close()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _do(self, connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
        answer: Any = None
        given: list[int] = []
        if request["do"] == "names":
            answer = list(self._held)
        elif request["do"] == "keep":
            self._drop(request["name"])
            self._held[request["name"]] = descriptors.pop()
        elif request["do"] == "give":
            given = [self._held[request["name"]]] if request["name"] in self._held else []
        elif request["do"] == "keep_only":
            for name in self._held.keys() - set(request["names"]):
                if name.startswith(request["prefix"]):
                    self._drop(name)
        socket.send_fds(connection, [json.dumps(answer).encode()], given)

    def _drop(self, name: str) -> None:
        if name in self._held:
            os.close(self._held.pop(name))


def _listen(agent: Agent) -> socket.socket | None:
    """Return a socket that listens, or `None` if something else does: a rank that connects sees what it is."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(agent.address)
    except OSError:
        return None
    listener.listen(_MOST)
    listener.setblocking(False)
    return listener


def _be_the_keeper(agent: Agent, ready: int) -> None:
    """Listen, let the process that waits for `ready` go on, and answer until the agent has ended."""
    ended = os.pidfd_open(agent.pid)
    if _stat(agent.pid)[1] != agent.start:
        raise KeeperError(f"process {agent.pid} is another one than the agent")
    listener = _listen(agent)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    os.chdir("/")
    os.close(ready)
    if listener is not None:
        _Serving(agent, listener, ended).run()


def _main(pid: str, start: str) -> None:
    """Start the keeper as a child of no rank, and wait until it listens. Its errors go to this process's stderr."""
    waits, ready = os.pipe()
    if os.fork():
        os.close(ready)
        os.read(waits, 1)
        return
    os.close(waits)
    _be_the_keeper(Agent(int(pid), int(start)), ready)


if __name__ == "__main__":
    _main(*sys.argv[1:])
