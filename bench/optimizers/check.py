"""Verify the results of systems that train with Muon, before the measurement.

`torch.optim.Muon` orthogonalizes in bf16. A difference of one bit in a gradient changes the roundings that follow, so
results in other orders of addition cannot be compared to the bit. All systems and an exact twin, in which gradients,
Newton-Schulz and AdamW are in fp64, take the same steps. In the Euclidean norm, the error of any system may be twice
that of `DistributedDataParallel` (DDP), as `bench.support.check` describes. Only the first loss is compared, because
later losses depend on the roundings in bf16.

Two ranks add gradients in one order. So ShardLite must then have the bits of DDP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.optimizers.peers import COEFFICIENTS, STEPS
from bench.optimizers.systems import MUON, OURS, both
from bench.support.check import Record, ResultError, compare, exact_model, record
from bench.support.measure import largest
from bench.support.systems import Build, Trainer, flat
from bench.support.workloads import Workload


class ExactMuon(Optimizer):
    """Muon in the dtype of the weights."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, MUON)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all matrices."""
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalize(param.grad.lerp(momentum, group["momentum"]))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(update, alpha=0.2 * group["lr"] * max(param.shape) ** 0.5)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return the result of `torch.optim.Muon`'s iteration (Newton-Schulz), in the dtype of the matrix."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if tall else matrix) / matrix.norm()
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def verify(workload: Workload, systems: Mapping[str, Build], group: dist.ProcessGroup) -> dict[str, float]:
    """For each system, return its largest error divided by the tolerance. Collective.

    `systems` must include `ddp`.

    Raises:
        ResultError: The error of a system exceeds the tolerance on any rank, or ShardLite does not have the bits of DDP
            on two ranks. Raised on every rank.
    """
    if group.size() <= 2:
        _verify_bits(workload, systems, group)
    model = exact_model(workload, group)
    exact = record(Trainer(model, both(model, ExactMuon), flat), workload, group)
    return compare(replace(exact, losses=exact.losses[:1]), workload, systems, group)


def _verify_bits(workload: Workload, systems: Mapping[str, Build], group: dist.ProcessGroup) -> None:
    ddp = record(systems["ddp"](workload, group), workload, group)
    for name in [name for name in systems if name in OURS]:
        wrong = _differing(record(systems[name](workload, group), workload, group), ddp)
        if largest([len(wrong)], group)[0]:
            raise ResultError(f"{name} on {workload.name} does not have the bits of ddp; differing: {wrong or 'none'}")


def _differing(got: Record, ddp: Record) -> list[str]:
    """Return the names of the results that do not have the same bits."""
    ours, theirs = got.computed | got.stored, ddp.computed | ddp.stored
    losses = [
        f"the loss of step {i}"
        for i, pair in enumerate(zip(got.losses, ddp.losses, strict=True))
        if not torch.equal(*pair)
    ]
    return losses + [
        name for name in sorted(ours.keys() | theirs.keys()) if not _same(ours.get(name), theirs.get(name))
    ]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
