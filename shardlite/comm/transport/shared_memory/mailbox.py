"""Mailboxes in shared memory: announcements of messages between ranks of one host, and receipts for them.

Each rank has control words at the start of its heap. Among the control words of a rank, each other rank has separate
words, to which only this other rank writes. The bell is the only word with several writers:

    bell | whether this rank has failed | per peer: how many of its announcements were read | per peer: announcements

The content of an announcement is written before its number. x86 preserves the order of writes, so a rank that reads the
number also reads the right content. The place of an announcement is reused after the announcement was read, and every
waiting rank reads all announcements. Receipts are separate words in the sender's heap, which mark messages that the
receiver has taken. So any number of messages may be open, and messages may be taken in any order.

A waiting rank sleeps until its bell changes (Linux's `futex`). Every ring writes a value that differs from all
values that any rank has written. So a sleeping rank wakes up even if two ranks ring at the same time.
"""

import ctypes
import platform
import struct
import sys
from collections import deque
from typing import NamedTuple
from zlib import crc32

from shardlite.comm.transport.shared_memory.heap import Mapping
from shardlite.errors import CommError

PLACES = 256
"""Maximum number of unread announcements from one rank to another."""

RECEIPTS = 1 << 20
"""Maximum number of open messages of one rank."""

_WORDS = 10  # words per announcement: number, checksum and content
_CONTENT = struct.Struct("<IIQQQ")  # tag, kind, offset, bytes, receipt
_BELL, _QUIT, _FIRST = 0, 1, 16

_FUTEX, _WAIT, _WAKE, _EVERYBODY = 202, 0, 1, 0x7FFFFFFF  # 202 is the system call on x86-64


def why_unavailable() -> str:
    """Return why this machine does not support shared memory, or `""`.

    Processors other than x86 may reorder writes, so another process may see a flag before the data that the flag
    announces. This would require memory barriers, which Python does not provide.
    """
    if sys.platform != "linux":
        return f"requires Linux, this is {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"requires an x86-64 processor, which preserves the order of writes; this is {platform.machine()}"
    return ""


_system = ctypes.CDLL(None, use_errno=False).syscall if not why_unavailable() else None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Announcement(NamedTuple):
    """Description of a message in the heap of its sender."""

    number: int
    """Number of the message among this sender's messages to this rank, from 1."""

    tag: int
    kind: int
    """Checksum of the message's dtype."""

    offset: int
    nbytes: int
    receipt: int
    """Byte offset of the receipt in the sender's heap. The receiver sets the receipt to `number` to sign it."""


def control_nbytes(world_size: int) -> int:
    """Return the bytes of a rank's control words and receipts. Unused receipts take no pages."""
    return 4 * (_control_words(world_size) + RECEIPTS)


class Control:
    """The control words of the rank that owns `mapping`, as accessed by rank `user`."""

    def __init__(self, mapping: Mapping, user: int, world_size: int) -> None:
        count = _control_words(world_size)
        self._words = mapping.words(0, count)
        self._bytes = memoryview(mapping.memory)[: 4 * count]
        self.nbytes = 4 * count
        self._bell = mapping.address + 4 * _BELL
        self._places = _FIRST + world_size
        self._user = user
        self._step = world_size
        self._next_ring = user + 1
        self._unannounced: deque[Announcement] = deque()

    # ---- by the owner ---------------------------------------------------------------------------------------------

    def bell(self) -> int:
        """Return the value of the bell."""
        return self._words[_BELL]

    def sleep(self, heard: int, seconds: float) -> None:
        """Sleep until the bell's value differs from `heard`, for at most `seconds`. Other threads can run meanwhile."""
        assert _system is not None, "see why_unavailable()"
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        _system(_FUTEX, ctypes.c_void_p(self._bell), _WAIT, ctypes.c_uint(heard), ctypes.byref(limit), None, 0)

    def read(self, source: int, number: int) -> Announcement | None:
        """Return announcement `number` of rank `source`, or `None` if it is not written yet.

        The announcements of a rank must be read in order.

        Raises:
            ValueError: the announcement is damaged.
        """
        place = self._announcement(source, number)
        if self._words[place] != number & 0xFFFFFFFF:
            return None
        content = bytes(self._bytes[4 * place + 8 : 4 * place + 8 + _CONTENT.size])
        if self._words[place + 1] != _checksum(number, content):
            raise ValueError(f"the header of its message {number} is damaged")
        self._words[_FIRST + source] = number & 0xFFFFFFFF
        return Announcement(number, *_CONTENT.unpack(content))

    def quit(self) -> None:
        """Mark the owner as failed."""
        self._words[_QUIT] = 1

    # ---- by others ------------------------------------------------------------------------------------------------

    @property
    def has_quit(self) -> bool:
        """Whether the owner has failed."""
        return self._words[_QUIT] != 0

    def has_place(self, number: int) -> bool:
        """Return whether the place of announcement `number` of the user is free."""
        return (number - self._words[_FIRST + self._user]) & 0xFFFFFFFF <= PLACES

    def announce(self, *messages: Announcement) -> bool:
        """Announce messages of the user to the owner, after earlier messages that still wait for a free place.

        A waiting owner reads all announcements, so messages can be taken in any order. Return whether any message was
        announced. Then the user must `ring`.
        """
        before = len(self._unannounced) + len(messages)
        self._unannounced.extend(messages)
        while self._unannounced and self.has_place(self._unannounced[0].number):
            message = self._unannounced.popleft()
            place = self._announcement(self._user, message.number)
            content = _CONTENT.pack(*message[1:])
            self._bytes[4 * place + 8 : 4 * place + 8 + _CONTENT.size] = content
            self._words[place + 1] = _checksum(message.number, content)
            # The number is written after the content, because the number makes the content visible.
            self._words[place] = message.number & 0xFFFFFFFF
        return len(self._unannounced) < before

    def ring(self) -> None:
        """Wake the owner, or keep the owner from falling asleep. Not thread-safe."""
        assert _system is not None, "see why_unavailable()"
        self._words[_BELL] = self._next_ring & 0xFFFFFFFF
        self._next_ring += self._step
        _system(_FUTEX, ctypes.c_void_p(self._bell), _WAKE, _EVERYBODY, None, None, 0)

    def _announcement(self, source: int, number: int) -> int:
        return self._places + (source * PLACES + number % PLACES) * _WORDS


class Receipts:
    """Receipts, stored after the control words of this rank's heap. A rank that takes a message signs its receipt."""

    def __init__(self, mapping: Mapping, world_size: int) -> None:
        start = _control_words(world_size)
        self._start = start
        self._words = mapping.words(4 * start, RECEIPTS)
        self._used = 0  # number of receipts ever used; the other receipts have no pages
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all receipts ever used."""
        return 4 * self._used

    def open(self, number: int) -> int:
        """Return the byte offset of a receipt for message `number`. Not thread-safe.

        Raises:
            CommError: too many messages are open.
        """
        if self._free:
            place = self._free.pop()
        elif self._used < RECEIPTS:
            place, self._used = self._used, self._used + 1
        else:
            raise CommError(f"{RECEIPTS} messages of this rank are open. Wait for some of them, or send longer ones")
        self._words[place] = (number - 1) & 0xFFFFFFFF
        return 4 * (self._start + place)

    def is_signed(self, receipt: int, number: int) -> bool:
        """Return whether message `number` was taken."""
        return self._words[receipt // 4 - self._start] == number & 0xFFFFFFFF

    def close(self, receipt: int) -> None:
        """Free a receipt, so that another message can use it."""
        self._free.append(receipt // 4 - self._start)


def _control_words(world_size: int) -> int:
    return _FIRST + world_size * (1 + PLACES * _WORDS)


def _checksum(number: int, content: bytes) -> int:
    return crc32(content, number & 0xFFFFFFFF)
