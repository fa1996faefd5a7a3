"""From a module to units of shards, when it is wrapped.

In: a module (on the meta device, maybe) and the options. Out: units whose shards have the values of rank 0. Read
`plan.py` first.
"""

from shardlite.build import validate
from shardlite.build.allocate import build_units, flats_of, part_of, place
from shardlite.build.broadcast_init import broadcast_buffers, broadcast_init, broadcast_values
from shardlite.build.meta_init import Init, Initialiser
from shardlite.build.plan import Options, Plan, agree_on_plan, plan_flats
from shardlite.build.validate import STAGES

__all__ = [
    "agree_on_plan",
    "broadcast_buffers",
    "broadcast_init",
    "broadcast_values",
    "build_units",
    "flats_of",
    "Init",
    "Initialiser",
    "Options",
    "part_of",
    "place",
    "Plan",
    "plan_flats",
    "STAGES",
    "validate",
]
