"""Hooks in modules, autograd and optimizers.

In: the program's forwards, backwards and steps, and its accesses to parameters outside of them. Out: calls of the
packages `weights`, `grads` and `optim`, in the right order. Read `module_hooks.py` first, then `backward.py` and
`optimizer_hooks.py`. `connect.py` builds these objects for a model, and `patches.py` lists the changes in PyTorch.
"""

from shardlite.engine.backward import in_backward
from shardlite.engine.capture import capture
from shardlite.engine.connect import connect, disconnect, method_of_module, running, uncompiled
from shardlite.engine.conversions import cast_floats, cast_inputs
from shardlite.engine.module_hooks import NO_GRAPH
from shardlite.engine.optimizer_hooks import (
    OptimizerBridge,
    check_adoptable,
    give_shards,
    models_with,
    name_of_value,
    numbers_among,
    params_of,
)
from shardlite.engine.param_groups import Group, match_groups, names_in, plain_name
from shardlite.engine.part_loop import PartLoop
from shardlite.engine.patches import install_patches
from shardlite.engine.uneven_inputs import Batch
