"""Linux's `futex`: sleep until a word of shared memory changes, and wake sleepers, across processes."""

import ctypes
import platform
import sys

_CALL = 202  # on x86-64
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def why_not() -> str:
    """Return what is missing on this machine, or `""`.

    Other processors than x86 may show a flag to another process before the data that it announces. Preventing that
    needs memory barriers, which Python does not offer.
    """
    if sys.platform != "linux":
        return f"it takes Linux, this is {sys.platform}"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"it takes an x86-64 processor, which keeps the order of writes; this is {platform.machine()}"
    return ""


_system = ctypes.CDLL(None, use_errno=False).syscall if not why_not() else None


def sleep(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32-bit word at `address` is `value`, for `seconds` at most; other threads run. May end early."""
    assert _system is not None, "see why_not()"
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _system(_CALL, ctypes.c_void_p(address), _WAIT, ctypes.c_uint(value), ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wake all threads that sleep at `address`, in any process."""
    assert _system is not None, "see why_not()"
    _system(_CALL, ctypes.c_void_p(address), _WAKE, _EVERYBODY, None, None, 0)
