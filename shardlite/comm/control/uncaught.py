"""Uncaught exceptions of a rank's program are reported to the other ranks, which would wait for it.

They may come from a forward, a backward, a hook or a data loader, and the process may take a second to end after them.
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


class FailureReporter(Protocol):
    """Publishes the end of this rank, in bounded time."""

    failed: str
    """Why this rank takes part in nothing more, or `""`."""

    def fail(self, note: str) -> object:
        """Publish a permanent failure."""


_reporters: "weakref.WeakSet[FailureReporter]" = weakref.WeakSet()

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(torch.__file__).parent))
"""Folders of files that are not the program's: this library's and PyTorch's."""


def report_uncaught(reporter: FailureReporter) -> None:
    """Call `reporter.fail` on an exception that ends the program."""
    _reporters.add(reporter)
    if not isinstance(sys.excepthook, _ReportingHook):
        sys.excepthook = _ReportingHook(sys.excepthook)


def reporters() -> Sequence[FailureReporter]:
    """Return all registered reporters."""
    return list(_reporters)


class _ReportingHook:
    """An `excepthook` that reports the exception before it calls the previous hook."""

    def __init__(self, before: _Hook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        try:
            if not hasattr(sys, "ps1"):  # at a prompt the program goes on
                for reporter in reporters():
                    reporter.fail(f"its program ended in {kind.__name__}: {error}{_place(frames)}")
        finally:
            self._before(kind, error, frames)


def _place(frames: TracebackType | None) -> str:
    """Return the line of the program in which the exception was raised, or which called the library that raised it."""
    own = [frame for frame in traceback.extract_tb(frames) if not frame.filename.startswith(LIBRARIES)]
    return f", raised in {own[-1].filename}, line {own[-1].lineno}" if own else ""
