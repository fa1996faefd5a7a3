"""The systems whose step is recorded: ShardLite, and FSDP2 on the same units with the same optimizer.

In: a `Source` and a `Setting`. Out: a `System`, ready to train on this rank's CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from shardlite import AdamW, ShardLite
from shardlite.apps.plan.plan import Setting
from shardlite.apps.plan.source import Source
from shardlite.telemetry import Held

SEED = 0
"""Of the first weights, and of what the model draws."""

_ROOT = "(root)"


@dataclass(frozen=True, kw_only=True)
class System:
    """A model in training."""

    model: nn.Module
    module: nn.Module
    """The same, as it was made."""

    optimizer: Optimizer
    units: Sequence[str]
    """Names of the modules that are gathered each as a whole, in the order of registration, without the root."""

    held: Callable[[], Mapping[str, Held]]
    """Returns the bytes by purpose. Empty for a system that keeps no account."""


def build_shardlite(source: Source, setting: Setting) -> System:
    """Wrap a new model. Collective."""
    torch.manual_seed(SEED)
    module = source.make()
    model = ShardLite(
        module,
        stage=setting.stage,
        precision=setting.precision,
        prefetch=setting.prefetch,
        reshard_after_forward=setting.reshard_after_forward,
        device="cpu",
    )
    return System(
        model=model,
        module=module,
        optimizer=AdamW(model.parameters(), state=setting.state, in_backward=setting.in_backward),
        units=[name for name in model.unit_names if name != _ROOT],
        held=model.memory,
    )


def build_fsdp2(source: Source, setting: Setting, units: Sequence[str]) -> System:
    """Shard a new model by FSDP2: each of `units`, then the root. Fused AdamW in fp32. Collective."""
    torch.manual_seed(SEED)
    module = source.make()
    mesh = init_device_mesh("cpu", (setting.world_size,))
    precision = setting.precision
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute, reduce_dtype=None if precision.compute is None else precision.reduce
    )
    for name in units:
        fully_shard(module.get_submodule(name), mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    return System(model=module, module=module, optimizer=optimizer, units=units, held=dict)
