"""Talks: how ranks agree on gathers that no agenda foresaw, and find out that they do different things.

In a round every rank says what it wants to gather next, or that its pass is over. All then gather one of the wanted
units, the first in the order of registration (in a backward the last): those who wanted it go on, the others talk
again. When the pass is over for all, it is over.

    round   rank 0 wants   rank 1 wants   gathered by both
    1       blocks.0       blocks.2       blocks.0
    2       blocks.1       blocks.2       blocks.1
    3       blocks.2       blocks.2       blocks.2
    4       (end)          (end)

The messages are some integers on the host, whatever device the weights are on.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import count
from typing import NoReturn
from zlib import crc32

import torch

from shardlite.comm import Shared, all_gather
from shardlite.errors import DesyncError

END = -1
"""Wanted by a rank whose pass is over."""


@dataclass(frozen=True)
class Word:
    """What a rank says in a round."""

    wants: int
    """The unit that it wants to gather next, by its index, or `END`."""

    kind: int
    """A checksum of the kind of its pass."""

    step: int
    """How many steps it has taken."""

    needed: int
    """At the end of its pass: how many gathers it has needed."""


class Talks:
    """The talks of one wrapped model, one after the other, with the ranks that share it."""

    def __init__(self, shared: Shared, names: Sequence[str]) -> None:
        self._shared = shared
        self._names = names
        self._rounds = count()

    def agree(self, wants: int, kind: str, needed: int, prefer: Callable[[Sequence[int]], int]) -> "Round":
        """Take part in one round; `prefer` chooses among what is wanted.

        Raises:
            DesyncError: ranks are in different passes, or have taken different numbers of steps.
            CommError: a peer failed or is late.
        """
        mine = Word(wants, crc32(kind.encode()) & 0x7FFFFFFF, self._shared.steps.taken, needed)
        words = [
            Word(*row)
            for row in self._exchange(
                astuple(mine), "the next gather", f"{self._wish(mine, kind)}, at step {mine.step}"
            )
        ]
        self._compare(words, kind)
        wanted = sorted({word.wants for word in words} - {END})
        return Round(prefer(wanted) if wanted else END, [word.needed for word in words])

    def lists(self, mine: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Return the list of every rank; `lengths` are theirs."""
        padded = [*mine, *[0] * (max(lengths) - len(mine))]
        rows = self._exchange(padded, "the gathers of a pass", "its end") if padded else [[] for _ in lengths]
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _exchange(self, mine: Sequence[int], what: str, during: str) -> list[list[int]]:
        hosts = self._shared.traffic.counted(self._shared.hosts[0], "talks")
        full = torch.zeros(hosts.world_size, len(mine), dtype=torch.int32)
        full[hosts.rank] = torch.tensor(mine, dtype=torch.int32)
        # The name says nothing of the step: ranks that differ in it are to meet here, and to be told apart.
        operation = self._shared.operation(f"talks on {what}", next(self._rounds), at_any_step=True, during=during)
        self._shared.progress.joins()
        all_gather(full.view(-1), hosts, operation=operation)
        rows: list[list[int]] = full.tolist()
        return rows

    def _compare(self, words: Sequence[Word], kind: str) -> None:
        mine = words[self._shared.transport.rank]
        here = f"rank {self._shared.transport.rank}, in {self._wish(mine, kind)},"
        for rank, theirs in enumerate(words):
            if theirs.step != mine.step:
                self._fail(
                    mine,
                    kind,
                    f"{here} has taken {mine.step} steps, but rank {rank} has taken {theirs.step}: a rank has left "
                    "one out",
                )
            if theirs.kind != mine.kind:
                self._fail(
                    mine,
                    kind,
                    f"{here} at step {mine.step}, meets rank {rank} in {self._wish(theirs, 'another pass')}. All ranks "
                    "must call the same modules, in one mode (train or eval, with or without gradients)",
                )

    def _fail(self, mine: Word, kind: str, why: str) -> NoReturn:
        """Raise, with what the others are doing, and where in the program; each finds the same difference now."""
        others = self._shared.notes.compare(f"{self._wish(mine, kind)}, at step {mine.step}", why)
        raise DesyncError(f"{why}{others}")

    def _wish(self, word: Word, kind: str) -> str:
        return f"the end of {kind}" if word.wants == END else f"{kind}, for unit {self._names[word.wants]!r}"


@dataclass(frozen=True)
class Round:
    """What a round came to."""

    choice: int
    """The unit that all gather now, or `END`."""

    needed: Sequence[int]
    """How many gathers each rank has needed so far."""
