"""ShardLite: train a PyTorch model that does not fit beside its optimizer on one device."""

from shardlite.apps.checkpoint import async_save, load, save, save_in_memory
from shardlite.apps.verify.verify import verify
from shardlite.config import MemoryLimit, Precision, Route
from shardlite.ema import EMA
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
