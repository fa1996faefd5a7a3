"""Gradients on their way to the shards.

In: gradients as autograd delivers them. Out: gradient shards, divided, with their norm and whether all are finite.
Read `reducer.py` first.
"""

from shardlite.grads.bucket import Bucket
from shardlite.grads.flags import SoloGradientFlags
from shardlite.grads.norm import Clipper
from shardlite.grads.reduce_scatter import ShardStep
from shardlite.grads.reducer import Reducer
from shardlite.grads.skip_step import Skips
