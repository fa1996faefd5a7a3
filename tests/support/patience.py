"""Waiting in tests, in proportion to the machine: `SHARDLITE_TEST_PATIENCE=4` makes each timeout four times as long."""

import os
import time
from collections.abc import Callable
from typing import Any

from tests.support.internals import bridge

PATIENCE = float(os.environ.get("SHARDLITE_TEST_PATIENCE", "1"))


def seconds(count: float) -> float:
    """Return `count` seconds, scaled: for a timeout that only a failing or hanging test reaches."""
    return count * PATIENCE


def until(there: Callable[[], bool], what: str = "it") -> None:
    """Wait until `there()` is true; fail after a long time."""
    began, waited = time.monotonic(), 0.0
    while not there():
        assert waited < seconds(30), f"{what} has not happened"
        time.sleep(min(0.001 + waited / 20, 0.1))  # who looks all the time takes the processor from what it waits for
        waited = time.monotonic() - began


def passes_over(model: Any) -> None:
    """Wait for the exchanges at the end of each pass, so that they are counted. Collective."""
    bridge(model).gatherer.passes._collect(lambda ended: True)
