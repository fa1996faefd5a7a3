"""Hooks in modules, autograd and optimizers.

In: the program's forwards, backwards and steps, and its accesses to parameters outside of them. Out: calls of the
packages `weights`, `grads` and `optim`, in the right order. Read `module_hooks.py` first, then `backward.py` and
`steps.py`. `patches.py` lists the changes in PyTorch.
"""

from shardlite.engine.backward import Backward, in_backward
from shardlite.engine.capture import capture
from shardlite.engine.conversions import (
    allow_conversions,
    cast_floats,
    cast_inputs,
    refuse_conversions,
    take_inputs_as_they_are,
)
from shardlite.engine.full_params import NO_COPY, FullParameters
from shardlite.engine.local_shards import ShardRange, Shards, gather_param
from shardlite.engine.module_buffers import Buffers
from shardlite.engine.module_hooks import NO_GRAPH, ModuleHooks, param_locations
from shardlite.engine.part_loop import PartLoop
from shardlite.engine.patches import install_patches
from shardlite.engine.steps import (
    InBackwardOptimizer,
    OptimizerBridge,
    forget_models,
    models_with,
    params_of,
    register_model,
    unregister_model,
)
from shardlite.engine.uneven_inputs import Batch, Join
from shardlite.engine.weight_stream import WeightStream, pieces_of
