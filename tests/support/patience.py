"""Timeouts of tests, in proportion to the machine: `SHARDLITE_TEST_PATIENCE=4` makes each four times as long."""

import os
import time
from collections.abc import Callable

PATIENCE = float(os.environ.get("SHARDLITE_TEST_PATIENCE", "1"))


def seconds(count: float) -> float:
    """Return `count` seconds, scaled: for a timeout that only a failing or hanging test reaches."""
    return count * PATIENCE


def until(there: Callable[[], bool], what: str = "it") -> None:
    """Wait for what must happen beside this thread, and fail if it does not for a long time."""
    deadline = time.monotonic() + seconds(30)
    while not there():
        assert time.monotonic() < deadline, f"{what} has not happened"
        time.sleep(0.001)
