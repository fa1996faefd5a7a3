"""What ranks of one host tell each other in shared memory: where a message lies, and that it was taken.

Each rank has a page of control words at the start of its heap. Others write to it where it says so, each to a place of
its own, so that no word has two writers but the bell:

    bell | whether this rank has given up | per peer: how many announcements it has read | per peer: announcements

An announcement is written before its number is, and x86 shows writes to others in their order: who sees the number sees
the rest. A place is written again once it was read, which takes no more than a rank that waits for anything. When a
message was taken is told elsewhere, by its receipt: a word in the heap of its sender. So any number of messages may be
open, and be taken in any order. The bell's word is one that its writer never wrote before, so whoever went to sleep on
an older one wakes up, even if two ring at once.
"""

import struct
from typing import NamedTuple
from zlib import crc32

from shardlite.comm.shm import futex
from shardlite.comm.shm.heap import Mapping
from shardlite.errors import CommError

PLACES = 256
"""Announcements to one rank that it may have left unread."""

RECEIPTS = 1 << 20
"""Messages of one rank that may be open."""

_WORDS = 10  # per announcement: its number, a checksum, and what follows
_CONTENT = struct.Struct("<IIQQQ")  # tag, kind, offset, bytes, receipt
_BELL, _QUIT, _FIRST = 0, 1, 16


class Announcement(NamedTuple):
    """A message that lies in the heap of its sender."""

    number: int
    """Of this sender's messages to this rank, from 1."""

    tag: int
    kind: int
    """A checksum of what it consists of."""

    offset: int
    nbytes: int
    receipt: int
    """Where in the heap of its sender the word lies that becomes its number when it was taken."""


def control_nbytes(world_size: int) -> int:
    """Return the bytes of a rank's control words and receipts. Receipts that were never used take no memory."""
    return 4 * (_control_words(world_size) + RECEIPTS)


class Control:
    """The control words of the rank that `mapping` is of, its owner, as rank `user` sees them."""

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

    # ---- of the owner ---------------------------------------------------------------------------------------------

    def bell(self) -> int:
        """Return the word of the bell."""
        return self._words[_BELL]

    def sleep(self, heard: int, seconds: float) -> None:
        """Sleep until the bell's word is another than was `heard`, for `seconds` at most."""
        futex.sleep(self._bell, heard, seconds)

    def read(self, source: int, number: int) -> Announcement | None:
        """Return announcement `number` of rank `source`, if it is there; they are read in their order.

        Raises:
            ValueError: it is damaged.
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
        """Say that the owner takes no more part."""
        self._words[_QUIT] = 1

    # ---- of others ------------------------------------------------------------------------------------------------

    @property
    def has_quit(self) -> bool:
        """Whether the owner takes no more part."""
        return self._words[_QUIT] != 0

    def has_place(self, number: int) -> bool:
        """Whether the owner has read what was where the user's message `number` is to be announced."""
        return (number - self._words[_FIRST + self._user]) & 0xFFFFFFFF <= PLACES

    def announce(self, message: Announcement) -> None:
        """Tell the owner of a message of the user."""
        place = self._announcement(self._user, message.number)
        content = _CONTENT.pack(*message[1:])
        self._bytes[4 * place + 8 : 4 * place + 8 + _CONTENT.size] = content
        self._words[place + 1] = _checksum(message.number, content)
        self._words[place] = message.number & 0xFFFFFFFF  # last: it makes the rest visible
        self.ring()

    def ring(self) -> None:
        """Wake the owner, or keep it from going to sleep. One thread of the user at a time."""
        self._words[_BELL] = self._next_ring & 0xFFFFFFFF
        self._next_ring += self._step
        futex.wake(self._bell)

    def _announcement(self, source: int, number: int) -> int:
        return self._places + (source * PLACES + number % PLACES) * _WORDS


class Receipts:
    """The words in this rank's heap, behind its control words, that others write to once they have taken a message."""

    def __init__(self, mapping: Mapping, world_size: int) -> None:
        start = _control_words(world_size)
        self._start = start
        self._words = mapping.words(4 * start, RECEIPTS)
        self._used = 0  # ever: what lies behind has no pages
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of those that were ever used."""
        return 4 * self._used

    def open(self, number: int) -> int:
        """Return where the receipt of message `number` is to be written. One thread at a time.

        Raises:
            CommError: there are too many.
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
        """Whether message `number` was taken."""
        return self._words[receipt // 4 - self._start] == number & 0xFFFFFFFF

    def close(self, receipt: int) -> None:
        """Let it be the receipt of another message."""
        self._free.append(receipt // 4 - self._start)


def _control_words(world_size: int) -> int:
    return _FIRST + world_size * (1 + PLACES * _WORDS)


def _checksum(number: int, content: bytes) -> int:
    return crc32(content, number & 0xFFFFFFFF)
