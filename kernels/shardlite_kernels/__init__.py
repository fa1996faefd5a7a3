"""Triton kernels of ShardLite, each beside the PyTorch reference that specifies it. See `kernels/README.md`."""

from .adamw import adamw, adamw_cpu, adamw_reference
from .hop import hop, hop_reference
from .launch import use_triton
from .scalars import Hyper, Scalars, adamw_scalars, adamw_scalars_reference, hyper_table, send

__all__ = [
    "Hyper",
    "Scalars",
    "adamw",
    "adamw_cpu",
    "adamw_reference",
    "adamw_scalars",
    "adamw_scalars_reference",
    "hop",
    "hop_reference",
    "hyper_table",
    "send",
    "use_triton",
]
