"""Build units from a module when it is wrapped. A unit is a group of parameters that are gathered together.

In: a module (possibly on the meta device) and the options. Out: units whose shards have rank 0's values. Read `plan.py`
first.
"""

from shardlite.wrapping import validate
from shardlite.wrapping.allocate import Placement, Wrapped, build_units, flats_of, part_of, placement_of, wrap
from shardlite.wrapping.init import Init, broadcast_full, set_values, values_of
from shardlite.wrapping.keep import dtypes_of
from shardlite.wrapping.partition import UnitPlan, UnitPolicy, UnitRule, needs, partition_module
from shardlite.wrapping.plan import Plan, agree_on_plan, plan_flats, plan_units
from shardlite.wrapping.validate import STAGES, Options, unmark_wrapped
