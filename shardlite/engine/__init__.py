"""Where autograd and PyTorch are hooked.

In: forwards, backwards, and what programs do to parameters and optimizers between them. Out: calls of `weights`,
`grads` and `optim`, in the right order. Read `module_hooks.py` first, then `backward.py`.
"""

from shardlite.engine import torch_patches
from shardlite.engine.backward import Backward, in_backward
from shardlite.engine.buffers import Buffers
from shardlite.engine.conversions import allow_conversions, cast_floats, refuse_conversions
from shardlite.engine.full_params import NO_COPY, FullParameters
from shardlite.engine.homes import attach_all
from shardlite.engine.local_shards import Shards
from shardlite.engine.module_hooks import NO_GRAPH, ModuleHooks
from shardlite.engine.module_map import needs, param_locations
from shardlite.engine.optimizer_bridge import InBackwardOptimizer, OptimizerBridge
from shardlite.engine.part_loop import PartLoop
from shardlite.engine.state_dicts import NUMBERS
from shardlite.engine.uneven_inputs import Batch, Join
