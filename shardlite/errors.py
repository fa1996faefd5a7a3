"""Errors and warnings that ShardLite raises, and checks of arguments that several calls take.

Each message names the subject, the value and the remedy.
"""

import os
from collections.abc import Collection, Iterable
from operator import index
from pathlib import Path
from typing import Any


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
    "of micro-batches, iterate over them with `for batch in model.join(batches)`; if ranks evaluate different numbers "
    "of batches, or end early, evaluate inside `with model.gathered():`; or, at stages 0 to 2, run all but the last "
    "backward of each rank inside `model.no_sync()`. If a condition of shards, such as `p.grad.isnan().any()`, decides "
    "whether to step, remove it: it may differ between ranks, and all ranks skip a step with a NaN anyway"
)
"""The remedy that the message of a `DesyncError` gives."""


EVERY_RANK = (
    "Every rank must call the model, its methods (full_state_dict(), gathered(), clip_grad_norm_(), ...), and save() "
    "and load(): do not put these calls under `if rank == 0:`, only what prints or writes their results. If ranks "
    "evaluate different numbers of batches, evaluate inside `with model.gathered():`"
)
"""The remedy if ranks wait for each other in different calls, or a rank has not arrived."""


class CheckpointError(ShardLiteError, RuntimeError):
    """A checkpoint is missing, damaged or of another model, or could not be written. The message names the file."""


class EscapedViewWarning(UserWarning):
    """A view of gathered weights outlives their use. Results are right, but the memory cannot be reused."""


class NonFiniteWarning(UserWarning):
    """Gradients contained a NaN or an infinity."""


class ShardWarning(UserWarning):
    """The program computed a value from a shard as if it were the full parameter, or a trainer shards nothing."""


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


# ---- arguments of calls ---------------------------------------------------------------------------------------------


def check_int(name: str, value: Any, least: int = 0) -> int:
    """Check an integer that is at least `least`, and return it. `name` names the call and its argument in errors.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is too small.
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an int, got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    return number


def check_number(name: str, value: Any) -> Any:
    """Check a number, or a tensor with one number, and return it.

    Raises:
        TypeError: it is neither.
        ValueError: it is too large for a float.
    """
    if callable(numel := getattr(value, "numel", None)):  # a tensor, which is not read, because the host would wait
        number = value if numel() == 1 else None
    else:
        try:
            number = None if isinstance(value, str | bytes) else float(value)
        except OverflowError:
            raise ValueError(f"{name} is too large for a float") from None
        except (TypeError, ValueError):
            number = None
    if number is None:
        raise TypeError(f"{name} must be a number, or a tensor with one number, got {value!r}")
    return number


def check_params(call: str, group: Any) -> None:
    """Check that a parameter group of an optimizer is a dict with an entry `params`, which can be iterated over.

    Raises:
        TypeError: it is not.
    """
    params = group.get("params") if isinstance(group, dict) else None
    if not isinstance(params, Iterable):
        raise TypeError(
            f"{call}: a group must be a dict with an entry 'params', which has the parameters, got {group!r:.200}"
        )


def check_rank(call: str, rank: Any, world_size: int) -> None:
    """Check the argument `rank` of a call: the only rank that gets the result, or `None` for all ranks.

    Raises:
        TypeError: it is neither an integer nor `None`.
        ValueError: there is no such rank.
    """
    if rank is not None and check_int(f"{call}: rank", rank) >= world_size:
        raise ValueError(f"{call}: rank must be None, or from 0 to {world_size - 1}, got {rank}")


def check_path(call: str, path: Any) -> Path:
    """Check the path of a folder, and return it.

    Raises:
        TypeError: it is not a path.
        ValueError: it is empty, or has a NUL character.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise TypeError(f"{call}: path must be a str or a pathlib.Path, got {path!r}")
    if not text or "\0" in text:
        raise ValueError(f"{call}: path must name a folder, got {text!r}: for the current folder pass '.'")
    return Path(text)


def check_optimizer(call: str, optimizer: Any) -> None:
    """Check that an argument can be an optimizer: it has groups of parameters, and a state.

    Raises:
        TypeError: it cannot.
    """
    if isinstance(optimizer, type) or not all(hasattr(optimizer, name) for name in ("param_groups", "state_dict")):
        raise TypeError(f"{call}: optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
