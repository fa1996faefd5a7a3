"""Ctrl-C: `KeyboardInterrupt` waits until the library has done what it is at, so that the program can go on after it.

Python raises it between any two lines. Inside this library it would leave a rank half-way between two states: a bucket
that is filled and not on its way, a number that is counted on this rank alone. So it is raised in the program's own
lines: in a forward, in a hook, between two calls. A call that waits for other ranks is not held up for long: a wait of
half a second ends with it, and the rank takes part in nothing more. So does a second Ctrl-C.

Only Python's own handler is put off. A program with a handler of its own has its way.
"""

import os
import signal
import sys
import sysconfig
import time
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType

import shardlite_kernels

from shardlite.comm.control.uncaught import LIBRARIES, leavers

SLOW = 0.5
"""Seconds after which a wait is long: it gives way to Ctrl-C, and a rank asks whether others have failed, and says in
which operations it waits. So many seconds are between two such looks, too."""

_PAUSE = 1e-3
"""Seconds between two looks at whether the library is done."""

_OURS = (LIBRARIES[0], f"{Path(shardlite_kernels.__file__).parent}{os.sep}")
_PROGRAMS = tuple(f"{_OURS[0]}apps{os.sep}{name}" for name in ("cli.py", "demo", "verify"))
_PLACES = tuple(f"{sysconfig.get_paths()[name]}{os.sep}" for name in ("purelib", "platlib"))
_STANDARD = f"{sysconfig.get_paths()['stdlib']}{os.sep}"
_PYTORCH = LIBRARIES[1]


class _Deferring:
    """Python's handler of Ctrl-C, while the program's own lines run; else again and again until they do."""

    def __init__(self) -> None:
        self.is_pending = False
        self._is_ours = False  # the signal that comes next: it is no second Ctrl-C
        self._times = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_ours, self._is_ours = self._is_ours, False
        if is_ours and not self.is_pending:
            return  # a long wait has given way meanwhile
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
        """Send the signal once more as soon as the program's own lines run, or its handler is another one."""
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
    """Have Ctrl-C wait for the library, if it is Python's own handler that it comes to, and this the main thread."""
    if current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _deferring)


def is_put_off() -> bool:
    """Whether a Ctrl-C waits for what the main thread is at, which this is."""
    return _deferring.is_pending and current_thread() is main_thread()


def give_way(during: str) -> None:
    """End a long wait by what is put off, if anything is, and take part in nothing more: say `during` what it came.

    Raises:
        KeyboardInterrupt: it is.
    """
    if is_put_off():
        for leaver in leavers():
            leaver.fail(f"Ctrl-C came while it waited in {during}")
        _deferring.is_pending = False
        raise KeyboardInterrupt


def _break_off() -> None:
    """Have this rank take part in nothing more. The others are told beside it: this may have interrupted just that."""
    why = "a second Ctrl-C ended a call of the library"
    for leaver in leavers():
        leaver.failed = leaver.failed or why
        Thread(target=leaver.fail, args=(why,), name="shardlite-interrupt", daemon=True).start()


def _in_library(frame: FrameType | None) -> bool:
    """Whether what runs is this library: the innermost frame that is neither PyTorch's nor Python's own says so."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            return not file.startswith(_PROGRAMS)
        is_standard = file.startswith(_STANDARD) and not file.startswith(_PLACES)
        if not (is_standard or file.startswith((_PYTORCH, "<"))):
            return False
        frame = frame.f_back
    return False
