"""ShardLite: train a PyTorch model that does not fit beside its optimizer on one device."""

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
# The command line answers `--help` without PyTorch, and a program that saves nothing does without
# `torch.distributed.checkpoint`, whose import takes half as long as PyTorch's.

_LATE = {
    "AdamW": "shardlite.optim",
    "EMA": "shardlite.ema",
    "MemoryLimit": "shardlite.config",
    "Precision": "shardlite.config",
    "Route": "shardlite.config",
    "ShardLite": "shardlite.model",
    "async_save": "shardlite.checkpoint",
    "load": "shardlite.checkpoint",
    "save": "shardlite.checkpoint",
    "save_in_memory": "shardlite.checkpoint",
    "verify": "shardlite.apps.verify.verify",
}
"""The module that defines each name."""


def _import_late(name: str) -> Any:
    """Return what a name of `_LATE` stands for; the module's `__getattr__` (PEP 562)."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _LATE[name] == "shardlite.checkpoint":
        # First, as by a program that imports it after wrapping: other threads may import both.
        import_module("torch.distributed.checkpoint.state_dict")
    globals()[name] = value = getattr(import_module(_LATE[name]), name)
    if name == "ShardLite":  # which applies all patches when it first wraps a model
        import_module("shardlite.engine").set_state_dict_patch(_patch_state_dicts)
    return value


def _patch_state_dicts() -> None:
    import_module("shardlite.checkpoint").install()


if not TYPE_CHECKING:  # to a type checker it would make every name one of this module
    __getattr__ = _import_late


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
