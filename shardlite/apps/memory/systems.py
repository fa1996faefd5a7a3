"""The systems whose step is recorded: ShardLite, and FSDP2 on the same units with the same optimizer.

In: a `Source` and a `Setting`. Out: a `System`, ready to train on this rank's CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardlite import AdamW, ShardLite
from shardlite.apps.footprint.systems import wrap_fsdp2
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
    """Wrap a new model. To be called by every rank."""
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
    """Shard a new model by FSDP2: each of `units`, then the root. To be called by every rank."""
    torch.manual_seed(SEED)
    module = source.make()
    group = dist.group.WORLD
    assert group is not None
    wrap_fsdp2(module, [module.get_submodule(name) for name in units], group, setting.precision)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    return System(model=module, module=module, optimizer=optimizer, units=units, held=dict)
