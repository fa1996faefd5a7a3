"""How a rank's program ends: uncaught exceptions are reported to other ranks, and Ctrl-C is deferred.

An uncaught exception may be raised in a forward, a backward, a hook or a data loader. The process may then take a
second to end, during which other ranks would wait for it.

`KeyboardInterrupt` is deferred until the library has finished its current call, so that the program can continue.
Python raises `KeyboardInterrupt` between any two lines. Inside this library an exception would leave a rank in an
inconsistent state: with a filled bucket of gradients that is not reduced, or with a count that increased on this rank
only. So the interrupt is raised in the program's own code: in a forward, in a hook, or between two calls. A call that
waits for other ranks is interrupted after half a second, and the rank then starts no further operations. A second
Ctrl-C interrupts any call in the same way.

The step of any optimizer counts as a call of the library. An interrupt between the update of the weights and the hook
that reports the update would leave this rank one step ahead of its reports, while other ranks use this rank's weights.

Only Python's default handler is replaced. The program's own handler, if any, is kept.
"""

import contextlib
import os
import signal
import sys
import sysconfig
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import CodeType, FrameType, TracebackType
from typing import Any

import shardlite_kernels
import torch
from torch.optim import Optimizer

from shardlite.comm.control.frames import frame_of

SLOW = 0.5
"""Seconds after which a wait counts as long, and between two checks in a long wait. The checks end the wait if Ctrl-C
is pending or another rank has failed, and publish the operations that this rank waits in.
"""

LIBRARIES = (
    *(f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(torch.__file__).parent)),
    contextlib.__file__,
)
"""Folders of this library and of PyTorch, and a file that lies between them. They do not belong to the program."""

BRIDGES = f"{LIBRARIES[0]}integrations{os.sep}"
"""The folder of the bridges to trainers. A trainer calls them, and they call the program again."""

_PAUSE = 1e-3
"""Seconds between two checks whether the library has returned."""

_OURS = (LIBRARIES[0], f"{Path(shardlite_kernels.__file__).parent}{os.sep}")
_PROGRAMS = tuple(f"{_OURS[0]}{name}{os.sep}" for name in ("cli", "lab"))
_PLACES = tuple(f"{sysconfig.get_paths()[name]}{os.sep}" for name in ("purelib", "platlib"))
_STANDARD = f"{sysconfig.get_paths()['stdlib']}{os.sep}"
_SCRIPTS = f"{sysconfig.get_paths()['scripts']}{os.sep}"
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_STEP = next((each for each in Optimizer.profile_hook_step.__code__.co_consts if isinstance(each, CodeType)), None)
"""Code of PyTorch's wrapper of each optimizer's `step`, which calls the pre-hooks, the step and the post-hooks.

`torch.compile` does not compile this wrapper, because this library's hooks must not be traced.
"""


_reports: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The `FailureReports` of all models. (Their class cannot be imported here, since its file imports this file.)"""

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def line_of_program(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the program, from `frame` outwards, or `None`.

    A frame of an installed package, such as a trainer, counts only if there is no other frame of the program.
    """
    nearest = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES):
            if not _is_installed(file):
                return frame
            nearest = nearest or frame
        frame = frame.f_back
    return nearest


def _is_installed(file: str) -> bool:
    return file.startswith((_STANDARD, "<frozen", _SCRIPTS)) or any(each in file for each in _PACKAGES)


def report_uncaught(reports: Any) -> None:
    """Register `reports`: if an exception or an interrupt ends the program, `reports.fail` is called."""
    _reports.add(reports)
    if getattr(sys.excepthook, "func", None) is not _report_and_call:
        sys.excepthook = partial(_report_and_call, sys.excepthook)


def _report_and_call(
    previous: _Hook, kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """Publish an exception, and then call the previous `excepthook`."""
    try:
        if not hasattr(sys, "ps1"):  # at a prompt the program continues
            for reports in list(_reports):
                reports.fail(f"its program ended in {kind.__name__}: {error}{_raised_in(frames)}")
    finally:
        previous(kind, error, frames)


def _raised_in(frames: TracebackType | None) -> str:
    """Return the line of the program in which the exception was raised, or which called the library that raised it."""
    outside = [frame for frame in traceback.extract_tb(frames) if not frame.filename.startswith(LIBRARIES)]
    own = [frame for frame in outside if not _is_installed(frame.filename)] or outside
    return f", raised in {own[-1].filename}, line {own[-1].lineno}" if own else ""


class _Deferring:
    """Handler of Ctrl-C. It raises the interrupt in the program's own code. In the library, it repeats Ctrl-C later."""

    def __init__(self) -> None:
        self.is_pending = False
        self._is_ours = False  # whether the next signal comes from `_deliver` and not from a second Ctrl-C
        self._times = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_ours, self._is_ours = self._is_ours, False
        if is_ours and not self.is_pending:
            return  # a long wait has raised the interrupt meanwhile
        if not _in_library(frame):
            self.is_pending = False
            signal.default_int_handler(number, frame)
        if not self.is_pending:
            self.is_pending = True
            self._times += 1
            Thread(target=self._deliver, args=(self._times,), name="shardlite-interrupt", daemon=True).start()
        elif not is_ours:
            self.is_pending = False
            _break_off()
            signal.default_int_handler(number, frame)

    def _deliver(self, times: int) -> None:
        """Repeat the signal when the program's own code runs, or when the program has replaced the handler."""
        thread = main_thread().ident
        assert thread is not None, "the main thread runs"
        mine: object = self
        while self.is_pending and self._times == times:
            if signal.getsignal(signal.SIGINT) is not mine:
                self.is_pending = False
                signal.pthread_kill(thread, signal.SIGINT)
            elif not _in_library(frame_of(thread)):
                self._is_ours = True
                signal.pthread_kill(thread, signal.SIGINT)
            time.sleep(_PAUSE)


_deferring = _Deferring()


def defer_interrupts() -> None:
    """Defer Ctrl-C while the library runs. Has no effect on other threads or if the program has its own handler."""
    if current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _deferring)


def raise_pending_interrupt(during: str) -> None:
    """End a long wait and mark this rank as failed if Ctrl-C is pending. `during` names the wait in the report.

    Raises:
        KeyboardInterrupt: Ctrl-C is pending.
    """
    if _deferring.is_pending and current_thread() is main_thread():
        for reports in list(_reports):
            reports.fail(f"Ctrl-C came while it waited in {during}")
        _deferring.is_pending = False
        raise KeyboardInterrupt


def _break_off() -> None:
    """Mark this rank as failed. Publish the failure on threads, because the signal may have interrupted a report."""
    why = "a second Ctrl-C ended a call of the library"
    for reports in list(_reports):
        reports.failed = reports.failed or why
        Thread(target=reports.fail, args=(why,), name="shardlite-interrupt", daemon=True).start()


def _in_library(frame: FrameType | None) -> bool:
    """Return whether an optimizer steps, or the innermost frame outside PyTorch and Python is this library's."""
    ours = None
    while frame is not None:
        if frame.f_code is _STEP:
            return True
        if ours is None:
            ours = _is_ours(frame.f_code.co_filename)
        frame = frame.f_back
    return bool(ours)


def _is_ours(file: str) -> bool | None:
    """Return whether a file belongs to this library and not to a program, or `None` for files of PyTorch and Python."""
    if file.startswith(_OURS):
        return not file.startswith(_PROGRAMS)
    is_standard = file.startswith(_STANDARD) and not file.startswith(_PLACES)
    return None if is_standard or file.startswith((LIBRARIES[1], "<")) else False
