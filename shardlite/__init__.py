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
from shardlite.patches import after_import, change

if TYPE_CHECKING:
    from shardlite.checkpoint import (
        async_save,
        full_optimizer_state,
        load,
        load_optimizer_state,
        save,
        save_in_memory,
    )
    from shardlite.config import MemoryLimit, Precision, Route
    from shardlite.ema import EMA
    from shardlite.lab.verify.verify import verify
    from shardlite.model import ShardLite
    from shardlite.optim import AdamW
    from shardlite.optimizers import WholeParameters
    from shardlite.plan import fit

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
    "WholeParameters",
    "async_save",
    "fit",
    "full_optimizer_state",
    "load",
    "load_optimizer_state",
    "save",
    "save_in_memory",
    "verify",
]
__version__ = "0.1.0"

# ---- names that are imported when they are first used ---------------------------------------------------------------
#
# Because these imports are late, the command line answers `--help` without PyTorch. A program that saves nothing does
# not import `torch.distributed.checkpoint`, whose import takes half as long as that of PyTorch.

_LATE = {
    **dict.fromkeys(("MemoryLimit", "Precision", "Route"), "shardlite.config"),
    **dict.fromkeys(("async_save", "load", "save", "save_in_memory"), "shardlite.checkpoint"),
    **dict.fromkeys(("full_optimizer_state", "load_optimizer_state"), "shardlite.checkpoint"),
    "AdamW": "shardlite.optim",
    "EMA": "shardlite.ema",
    "ShardLite": "shardlite.model",
    "WholeParameters": "shardlite.optimizers",
    "fit": "shardlite.plan",
    "verify": "shardlite.lab.verify.verify",
}
"""The module that defines each name."""


def _import_late(name: str) -> Any:
    """Import and return an object by its name in `_LATE`. This is the module's `__getattr__` (PEP 562)."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _LATE[name] == "shardlite.checkpoint":
        # Import PyTorch's module first. Programs do the same if they wrap a model before they import checkpoints. If
        # two threads imported the two modules in different orders, each thread could wait for the other.
        import_module("torch.distributed.checkpoint.state_dict")
    globals()[name] = value = getattr(import_module(_LATE[name]), name)
    return value


if not TYPE_CHECKING:  # with a module-level `__getattr__`, a type checker would accept any name
    __getattr__ = _import_late


@change("`torch.distributed.checkpoint.state_dict`, when it is imported", rests_on="private functions of the module")
def _() -> None:
    """The functions of this module would save placeholders, because they gather and shard only DTensors."""
    # The package may be in the middle of its own import. So the module of the patches is imported.
    own = "shardlite.checkpoint.state_dict_patches"
    after_import("torch.distributed.checkpoint.state_dict", lambda: import_module(own).install())


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
