"""Verify the results of systems that train with Muon, before the measurement.

`torch.optim.Muon` orthogonalizes in bf16. A difference of one bit in a gradient changes the roundings that follow, so
results in other orders of addition cannot be compared to the bit. All systems and an exact twin, in which gradients,
Newton-Schulz and AdamW are in fp64, take the same steps. In the Euclidean norm, the error of any system may be twice
that of `DistributedDataParallel` (DDP), as `shardlite.lab.compared.check` describes. Only the first loss is compared,
because later losses depend on the roundings in bf16. The error of DDP is 1 % to 3 % of the change of a matrix, if its
gradient has full rank. If a batch has fewer rows than a matrix, some singular values of the gradient are 0, and the
iteration turns the roundings of these into noise of full size. So larger batches are compared (`_enlarged`).

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

from bench.optimizers.builds import MUON, OURS, both, split
from bench.optimizers.peers import COEFFICIENTS, STEPS
from shardlite.lab.compared.check import Expected, Record, ResultError, check, exact_model, record, slack
from shardlite.lab.compared.matrix import Setting
from shardlite.lab.compared.systems import Build
from shardlite.lab.compared.trainer import Trainer, flat
from shardlite.lab.compared.workloads import Workload
from shardlite.lab.timer import largest


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
    workload = _enlarged(workload, group.size())
    model = exact_model(workload, group)
    exact = record(Trainer(model, both(model, ExactMuon), flat), workload, group)
    ddp = record(systems["ddp"](workload, group), workload, group)
    expected = Expected(ddp, replace(exact, losses=exact.losses[:1]), slack(workload))
    shares = {}
    for name, build in systems.items():
        got = ddp if name == "ddp" else record(build(workload, group), workload, group)
        if name in OURS and group.size() <= 2:
            _check_bits(name, got, ddp, workload, group)
        shares[name] = check(name, got, expected, workload, group)
    return shares


def _enlarged(workload: Workload, ranks: int) -> Workload:
    """Return the workload with batches that have twice as many rows as a matrix has dimensions."""
    rank = max(min(matrix.shape) for matrix in split(workload.model())[0])
    return Setting(accumulation=-(-2 * rank // (ranks * workload.items))).workload(workload)


def _check_bits(name: str, got: Record, ddp: Record, workload: Workload, group: dist.ProcessGroup) -> None:
    wrong = [key for key, result in _results(ddp).items() if not _same(_results(got).get(key), result)]
    if largest([len(wrong)], group)[0]:
        raise ResultError(
            f"{name} on {workload.name} does not have the bits of ddp; different on rank {group.rank()}: "
            f"{', '.join(wrong) or 'nothing'}"
        )


def _results(got: Record) -> dict[str, Tensor]:
    """Return all results by name."""
    return {f"the loss of step {step}": loss for step, loss in enumerate(got.losses)} | got.computed | got.stored


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one, other)
