"""How the program of a rank ends: an exception that nobody catches is told to the other ranks, which wait for it.

It may come of a forward, a backward, a hook or a data loader, and the process may take a second to end after it.
"""

import os
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch


class Leaver(Protocol):
    """What tells other ranks of the end, bounded in time."""

    failed: str
    """Why this rank takes part in nothing more."""

    def fail(self, note: str) -> object:
        """Leave a note for good."""


_leavers: "weakref.WeakSet[Leaver]" = weakref.WeakSet()

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(torch.__file__).parent))
"""Where files lie that are not the program's: of this library, and of PyTorch."""


def tell_of_the_end(leaver: Leaver) -> None:
    """Have `leaver` tell of an exception that ends the program."""
    _leavers.add(leaver)
    if not isinstance(sys.excepthook, _Told):
        sys.excepthook = _Told(sys.excepthook)


def leavers() -> Sequence[Leaver]:
    """Return all that would tell of an end."""
    return list(_leavers)


class _Told:
    """What PyTorch and Python do with an exception that nobody catches, after it was told."""

    def __init__(self, before: _Hook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        try:
            if not hasattr(sys, "ps1"):  # at a prompt the program goes on
                for leaver in leavers():
                    leaver.fail(f"its program ended in {kind.__name__}: {error}{_place(frames)}")
        finally:
            self._before(kind, error, frames)


def _place(frames: TracebackType | None) -> str:
    """Say in which line of the program an exception was raised, or where it called a library that has."""
    own = [frame for frame in traceback.extract_tb(frames) if not frame.filename.startswith(LIBRARIES)]
    return f", raised in {own[-1].filename}, line {own[-1].lineno}" if own else ""
