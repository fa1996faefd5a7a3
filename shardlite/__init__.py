"""ShardLite: train a PyTorch model that is too large for one device together with its optimizer state."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardlite.errors import (
    CheckpointError,
    CommError,
    DesyncError,
    EscapedViewWarning,
    LayoutError,
    NonFiniteError,
    NonFiniteWarning,
    PhaseError,
    ShardLiteError,
    ShardWarning,
)

if TYPE_CHECKING:
    from shardlite.apps.verify.verify import verify
    from shardlite.checkpoint import async_save, load, save, save_in_memory
    from shardlite.config import MemoryLimit, Precision, Route
    from shardlite.ema import EMA
    from shardlite.model import ShardLite
    from shardlite.optim import AdamW

__all__ = [
    "AdamW",
    "CheckpointError",
    "CommError",
    "DesyncError",
    "EMA",
    "EscapedViewWarning",
    "LayoutError",
    "MemoryLimit",
    "NonFiniteError",
    "NonFiniteWarning",
    "PhaseError",
    "Precision",
    "Route",
    "ShardLite",
    "ShardLiteError",
    "ShardWarning",
    "async_save",
    "load",
    "save",
    "save_in_memory",
    "verify",
]
__version__ = "0.1.0"

# ---- names that are imported when they are first used ---------------------------------------------------------------
#
# So the command line answers `--help` without PyTorch, and a program that saves nothing does not import
# `torch.distributed.checkpoint`, which takes half as long as importing PyTorch.

_LATE = {
    **dict.fromkeys(("MemoryLimit", "Precision", "Route"), "shardlite.config"),
    **dict.fromkeys(("async_save", "load", "save", "save_in_memory"), "shardlite.checkpoint"),
    "AdamW": "shardlite.optim",
    "EMA": "shardlite.ema",
    "ShardLite": "shardlite.model",
    "verify": "shardlite.apps.verify.verify",
}
"""The module that defines each name."""


def _import_late(name: str) -> Any:
    """Import and return an object by its name in `_LATE`. This is the module's `__getattr__` (PEP 562)."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _LATE[name] == "shardlite.checkpoint":
        # Import this first, in the same order as programs that import it after wrapping: other threads may import both.
        import_module("torch.distributed.checkpoint.state_dict")
    globals()[name] = value = getattr(import_module(_LATE[name]), name)
    if name == "ShardLite":  # applies all patches when it first wraps a model
        import_module("shardlite.engine").set_state_dict_patch(lambda: import_module("shardlite.checkpoint").install())
    return value


if not TYPE_CHECKING:  # a type checker would then accept any name
    __getattr__ = _import_late


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
