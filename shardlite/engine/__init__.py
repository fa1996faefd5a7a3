"""Hooks in modules, autograd and optimizers.

In: the program's forwards, backwards and steps, and its accesses to parameters outside of them. Out: calls of the
packages `weights`, `grads` and `optim`, in the right order. Read `module_hooks.py` first, then `backward.py` and
`steps.py`. `connect.py` builds these objects for a model, and `patches.py` lists the changes in PyTorch.
"""

from shardlite.engine.backward import in_backward
from shardlite.engine.conversions import cast_floats, cast_inputs
from shardlite.engine.steps import OptimizerBridge, models_with, params_of
