"""How a rank's program ends: uncaught exceptions are reported to other ranks, and Ctrl-C is deferred.

An uncaught exception may come from a forward, a backward, a hook or a data loader, and the process may take a second to
end after it. Other ranks would wait for it.

`KeyboardInterrupt` is deferred until the library has finished its current call, so the program can continue. Python
raises it between any two lines. Inside this library it would leave a rank between two states: a bucket that is filled
but not reduced, a number that is counted on this rank alone. So it is raised in the program's own lines: in a forward,
in a hook, between two calls. A call that waits for other ranks is interrupted after half a second, and the rank then
takes part in nothing more. The same holds for a second Ctrl-C.

The step of any optimizer counts as a call of the library. Between the change of the weights and the hook that reports
it, an interrupt would leave this rank a step ahead of what it reports to the others, and they would use its weights.

Only Python's default handler is replaced. A program's own handler is left in place.
"""

import os
import signal
import sys
import sysconfig
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import CodeType, FrameType, TracebackType
from typing import Any

import shardlite_kernels
import torch
from torch.optim import Optimizer

SLOW = 0.5
"""Seconds after which a wait counts as long: it ends on Ctrl-C, checks whether other ranks have failed, and publishes
the operations it is in. These checks are repeated at this interval.
"""

LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(torch.__file__).parent))
"""Folders of files that are not the program's: this library's and PyTorch's."""

_PAUSE = 1e-3
"""Seconds between two checks whether the library has returned."""

_OURS = (LIBRARIES[0], f"{Path(shardlite_kernels.__file__).parent}{os.sep}")
_PROGRAMS = tuple(f"{_OURS[0]}apps{os.sep}{name}" for name in ("cli.py", "demo", "verify"))
_PLACES = tuple(f"{sysconfig.get_paths()[name]}{os.sep}" for name in ("purelib", "platlib"))
_STANDARD = f"{sysconfig.get_paths()['stdlib']}{os.sep}"
_PYTORCH = LIBRARIES[1]
_STEP = next((each for each in Optimizer.profile_hook_step.__code__.co_consts if isinstance(each, CodeType)), None)
"""What PyTorch makes of each optimizer's `step`: it calls the hooks before it, the step, and the hooks after it.

`torch.compile` leaves it as it is, because it may not trace this library's hooks, and compiles what it calls.
"""


_reports: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The `FailureReports` of all models. Their class imports this file."""

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def report_uncaught(reports: Any) -> None:
    """Call `reports.fail` on an exception or an interrupt that ends the program."""
    _reports.add(reports)
    if not isinstance(sys.excepthook, _ReportingHook):
        sys.excepthook = _ReportingHook(sys.excepthook)


class _ReportingHook:
    """An `excepthook` that reports the exception before it calls the previous hook."""

    def __init__(self, before: _Hook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        try:
            if not hasattr(sys, "ps1"):  # at a prompt the program continues
                for reports in list(_reports):
                    reports.fail(f"its program ended in {kind.__name__}: {error}{_raised_in(frames)}")
        finally:
            self._before(kind, error, frames)


def _raised_in(frames: TracebackType | None) -> str:
    """Return the line of the program in which the exception was raised, or which called the library that raised it."""
    own = [frame for frame in traceback.extract_tb(frames) if not frame.filename.startswith(LIBRARIES)]
    return f", raised in {own[-1].filename}, line {own[-1].lineno}" if own else ""


class _Deferring:
    """Signal handler that raises in the program's own lines, and otherwise repeats the signal until they run."""

    def __init__(self) -> None:
        self.is_pending = False
        self._is_ours = False  # the next signal comes from `_deliver`, not from a second Ctrl-C
        self._times = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_ours, self._is_ours = self._is_ours, False
        if is_ours and not self.is_pending:
            return  # a long wait has raised it meanwhile
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
        """Repeat the signal as soon as the program's own lines run, or its handler was replaced."""
        thread = main_thread().ident
        assert thread is not None, "it runs"
        mine: object = self
        while self.is_pending and self._times == times:
            if signal.getsignal(signal.SIGINT) is not mine:
                self.is_pending = False
                signal.pthread_kill(thread, signal.SIGINT)
            elif not _in_library(sys._current_frames().get(thread)):
                self._is_ours = True
                signal.pthread_kill(thread, signal.SIGINT)
            time.sleep(_PAUSE)


_deferring = _Deferring()


def defer_interrupts() -> None:
    """Defer Ctrl-C while the library runs, if the handler is Python's own and this is the main thread."""
    if current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _deferring)


def raise_pending_interrupt(during: str) -> None:
    """End a long wait if Ctrl-C is pending, and take part in nothing more. `during` names the wait for the report.

    Raises:
        KeyboardInterrupt: Ctrl-C is pending.
    """
    if _deferring.is_pending and current_thread() is main_thread():
        for reports in list(_reports):
            reports.fail(f"Ctrl-C came while it waited in {during}")
        _deferring.is_pending = False
        raise KeyboardInterrupt


def _break_off() -> None:
    """Mark this rank as failed. Publish that on threads: the signal may have interrupted a report."""
    why = "a second Ctrl-C ended a call of the library"
    for reports in list(_reports):
        reports.failed = reports.failed or why
        Thread(target=reports.fail, args=(why,), name="shardlite-interrupt", daemon=True).start()


def _in_library(frame: FrameType | None) -> bool:
    """Return whether an optimizer steps, or the innermost frame that is neither PyTorch's nor Python's own is ours."""
    ours = None
    while frame is not None:
        if frame.f_code is _STEP:
            return True
        if ours is None:
            ours = _is_ours(frame.f_code.co_filename)
        frame = frame.f_back
    return bool(ours)


def _is_ours(file: str) -> bool | None:
    """Return whether a file belongs to this library, not to a program; `None` for PyTorch's and Python's own files."""
    if file.startswith(_OURS):
        return not file.startswith(_PROGRAMS)
    is_standard = file.startswith(_STANDARD) and not file.startswith(_PLACES)
    return None if is_standard or file.startswith((_PYTORCH, "<")) else False
