"""Unshard and reshard the parameters of modules.

In: units, and the begin and end of each use. Out: the module's parameters as views of gathered buffers, or as
placeholders. All ranks gather in the same order, even if their forwards take different branches. Read `unshard.py`
first.
"""

from shardlite.weights.all_gather import differs, isolated, outside_transforms, take_over, take_over_all
from shardlite.weights.gather_order import GatherOrder
from shardlite.weights.policy import NO_ROOM, BufferPolicy, UnitSize
from shardlite.weights.resident import Gathering, ResidentWeights
from shardlite.weights.saved_tensors import (
    NO_TRANSFORM,
    Call,
    Calls,
    are_innermost,
    can_push_hooks,
    check_transform,
    pop_hooks,
    push_hooks,
    set_hooks_aside,
)
from shardlite.weights.unshard import Gatherer
