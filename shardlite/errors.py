"""Errors and warnings that ShardLite raises. Each message names the subject, the value and the remedy."""

from collections.abc import Collection, Iterable


class ShardLiteError(Exception):
    """Base class of all errors below."""


class LayoutError(ShardLiteError, ValueError):
    """Shapes, dtypes, models or calls are invalid."""


class PhaseError(ShardLiteError, RuntimeError):
    """The model is in a state that does not allow a call or a gradient, for example a gradient after the reduction."""


class CommError(ShardLiteError, RuntimeError):
    """A peer failed or timed out, or runs a different operation than this rank.

    Afterwards the buffers of the operation are undefined, and the connection to the peer may be closed permanently. End
    the run and let `torchrun` restart it.
    """


class DesyncError(CommError):
    """Ranks run different passes or numbers of steps. The difference is found before data is exchanged."""


SAME_PASSES = (
    "Before each step, every rank must run the same number of forwards and backwards. If ranks have different numbers "
    "of micro-batches, iterate over them with `for batch in model.join(batches)`; or, at stages 0 to 2, run all but "
    "the last backward of each rank inside `model.no_sync()`"
)
"""The remedy that the message of a `DesyncError` gives."""


EVERY_RANK = (
    "Every rank must call the model, its methods (full_state_dict(), gathered(), clip_grad_norm_(), ...), and save() "
    "and load(): do not put these calls under `if rank == 0:`, only what prints or writes their results"
)
"""The remedy if ranks wait for each other in different calls, or a rank has not come."""


class CheckpointError(ShardLiteError, RuntimeError):
    """A checkpoint is missing, damaged or of another model, or could not be written. The message names the file."""


class EscapedViewWarning(UserWarning):
    """A view of gathered weights outlives their use. Results are right, but the memory cannot be reused."""


class NonFiniteWarning(UserWarning):
    """Gradients contained a NaN or an infinity."""


class ShardWarning(UserWarning):
    """The program computed a value from a shard as if it were the whole parameter, or a trainer shards nothing."""


class NonFiniteError(ShardLiteError, ArithmeticError):
    """Too many consecutive steps were skipped, because gradients contained a NaN or an infinity."""


def some_of(names: Iterable[str]) -> str:
    """Join the first eight of the sorted names, and add how many more there are.

    If there are no names, return `nothing`.
    """
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "") or "nothing"


def lacking(missing: Collection[str], unknown: Collection[str]) -> str:
    """Return `lacks A and has unknown B`, where `A` and `B` list names. A half that lists no names is left out."""
    parts = (f"{what} {some_of(names)}" for what, names in (("lacks", missing), ("has unknown", unknown)) if names)
    return " and ".join(parts)
