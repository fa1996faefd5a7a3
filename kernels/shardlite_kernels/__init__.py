"""Triton kernels of ShardLite, each with a PyTorch reference as its specification. See `kernels/README.md`."""

from .adamw_cpu import chunk_memory
from .cast import cast
from .hop import hop
from .launch import SCALE_BLOCK, use_triton
from .moments import FORMATS
from .rows import add_rows
from .scalars import Hyper, Table, is_here, send
from .split import joined, split
from .state import State
from .stats import new_stats, stats, stats_block
