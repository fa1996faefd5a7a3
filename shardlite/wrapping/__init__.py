"""Build units from a module when it is wrapped. A unit is a group of parameters that are gathered together.

In: a module (possibly on the meta device) and the options. Out: units whose shards have rank 0's values. Read `plan.py`
first.
"""

from shardlite.wrapping import validate
from shardlite.wrapping.allocate import build_units, flats_of, placement_of
from shardlite.wrapping.offload import Offload, can_offload, moment_nbytes, offload_of
from shardlite.wrapping.partition import UnitPlan, UnitPolicy, needs, partition_module
from shardlite.wrapping.plan import Plan, plan_units
from shardlite.wrapping.validate import Options
