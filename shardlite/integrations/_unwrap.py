"""Let accelerate, and packages that use it, unwrap a `ShardLite` model.

`accelerate.utils.extract_model_from_parallel` unwraps the classes that it knows: `DistributedDataParallel` and others.
Accelerate's own `unwrap_model` calls it, and so do Transformers and TRL, which have imported the function by name.
Therefore its code is replaced, and the name keeps its object. For other models the function is unchanged.
"""

from types import FunctionType
from typing import Any

from shardlite.model import ShardLite

_ORIGINAL = "_shardlite_original"


def unwrap_in_accelerate() -> None:
    """Let `extract_model_from_parallel` return the module of a `ShardLite` model. Later calls do nothing."""
    from accelerate.utils import extract_model_from_parallel as function

    names = function.__globals__
    if _ORIGINAL in names:
        return
    original = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    names[_ORIGINAL] = original
    names["_shardlite_bare"] = bare
    function.__wrapped__ = original  # `inspect.signature` follows it
    function.__defaults__ = None
    function.__code__ = _replacement.__code__


def bare(model: Any) -> Any:
    """Return the module of a `ShardLite` model, and any other model unchanged."""
    return model.module if isinstance(model, ShardLite) else model


def _replacement(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Code of the patched function. Its global names are those of accelerate's module."""
    return _shardlite_original(_shardlite_bare(model), *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821
