"""Full weights while a module needs them.

In: units, and when they are used. Out: the module's parameters as views of gathered buffers, or placeholders. All ranks
gather in one order, whatever branches each of them takes. Read `unshard.py` first.
"""

from shardlite.weights.all_gather import differs, take_over, take_over_all
from shardlite.weights.gather_order import GatherOrder
from shardlite.weights.policy import BufferPolicy, UnitSize
from shardlite.weights.resident import Gathering, ResidentWeights
from shardlite.weights.saved_tensors import Call, Calls, are_innermost, pop_hooks, push_hooks
from shardlite.weights.unshard import Gatherer
