"""Errors and warnings that ShardLite raises. Each message names the subject, the value and the remedy."""

from collections.abc import Collection, Iterable


class ShardLiteError(Exception):
    """Base class of all errors below."""


class LayoutError(ShardLiteError, ValueError):
    """Shapes, dtypes, models or calls are invalid."""


class PhaseError(ShardLiteError, RuntimeError):
    """A call or gradient in a state that does not allow it, for example a gradient after its unit was reduced."""


class CommError(ShardLiteError, RuntimeError):
    """A peer failed, timed out, or runs a different operation from this rank.

    Afterwards the buffers of the operation are undefined, and the connection to the peer may be closed permanently. End
    the run and let `torchrun` restart it.
    """


class DesyncError(CommError):
    """Ranks run different passes or numbers of steps. Detected by comparison, before any data is mixed."""


SAME_PASSES = (
    "Before each step, every rank must run the same number of forwards and backwards. If ranks have different numbers "
    "of micro-batches, iterate over them with `for batch in model.join(batches)`; or, at stages 0 to 2, run all but "
    "the last backward of each rank inside `model.no_sync()`"
)
"""Remedy for a `DesyncError`, for its message."""


class CheckpointError(ShardLiteError, RuntimeError):
    """A checkpoint is missing, damaged or of a different model, or could not be written. The message names the file."""


class EscapedViewWarning(UserWarning):
    """A view of gathered weights is still alive after their use. Results are right, but the memory is not reused."""


class NonFiniteWarning(UserWarning):
    """Gradients contained a NaN or an infinity."""


class ShardWarning(UserWarning):
    """A value was computed from a shard as if the shard were the whole parameter."""


class NonFiniteError(ShardLiteError, ArithmeticError):
    """Too many consecutive steps were skipped, because gradients contained a NaN or an infinity."""


def some_of(names: Iterable[str]) -> str:
    """Join up to eight of the sorted names, with the number of others. Return `nothing` if there are no names."""
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "") or "nothing"


def lacking(missing: Collection[str], unknown: Collection[str]) -> str:
    """Return `lacks A and has unknown B`. Leave out a half without names."""
    parts = (f"{what} {some_of(names)}" for what, names in (("lacks", missing), ("has unknown", unknown)) if names)
    return " and ".join(parts)
