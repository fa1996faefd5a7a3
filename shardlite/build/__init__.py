"""Build units of shards from a module when it is wrapped.

In: a module (possibly on the meta device) and the options. Out: units whose shards hold rank 0's values. Read `plan.py`
first.
"""

from shardlite.build import validate
from shardlite.build.allocate import build_units, flats_of, part_of, placement_of
from shardlite.build.broadcast_init import broadcast_buffers, broadcast_init, broadcast_values
from shardlite.build.meta_init import Init, Initializer
from shardlite.build.plan import Options, Plan, agree_on_plan, plan_flats
from shardlite.build.validate import STAGES
