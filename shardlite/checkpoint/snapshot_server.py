"""A process that holds the memory of snapshots while ranks end and are restarted.

Each agent of `torchrun`, one per host, has one server. A rank starts it in a session of its own, so that it does not
end with the ranks. It ends when the agent has ended, however that ends; the memory has no name in a file system and is
freed then. It holds file descriptors only and maps nothing.

    rank      connects, and asks the system which process listens: one of this user
    server    asks the system which process has connected: one of this user that descends from the agent
    rank      sends a request {"do": ..., ...}, with a descriptor for `put`
    server    answers, with a descriptor for `get`

The system identifies processes, so no key is needed, which would have to outlive the store of an attempt.

This file is also executed as a script, and imports the standard library only, to start in about 20 ms.
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
_MESSAGE_BYTES = 1 << 16
_MAX_CONNECTIONS = 1024
_TIMEOUT = 20.0
"""Seconds to wait for an answer."""

_RUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that ranks get from `torchrun`, which does not have it itself."""


class ServerError(OSError):
    """There is no server, or it does not answer."""


# ---- processes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agent:
    """The process that restarts the ranks of this host."""

    pid: int
    start: int
    """Its start in ticks since boot, because another process may get its number later."""

    @classmethod
    def of_this_process(cls) -> Agent:
        """Return the agent that has started this rank: the nearest ancestor outside of the run.

        Raises:
            ServerError: `torchrun` did not start this process.
        """
        run = os.environ.get(_RUN)
        if run is None:
            raise ServerError("torchrun did not start this process, so nothing would restart it")
        mark, pid = f"{_RUN}={run}".encode(), os.getppid()
        while pid > 1 and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            pid = parent_and_start(pid)[0]
        if pid == 1 and b"torch" not in Path("/proc/1/cmdline").read_bytes():
            raise ServerError("torchrun has ended before this process")
        return cls(pid, parent_and_start(pid)[1])

    @property
    def address(self) -> bytes:
        """Abstract address of its server, which needs no file. Process numbers belong to a namespace."""
        namespace = os.readlink("/proc/self/ns/pid")
        return f"\0shardlite-snapshots-{os.geteuid()}-{namespace}-{self.pid}-{self.start}".encode()

    def is_ancestor_of(self, pid: int) -> bool:
        """Return whether a process descends from the agent."""
        with contextlib.suppress(OSError):
            while pid > 1 and pid != self.pid:
                pid = parent_and_start(pid)[0]
        return pid == self.pid


def parent_and_start(pid: int) -> tuple[int, int]:
    """Return the parent of a process, and its start in ticks since boot."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user


# ---- client ---------------------------------------------------------------------------------------------------------


class SnapshotServer:
    """Connection of a rank to the server of its agent.

    Args:
        agent: the agent.

    Raises:
        ServerError: there is none.
    """

    def __init__(self, agent: Agent) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.settimeout(_TIMEOUT)
            self._connection.connect(agent.address)
            pid, user = _peer(self._connection)
            if user != os.geteuid() or pid == 0:
                raise ServerError(f"process {pid} of user {user} answers instead of the snapshot server")
        except OSError as error:
            self._connection.close()
            raise error if isinstance(error, ServerError) else ServerError(f"no snapshot server: {error}") from error
        self.pid = pid
        weakref.finalize(self, self._connection.close)

    @classmethod
    def start(cls, agent: Agent) -> SnapshotServer:
        """Connect to the server, and start it if there is none."""
        with contextlib.suppress(ServerError):
            return cls(agent)
        command = [sys.executable, "-I", "-S", __file__, str(agent.pid), str(agent.start)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True, check=False
        )
        reason = done.stderr.strip().rpartition("\n")[2]  # of a traceback
        if done.returncode or reason:
            raise ServerError(f"the snapshot server could not be started: {reason}")
        return cls(agent)

    @property
    def is_alive(self) -> bool:
        """Whether it still holds what was put there."""
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
            self._connection.settimeout(_TIMEOUT)

    def names(self) -> list[str]:
        """Return the names of all memory that it holds."""
        return list(self._request({"do": "names"})[0])

    def put(self, name: str, descriptor: int) -> None:
        """Let it hold memory under a name, instead of earlier memory of that name."""
        self._request({"do": "put", "name": name}, descriptor)

    def get(self, name: str) -> int | None:
        """Return a descriptor of the memory of a name, or `None` if there is none."""
        return self._request({"do": "get", "name": name})[1]

    def retain(self, names: Collection[str], prefix: str) -> None:
        """Drop all memory whose name begins with `prefix`, except `names`."""
        self._request({"do": "retain", "names": list(names), "prefix": prefix})

    def _request(self, request: dict[str, Any], *descriptors: int) -> tuple[Any, int | None]:
        try:
            socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
            answer, received, _, _ = socket.recv_fds(self._connection, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise ServerError(f"the snapshot server does not answer: {error}") from error
        if not answer:
            raise ServerError("the snapshot server has ended, or refuses a process that the agent did not start")
        return json.loads(answer), next(iter(received), None)

    def close(self) -> None:
        """Disconnect. The server continues."""
        self._connection.close()


# ---- server ---------------------------------------------------------------------------------------------------------


class _Server:
    """Held memory and connections."""

    def __init__(self, agent: Agent, listener: socket.socket, ended: int) -> None:
        self._agent = agent
        self._listener = listener
        self._ended = ended
        self._held: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(ended, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Answer until the agent has ended."""
        while True:
            ready = [key.fileobj for key, _ in self._selector.select()]
            if self._ended in ready:
                return
            for each in ready:
                if each is self._listener:
                    self._accept()
                elif isinstance(each, socket.socket):
                    self._answer(each)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection = self._listener.accept()[0]
            pid, user = _peer(connection)
            full = len(self._selector.get_map()) > _MAX_CONNECTIONS
            if user != os.geteuid() or full or not self._agent.is_ancestor_of(pid):
                connection.close()
                return
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> None:
        """Answer a request of a rank, or disconnect it."""
        descriptors: list[int] = []
        try:
            request, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not request:
                raise EOFError
            answer, found = self._do(json.loads(request), descriptors)
            socket.send_fds(connection, [json.dumps(answer).encode()], found)
        except BlockingIOError:
            return
        except (OSError, EOFError, ValueError, LookupError, TypeError):
            self._selector.unregister(connection)
            connection.close()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _do(self, request: dict[str, Any], descriptors: list[int]) -> tuple[Any, list[int]]:
        """Return the answer to a request, and the descriptors to send."""
        if request["do"] == "names":
            return list(self._held), []
        if request["do"] == "put":
            self._drop(request["name"])
            self._held[request["name"]] = descriptors.pop()
        elif request["do"] == "get":
            return None, [self._held[request["name"]]] if request["name"] in self._held else []
        elif request["do"] == "retain":
            for name in self._held.keys() - set(request["names"]):
                if name.startswith(request["prefix"]):
                    self._drop(name)
        return None, []

    def _drop(self, name: str) -> None:
        if name in self._held:
            os.close(self._held.pop(name))


def _listen(agent: Agent) -> socket.socket | None:
    """Return a listening socket, or `None` if another process listens; ranks check which process that is."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(agent.address)
    except OSError:
        return None
    listener.listen(_MAX_CONNECTIONS)
    listener.setblocking(False)
    return listener


def _serve(agent: Agent, ready: int) -> None:
    """Listen, close `ready`, and answer until the agent has ended."""
    ended = os.pidfd_open(agent.pid)
    if parent_and_start(agent.pid)[1] != agent.start:
        raise ServerError(f"process {agent.pid} is not the agent")
    listener = _listen(agent)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.close(null)
    os.chdir("/")
    os.close(ready)
    if listener is not None:
        _Server(agent, listener, ended).serve()


def _main(pid: str, start: str) -> None:
    """Start the server as a child of no rank, and wait until it listens. Its errors go to this process's stderr."""
    waits, ready = os.pipe()
    if os.fork():
        os.close(ready)
        os.read(waits, 1)
        return
    os.close(waits)
    _serve(Agent(int(pid), int(start)), ready)


if __name__ == "__main__":
    _main(*sys.argv[1:])
