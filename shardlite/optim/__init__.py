"""AdamW on arenas: one kernel launch steps many shards.

In: shards with gradients, or gradients from the last hop of a reduction. Out: stepped shards. Read `adamw.py` first.
"""

from shardlite.optim.adamw import AdamW, adopt, check_loaded, steps_in_backward
from shardlite.optim.in_backward import InBackwardSteps, accumulating
