"""AdamW on arenas (buffers of many shards or moments), and a probe that finds out whether optimizers are elementwise.

In: shards with gradients, or the summands of the last addition of a reduction. Out: stepped shards. Read `adamw.py`
first.
"""

from shardlite.optim.adamw import AdamW, Unconverted, adopt, check_loaded, steps_in_backward
from shardlite.optim.in_backward import InBackwardSteps, accumulating
from shardlite.optim.layout import canonical
from shardlite.optim.probe import RAISES, Verdict, probe_closure, probe_shards, probe_whole, step_without_hooks
from shardlite.optim.whole_state import WholeStateOptimizer
