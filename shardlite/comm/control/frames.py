"""Frames of other threads, read without the risk of a deadlock.

Before Python 3.12, `sys._current_frames()` creates its results while it holds the lock of the interpreter's list of
threads. A garbage collection could begin there, and run any finalizer of the process. The finalizer may let another
thread run. If that thread is starting or ending, it waits for the lock while it holds the GIL, so all threads are
blocked.
"""

import gc
import sys
from itertools import chain
from operator import methodcaller
from threading import get_ident
from types import FrameType

_call = methodcaller("__call__")


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread, or `None` if the thread has ended. No garbage is collected meanwhile."""
    if thread == get_ident():
        return sys._getframe(1)
    restore = gc.enable if gc.isenabled() else gc.disable
    # The calls are made in C, so no other thread can run between them, and no signal can interrupt them. The frames of
    # other threads are dropped there too, because a function that returns meanwhile would leave its variables in them.
    found = map(methodcaller("get", thread), map(_call, (sys._current_frames,)))
    frame: FrameType | None
    _, frame, _ = chain(map(_call, (gc.disable,)), found, map(_call, (restore,)))
    return frame
