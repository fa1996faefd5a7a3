"""Triton kernels of ShardLite, each with a PyTorch reference as its specification. See `kernels/README.md`."""

from .adamw import (
    adamw,
    adamw_reference,
    add_rows_adamw,
    add_rows_adamw_reference,
    reduce_adamw,
    reduce_adamw_reference,
)
from .adamw_cpu import (
    CpuStep,
    adamw_cpu,
    add_rows_adamw_cpu,
    chunk_memory,
    chunk_nbytes,
    reduce_adamw_cpu,
    temporary_nbytes,
)
from .cast import cast, cast_reference
from .device_ring import (
    ring_reduce_adamw,
    ring_reduce_adamw_reference,
    ring_reduce_scatter,
    ring_reduce_scatter_reference,
)
from .hop import hop, hop_reference
from .launch import SCALE_BLOCK, use_triton
from .moments import FORMATS, decode, encode
from .noise import keys
from .quantize import dequantize, dequantize_reference, quantize, quantize_reference
from .rows import add_rows, add_rows_reference
from .scalars import Hyper, Scalars, Table, adamw_scalars, adamw_scalars_reference, hyper_table, is_here, send
from .scale import scale, scale_all, scale_reference
from .signals import PROGRAMS, Peers, flag_numel, ring_failure, slots_nbytes
from .split import join, join_reference, joined, split, split_reference
from .state import State
from .stats import check_stats, new_stats, stats, stats_block, stats_reference, stats_rows, stats_total
