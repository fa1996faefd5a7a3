"""Settings of a comparison (precision, accumulation and clipping), and the systems that support each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

import torch
import torch.distributed as dist

from shardlite.lab.compared.systems import (
    ADAMW,
    ORDERS,
    STAGES,
    TRANSPORTS,
    Build,
    build_ddp,
    build_floor,
    build_fsdp1,
    build_fsdp2,
    build_shardlite,
    zero_optimizer,
)
from shardlite.lab.compared.trainer import Trainer
from shardlite.lab.compared.workloads import Batch, Workload

PrecisionName = Literal["fp32", "bf16"]

ROUNDOFF = {None: 2.0**-24, torch.bfloat16: 2.0**-9}
"""The largest relative error of rounding to the dtype of computation, where `None` is fp32."""


@dataclass(frozen=True)
class Setting:
    """Settings of training that all systems of a comparison share."""

    precision: PrecisionName = "fp32"
    """Dtype of forward and backward. Weights, reductions and moments are in fp32."""

    accumulation: int = 1
    """Number of micro-batches in a step."""

    max_norm: float | None = None
    """Norm to which gradients are clipped; `None` does not clip."""

    @property
    def compute(self) -> torch.dtype | None:
        """Dtype of forward and backward. `None` is the dtype of the weights."""
        return torch.bfloat16 if self.precision == "bf16" else None

    @property
    def optimizer(self) -> str:
        """Description of the optimizer."""
        return f"{ADAMW}, {self._clipping}"

    @property
    def words(self) -> str:
        """Description of the setting."""
        return f"{self.precision}, accumulation {self.accumulation}, {self._clipping}"

    @property
    def _clipping(self) -> str:
        return "no clipping" if self.max_norm is None else f"clipping to {self.max_norm:g}"

    def row(self) -> dict[str, str | int | float | None]:
        """Return the keys of the setting in a row."""
        return {"precision": self.precision, "accumulation": self.accumulation, "clip": self.max_norm}

    def workload(self, workload: Workload) -> Workload:
        """Return the workload with a batch that contains all micro-batches of a step."""
        count = self.accumulation
        if count == 1:
            return workload

        def draw(rank: int, step: int) -> Batch:
            x, y = zip(*(workload.draw(rank, count * step + i) for i in range(count)), strict=True)
            return torch.cat(x), torch.cat(y)

        return replace(workload, draw=draw, terms=count * workload.terms, items=count * workload.items)

    def build(self, build: Callable[..., Trainer]) -> Build:
        """Return a function that builds a system in this setting. `build` takes a dtype `compute`."""

        def built(workload: Workload, group: dist.ProcessGroup) -> Trainer:
            trainer = build(workload, group, compute=self.compute)
            return replace(trainer, accumulation=self.accumulation, max_norm=self.max_norm)

        return built


def settings(
    precisions: Sequence[PrecisionName], counts: Sequence[int], norms: Sequence[float | None]
) -> list[Setting]:
    """Return all combinations of the values."""
    return [Setting(*each) for each in product(precisions, counts, norms)]


_ALWAYS: dict[str, Callable[..., Trainer]] = {
    "floor": build_floor,
    "ddp": build_ddp,
    "zero": partial(build_ddp, optimizer=zero_optimizer),
    "fsdp1": build_fsdp1,
    "fsdp2": build_fsdp2,
    **STAGES,
    "int8": partial(build_shardlite, state="int8"),
    **TRANSPORTS,
}

_IN_BACKWARD: dict[str, Callable[..., Trainer]] = {"in_backward": partial(build_shardlite, in_backward=True)}
"""Systems that support neither several micro-batches nor clipping."""

_SPLIT: dict[str, Callable[..., Trainer]] = {"split24": partial(build_shardlite, master="split24")}
"""Systems that exist only in bf16."""

_COMPACT: dict[str, Callable[..., Trainer]] = {
    "compact": partial(build_shardlite, master="split24", state="int8", in_backward=True)
}

NAMES = (*_ALWAYS, *_IN_BACKWARD, *_SPLIT, *_COMPACT, *ORDERS)
"""All systems, in the order of a table."""


def systems_in(setting: Setting) -> dict[str, Build]:
    """Return the systems that support a setting."""
    narrow = setting.precision == "bf16"
    steps_in_backward = setting.accumulation == 1 and setting.max_norm is None
    builds = dict(_ALWAYS)
    builds |= _IN_BACKWARD if steps_in_backward else {}
    builds |= _SPLIT if narrow else {}
    builds |= _COMPACT if narrow and steps_in_backward else {}
    if narrow and setting.accumulation > 1:
        del builds["fsdp1"]  # PyTorch 2.13 raises, because `no_sync` leaves bf16 gradients in fp32 parameters
    found = {name: setting.build(build) for name, build in builds.items()}
    return found | (ORDERS if setting == Setting() else {})
