"""ShardLite: train a PyTorch model that does not fit beside its optimizer on one device."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
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

_STATE_DICTS = "torch.distributed.checkpoint.state_dict"


def _import_late(name: str) -> Any:
    """Return what a name of `_LATE` stands for; the module's `__getattr__` (PEP 562)."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("shardlite.model")  # first, whatever is asked for: it patches PyTorch's own tools
    globals()[name] = value = getattr(import_module(_LATE[name]), name)
    return value


if not TYPE_CHECKING:  # to a type checker it would make every name one of this module
    __getattr__ = _import_late


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# ---- patches that follow other imports ------------------------------------------------------------------------------


def _after_import(name: str, then: Callable[[], object]) -> None:
    """Call `then` once after the module `name` is imported; at once if it already is."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watcher(name, then))


class _Watcher:
    """Finds one module as the other finders do, and calls `then` when it has been executed."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return the module's spec, with a loader that calls `then`; `None` for any other module."""
        if fullname != self._name:
            return None
        # Another watcher would ask this one in turn. By name, because a reload makes another class.
        others = [finder for finder in sys.meta_path if type(finder).__name__ != type(self).__name__]
        finders = [finder for finder in others if hasattr(finder, "find_spec")]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)  # if it raises, the program may import the module again: go on watching
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        loader.exec_module = exec_module


def _patch_torch() -> None:
    """Import the model, which patches optimizers, scalers and norms before the program can import one by name.

    Not where one of our own modules imports PyTorch, because they would import each other in a circle. A program that
    wraps a model imports it later in any case.
    """
    packages = ("shardlite", "shardlite_kernels")
    ours = {tuple(name.split(".")[:2]) for name in sys.modules if name.split(".")[0] in packages}
    if ours <= {("shardlite",), ("shardlite", "apps"), ("shardlite", "errors")}:
        import_module("shardlite.model")


def _patch_state_dicts() -> None:
    """Let `torch.distributed.checkpoint.state_dict` handle wrapped models."""
    import_module("shardlite.checkpoint").install()


_after_import("torch", _patch_torch)
_after_import(_STATE_DICTS, _patch_state_dicts)
