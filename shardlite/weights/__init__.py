"""Unshard and reshard the parameters of modules.

In: units, and the begin and end of each use. Out: the module's parameters as views of gathered buffers, or as
placeholders. All ranks gather in the same order, even if their forwards take different branches. Read `unshard.py`
first.
"""

from shardlite.weights.all_gather import outside_transforms
from shardlite.weights.resident import Gathering
from shardlite.weights.saved_tensors import Calls
from shardlite.weights.unshard import Gatherer
