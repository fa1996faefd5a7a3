"""Handshake: two ranks of one host authenticate each other and exchange the descriptors of their memory.

All ranks of a group have a key from the store, because every process in the network namespace can connect to an
abstract socket. Each end proves that it has the key, for nonces of both ends, before a descriptor is sent:

    connects    hello: own rank, wanted rank, a nonce
    listens         a nonce, and the proof of both nonces
    connects    the other proof
    listens         its descriptor
    connects    its own descriptor

A connection that sends anything else is closed, and listening continues.
"""

import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from shardlite.comm.shm.heap import Heap, Mapping, has_fixed_size

NUMBER = 32
"""Bytes of a nonce, of a proof, and of a key."""

_HELLO = struct.Struct(f"<8sII{NUMBER}s")  # magic, from, to, nonce
_MAGIC = b"shardlt1"
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_MOST = 128
"""Maximum number of open connections that have not proved the key."""


class StrangerError(OSError):
    """The other end is not a rank of this group, or violates the protocol."""


def connect(
    address: bytes, rank: int, peer: int, key: bytes, heap: Heap, deadline: float
) -> tuple[socket.socket, Mapping]:
    """Connect to rank `peer`. Return the connection and the peer's memory.

    Raises:
        OSError: there is no such rank, it does not answer in time, or another process answers.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_left(deadline))
        connection.connect(address)
        mine = secrets.token_bytes(NUMBER)
        connection.sendall(_HELLO.pack(_MAGIC, rank, peer, mine))
        answer = _receive(connection, 2 * NUMBER, deadline)
        theirs, proof = answer[:NUMBER], answer[NUMBER:]
        if not hmac.compare_digest(proof, _proof(key, b"listens", rank, peer, mine, theirs)):
            raise StrangerError(f"the process that answers for rank {peer} does not have the key of the group")
        connection.sendall(_proof(key, b"connects", rank, peer, mine, theirs))
        mapping = _take(connection, deadline)
        _give(connection, heap)
    except BaseException:
        connection.close()
        raise
    return connection, mapping


class Reception:
    """A listening rank, until all ranks that it expects have connected."""

    def __init__(self, listener: socket.socket, rank: int, expected: set[int], key: bytes, heap: Heap) -> None:
        self._listener = listener
        self._rank = rank
        self._expected = set(expected)
        self._key = key
        self._heap = heap
        self._guests: dict[int, _Guest] = {}
        self.refused = 0
        """Number of connections that were refused."""

    def run(self, deadline: float) -> dict[int, tuple[socket.socket, Mapping]]:
        """Return the connection and the memory of each expected rank.

        Raises:
            OSError: a rank does not connect in time; connections made so far are closed.
        """
        came: dict[int, tuple[socket.socket, Mapping]] = {}
        self._listener.setblocking(False)
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        try:
            while self._expected:
                for descriptor, _ in poll.poll(1000 * _left(deadline)):
                    if descriptor == self._listener.fileno():
                        self._welcome(poll.register)
                        continue
                    guest = self._guests[descriptor]
                    try:
                        if not guest.listen(self._rank, self._expected, self._key):
                            continue
                        poll.unregister(descriptor)
                        del self._guests[descriptor]
                        came[guest.rank] = guest.connection, guest.swap(self._heap, deadline)
                        self._expected.discard(guest.rank)
                    except OSError:
                        if self._guests.pop(descriptor, None) is not None:
                            poll.unregister(descriptor)
                        guest.connection.close()
                        self.refused += 1
        except BaseException as error:
            for connection, _ in came.values():
                connection.close()
            if isinstance(error, TimeoutError):
                late = ", ".join(map(str, sorted(self._expected)))
                raise OSError(
                    f"rank {late} did not connect in time; {self.refused} foreign connections were closed"
                ) from None
            raise
        finally:
            for guest in self._guests.values():
                guest.connection.close()
        return came

    def _welcome(self, register: Callable[[int, int], None]) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            connection = self._listener.accept()[0]
            if len(self._guests) >= _MOST or not _is_same_user(connection):
                connection.close()
                self.refused += 1
                return
            connection.setblocking(False)
            self._guests[connection.fileno()] = _Guest(connection)
            register(connection.fileno(), select.POLLIN)


class _Guest:
    """A connection that is not authenticated yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank = -1
        self._said = b""
        self._wanted = b""
        """The expected proof, after the hello."""

    def listen(self, here: int, expected: set[int], key: bytes) -> bool:
        """Receive data. Return whether the connection has proved the key.

        Raises:
            OSError: it violates the protocol, or has closed.
        """
        length = NUMBER if self._wanted else _HELLO.size
        more = self.connection.recv(length - len(self._said))
        if not more:
            raise StrangerError("closed the connection")
        self._said += more
        if len(self._said) < length:
            return False
        said, self._said = self._said, b""
        if self._wanted:
            if not hmac.compare_digest(said, self._wanted):
                raise StrangerError("a wrong proof")
            return True
        magic, rank, wants, theirs = _HELLO.unpack(said)
        if magic != _MAGIC or wants != here or rank not in expected:
            raise StrangerError("a wrong hello")
        self.rank, mine = rank, secrets.token_bytes(NUMBER)
        self._wanted = _proof(key, b"connects", rank, here, theirs, mine)
        self.connection.sendall(mine + _proof(key, b"listens", rank, here, theirs, mine))
        return False

    def swap(self, heap: Heap, deadline: float) -> Mapping:
        """Send this rank's memory descriptor, and receive the other's."""
        _give(self.connection, heap)
        return _take(self.connection, deadline)


def _proof(key: bytes, side: bytes, rank: int, peer: int, first: bytes, second: bytes) -> bytes:
    return hmac.digest(key, b"%s %d %d " % (side, rank, peer) + first + second, "sha256")


def _is_same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


def _receive(connection: socket.socket, length: int, deadline: float) -> bytes:
    said = b""
    while len(said) < length:
        connection.settimeout(_left(deadline))
        more = connection.recv(length - len(said))
        if not more:
            raise StrangerError("the other end closed the connection")
        said += more
    return said


def _give(connection: socket.socket, heap: Heap) -> None:
    connection.setblocking(True)
    socket.send_fds(connection, [b"\0"], [heap.descriptor])


def _take(connection: socket.socket, deadline: float) -> Mapping:
    """Receive a descriptor and map its memory, whose size is sealed."""
    connection.settimeout(_left(deadline))
    said, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    try:
        if len(said) != 1 or len(descriptors) != 1:
            raise StrangerError("the other end gave no memory")
        if not has_fixed_size(descriptors[0]):
            raise StrangerError("the other end gave memory whose size may change")
        return Mapping(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _left(deadline: float) -> float:
    """Return the seconds until `deadline`.

    Raises:
        TimeoutError: there are none.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("time is up")
    return left
