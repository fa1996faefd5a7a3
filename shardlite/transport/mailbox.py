"""What ranks of one host tell each other in shared memory: where a message lies, and that it was taken.

Each rank has a page of control words at the start of its heap. Others write to it where it says so, each to a place of
its own, so that no word has two writers but the bell:

    bell | whether this rank has given up | per peer: announcements of its messages | per peer: which were taken

An announcement is written before its number is, and x86 shows writes to others in their order: who sees the number sees
the rest. A place is written again only after its message was taken. The bell's word is one that its writer never wrote
before, so whoever went to sleep on an older one wakes up, even if two ring at once.
"""

import struct
from typing import NamedTuple
from zlib import crc32

from shardlite.transport import futex
from shardlite.transport.heap import Mapping

PLACES = 256
"""Announcements that one rank can have open with another."""

_WORDS = 8  # per announcement: its number, a checksum, and what follows
_CONTENT = struct.Struct("<IIQQ")  # tag, kind, offset, bytes
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


def control_nbytes(world_size: int) -> int:
    """Return the bytes of a rank's control words."""
    return 4 * (_FIRST + world_size * PLACES * (_WORDS + 1))


class Control:
    """The control words of the rank that `mapping` is of, its owner, as rank `user` sees them."""

    def __init__(self, mapping: Mapping, user: int, world_size: int) -> None:
        count = control_nbytes(world_size) // 4
        self._words = mapping.words(0, count)
        self._bytes = memoryview(mapping.memory)[: 4 * count]
        self._bell = mapping.address + 4 * _BELL
        self._taken = _FIRST + world_size * PLACES * _WORDS
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

    def arrived(self, source: int, number: int) -> Announcement | None:
        """Return message `number` of rank `source`, if it has been announced.

        Raises:
            ValueError: its header is damaged.
        """
        place = self._announcement(source, number)
        if self._words[place] != number & 0xFFFFFFFF:
            return None
        content = bytes(self._bytes[4 * place + 8 : 4 * place + 8 + _CONTENT.size])
        if self._words[place + 1] != _checksum(number, content):
            raise ValueError(f"the header of its message {number} is damaged")
        return Announcement(number, *_CONTENT.unpack(content))

    def take(self, source: int, number: int) -> None:
        """Say that message `number` of rank `source` may be overwritten."""
        self._words[self._taken + source * PLACES + number % PLACES] = number & 0xFFFFFFFF

    def quit(self) -> None:
        """Say that the owner takes no more part."""
        self._words[_QUIT] = 1

    # ---- of others ------------------------------------------------------------------------------------------------

    @property
    def has_quit(self) -> bool:
        """Whether the owner takes no more part."""
        return self._words[_QUIT] != 0

    def announce(self, message: Announcement) -> None:
        """Tell the owner of a message of the user."""
        place = self._announcement(self._user, message.number)
        content = _CONTENT.pack(message.tag, message.kind, message.offset, message.nbytes)
        self._bytes[4 * place + 8 : 4 * place + 8 + _CONTENT.size] = content
        self._words[place + 1] = _checksum(message.number, content)
        self._words[place] = message.number & 0xFFFFFFFF  # last: it makes the rest visible
        self.ring()

    def was_taken(self, number: int) -> bool:
        """Whether the owner needs the user's message `number` no more: it has taken that one, or a later one there."""
        last = self._words[self._taken + self._user * PLACES + number % PLACES]
        return number < 1 or (last - number) & 0xFFFFFFFF < 0x80000000

    def ring(self) -> None:
        """Wake the owner, or keep it from going to sleep. One thread of the user at a time."""
        self._words[_BELL] = self._next_ring & 0xFFFFFFFF
        self._next_ring += self._step
        futex.wake(self._bell)

    def _announcement(self, source: int, number: int) -> int:
        return _FIRST + (source * PLACES + number % PLACES) * _WORDS


def _checksum(number: int, content: bytes) -> int:
    return crc32(content, number & 0xFFFFFFFF)
