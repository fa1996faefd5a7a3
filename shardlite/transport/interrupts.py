"""Ctrl-C: `KeyboardInterrupt` waits until the library has done what it is at, so that the program can go on after it.

Python raises it between any two lines. Inside this library it would leave a rank half-way between two states: a bucket
that is filled and not on its way, a number that is counted on this rank alone. So it is raised in the program's own
lines: in a forward, in a hook, between two calls. A call that waits for other ranks is not held up for long: a wait of
half a second ends with it, and the rank takes part in nothing more. So does a second Ctrl-C.

Only Python's own handler is put off. A program with a handler of its own has its way.
"""

import signal
import sysconfig
import time
from _thread import interrupt_main
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType

import shardlite_kernels

from shardlite.transport.endings import LIBRARIES, leavers

_PAUSE = 1e-3
"""Seconds between two looks at whether the library is done."""

_OURS = (LIBRARIES[0], str(Path(shardlite_kernels.__file__).parent))
_PROGRAMS = tuple(f"{_OURS[0]}/{name}" for name in ("cli.py", "demo/", "verification/"))
_PLACES = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
_STANDARD = sysconfig.get_paths()["stdlib"]
_PYTORCH = LIBRARIES[1]


class _Deferring:
    """Python's handler of Ctrl-C, while the program's own lines run; else again and again until they do."""

    def __init__(self) -> None:
        self.is_pending = False
        self._looks_again = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        looks_again, self._looks_again = self._looks_again, False
        if looks_again and not self.is_pending:
            return
        is_inside = _in_library(frame)
        if is_inside and self.is_pending and not looks_again:
            _break_off()
            is_inside = False
        if not is_inside:
            self.is_pending = False
            signal.default_int_handler(number, frame)
        if not self.is_pending:
            self.is_pending = True
            Thread(target=self._look_again, name="shardlite-interrupt", daemon=True).start()

    def _look_again(self) -> None:
        while self.is_pending:
            time.sleep(_PAUSE)
            if self.is_pending:
                self._looks_again = True
                interrupt_main()


_deferring = _Deferring()


def defer_interrupts() -> None:
    """Have Ctrl-C wait for the library, if it is Python's own handler that it comes to, and this the main thread."""
    if current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _deferring)


def is_put_off() -> bool:
    """Whether a Ctrl-C waits for what the main thread is at, which this is."""
    return _deferring.is_pending and current_thread() is main_thread()


def give_way() -> None:
    """End a long wait by what is put off, if anything is.

    Raises:
        KeyboardInterrupt: it is.
    """
    if is_put_off():
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
