"""Units: parameters that are gathered together, and the place of each parameter in a flat buffer.

A `Flat` is what FSDP calls a flat parameter. In: a module. Out: `Unit`s of `Flat`s, whose layouts are equal on all
ranks. Read `layout.py` first.
"""

from shardlite.params.flat import Flat, OffloadedFlat
from shardlite.params.full_buffer import Buffer, storage_key
from shardlite.params.host_states import OFFLOADED, HostStates
from shardlite.params.layout import ALIGN, Layout, ShardInfo, Slot, allocate_arenas, as_real, round_up
from shardlite.params.parameters import Placeholder, Shard, as_they_are, is_dtensor, requires_grad_of, scripts
from shardlite.params.shard_tensor import ShardTensor
from shardlite.params.unit import ROOT, Unit, Weights
