"""Reduce gradients to the shards.

In: gradients as autograd delivers them. Out: averaged gradient shards, their norm, and a flag for NaNs and infinities.
Read `reducer.py` first, then `backward_run.py`.
"""

from shardlite.grads.backward_run import BackwardRun, Mode
from shardlite.grads.flags import SoloGradientFlags
from shardlite.grads.norm import Clipper
from shardlite.grads.options import StepOptions, options_of
from shardlite.grads.policy import before_root, mean_stays, must_land_first, waits_for_unit
from shardlite.grads.reduce import Step, Stepping
from shardlite.grads.reducer import Reducer
from shardlite.grads.scale import Scale
from shardlite.grads.skip_step import Skips
from shardlite.grads.solo import SoloScale, nested_backward
from shardlite.grads.stream_run import open_run
