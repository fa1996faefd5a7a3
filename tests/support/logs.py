"""Records of the library's logger, on a rank."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect the messages that are logged from this level on."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardlite")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level, logger.getEffectiveLevel()))
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
