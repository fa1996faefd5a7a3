"""Hooks in modules, autograd and optimizers.

In: the program's forwards, backwards and steps, and its accesses to parameters outside of them. Out: calls of the
packages `weights`, `grads` and `optim`, in the right order. Read `module_hooks.py` first, then `backward.py` and
`steps.py`. `connect.py` builds these objects for a model, and `patches.py` lists the changes in PyTorch.
"""

from shardlite.engine.backward import in_backward
from shardlite.engine.capture import capture
from shardlite.engine.connect import connect, disconnect, method_of_module, running, uncompiled
from shardlite.engine.conversions import cast_floats, cast_inputs
from shardlite.engine.local_shards import ShardRange, Shards
from shardlite.engine.module_hooks import NO_GRAPH
from shardlite.engine.part_loop import PartLoop
from shardlite.engine.patches import install_patches
from shardlite.engine.steps import (
    OptimizerBridge,
    forget_models,
    models_with,
    params_of,
)
from shardlite.engine.uneven_inputs import Batch
