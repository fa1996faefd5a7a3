"""Build units of shards from a module when it is wrapped.

In: a module (possibly on the meta device) and the options. Out: units whose shards hold rank 0's values. Read `plan.py`
first.
"""

from shardlite.build import validate
from shardlite.build.allocate import build_units, flats_of, part_of, placement_of
from shardlite.build.broadcast_init import broadcast_buffers, broadcast_init, broadcast_values
from shardlite.build.budget import HELD, Budget, FlatBudget, Recipe, UnitBudget, budget_of
from shardlite.build.limit import MOST_RANKS, check_memory_limit
from shardlite.build.meta_init import Init, Initializer
from shardlite.build.plan import Options, Plan, agree_on_plan, plan_flats, plan_units
from shardlite.build.timeline import ACTIVATIONS, Action, Course, Event, Kind, course_of, plain_events
from shardlite.build.validate import STAGES
