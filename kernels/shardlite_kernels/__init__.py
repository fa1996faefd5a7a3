"""Triton kernels of ShardLite, each beside the PyTorch reference that specifies it. See `kernels/README.md`."""

from .adamw import adamw, adamw_reference
from .hop import hop, hop_reference

__all__ = ["adamw", "adamw_reference", "hop", "hop_reference"]
