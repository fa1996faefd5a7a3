"""Errors and warnings that ShardLite raises. Each message names the subject, the value and the remedy."""

from collections.abc import Collection, Iterable


class ShardLiteError(Exception):
    """Base class of all errors below."""


class LayoutError(ShardLiteError, ValueError):
    """Shapes, dtypes, models or calls are invalid."""


class PhaseError(ShardLiteError, RuntimeError):
    """An illegal state transition, for example a gradient that arrives after its unit was reduced."""


class CommError(ShardLiteError, RuntimeError):
    """A peer failed, timed out, or runs another operation than this rank.

    The buffers of the operation are undefined afterwards, and the connection to the peer may be closed for good: end
    the run and let `torchrun` restart it.
    """


class DesyncError(CommError):
    """Ranks run different passes or numbers of steps. Detected by comparison, before any data were mixed."""


SAME_PASSES = (
    "Before each step every rank makes as many forwards and backwards. Where ranks have different numbers of "
    "micro-batches, iterate over them by `for batch in model.join(batches)`; or, at stages 0 to 2, make all backwards "
    "but each rank's last inside `model.no_sync()`"
)
"""What to do about a `DesyncError`."""


class CheckpointError(ShardLiteError, RuntimeError):
    """A checkpoint is missing, damaged, or of something else, or could not be written. Names the file."""


class EscapedViewWarning(UserWarning):
    """A view of gathered weights outlived their use. Results are right, but the memory cannot be reused."""


class NonFiniteWarning(UserWarning):
    """Gradients contained a NaN or an infinity."""


class ShardWarning(UserWarning):
    """A value was computed from a shard as if it were the whole parameter."""


class NonFiniteError(ShardLiteError, ArithmeticError):
    """Too many consecutive steps were skipped because gradients contained a NaN or an infinity."""


def some_of(names: Iterable[str]) -> str:
    """Return up to eight of the sorted names and the number of others; `nothing` for none."""
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "") or "nothing"


def lacking(missing: Collection[str], unknown: Collection[str]) -> str:
    """Return `lacks A and has unknown B`, without a half that has no names."""
    parts = (f"{what} {some_of(names)}" for what, names in (("lacks", missing), ("has unknown", unknown)) if names)
    return " and ".join(parts)
