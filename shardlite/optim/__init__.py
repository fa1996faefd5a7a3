"""AdamW on arenas: one kernel launch steps the shards of many parameters.

In: shards with gradients, or gradients from the last hop of a reduction. Out: stepped shards. Read `adamw.py` first.
"""

from shardlite.optim.adamw import AdamW, accumulating, adopt, steps_in_backward
from shardlite.optim.validate import check_loaded
