"""Units: parameters that are gathered together, and the place of each parameter in a flat buffer.

A `Flat` is what FSDP calls a flat parameter. In: a module. Out: `Unit`s of `Flat`s, whose layouts are equal on all
ranks. Read `layout.py` first.
"""

from shardlite.params.flat import Flat
from shardlite.params.full_buffer import Buffer, ViewPlace, storage_key
from shardlite.params.layout import (
    ALIGN,
    PADDED,
    Layout,
    ShardInfo,
    Slot,
    allocate_arenas,
    as_real,
    is_padded,
    lay_out,
    round_up,
    shared,
)
from shardlite.params.parameters import (
    OTHER_SHAPES,
    Placeholder,
    Shard,
    Sharded,
    as_they_are,
    attach,
    detach,
    is_dtensor,
    is_plain,
    register_first,
    requires_grad_of,
    scripts,
    take_grad,
)
from shardlite.params.shard_tensor import ShardTensor, apart
from shardlite.params.unit import ROOT, Gradients, Unit, Weights, check_move
