"""Reduce gradients to the shards.

In: gradients as autograd delivers them. Out: averaged gradient shards, their norm, and a flag for NaNs and infinities.
Read `reducer.py` first, then `backward_run.py`.
"""

from shardlite.grads.backward_run import Mode
from shardlite.grads.norm import Clipper
from shardlite.grads.options import StepOptions
from shardlite.grads.reduce import Stepping
from shardlite.grads.reducer import Reducer
from shardlite.grads.skip_step import Skips
