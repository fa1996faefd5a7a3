"""DeepSpeed's ZeRO stages as systems, where DeepSpeed is installed. It is no requirement of this project.

    DS_BUILD_OPS=0 pip install deepspeed

0.19.8 runs its stages 1 and 3 on CPU ranks over gloo, with PyTorch's own fused AdamW, and compiles an operator for
messages in shared memory at its first start. In fp32 its results are DDP's, with accumulation and clipping too. In bf16
it casts gradients to bf16, so its weights are further from the exact ones than `bench.support.check` allows: it is left
out there.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.support.systems import Trainer, flat
from bench.support.workloads import Batch, Workload
from shardlite.apps.memory.systems import deepspeed_engine, torch_adamw

STAGES = (1, 3)


def is_installed() -> bool:
    """Return whether the systems of this module can be built."""
    return find_spec("deepspeed") is not None


class DeepSpeed(Trainer):
    """Trains by an engine, which counts micro-batches, clips, and drops gradients by itself."""

    def backward(self, batch: Batch) -> Tensor:
        """Run forward and backward, and return the loss of this rank's batch, []."""
        engine: Any = self.model
        losses = []
        for place, parts in enumerate(zip(*(each.chunk(self.accumulation) for each in batch), strict=True)):
            if place:
                engine.step()  # of the micro-batch before: it only counts
            loss = self.loss(parts)
            engine.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def update(self) -> Tensor | None:
        """Take the optimizer's step. Return the norm before clipping, [], if gradients are clipped."""
        engine: Any = self.model
        engine.step()
        return None if self.max_norm is None else torch.as_tensor(engine.get_global_grad_norm())

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters by their names in the plain model, whole and flat."""
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: self.whole(safe_get_full_fp32_param(param)) for name, param in self._named()}

    def gradients(self) -> dict[str, Tensor]:
        """Return all gradients by the names of their parameters, whole and flat."""
        from deepspeed.utils import safe_get_full_grad

        return {name: self.whole(safe_get_full_grad(param)) for name, param in self._named()}


def build_deepspeed(
    workload: Workload,
    group: dist.ProcessGroup,
    *,
    stage: int,
    accumulation: int,
    max_norm: float | None,
    compute: torch.dtype | None = None,
) -> Trainer:
    """Build DeepSpeed at one stage of ZeRO. It needs the default group, and trains in fp32 only."""
    assert group == dist.group.WORLD
    assert compute is None, "only in fp32"
    model = workload.model()
    units, optimizer = workload.units(model), torch_adamw(model.parameters())
    limits = {"accumulation": accumulation, "max_norm": max_norm}
    return DeepSpeed(deepspeed_engine(model, units, optimizer, stage=stage, **limits), optimizer, flat)
