"""A system is timed only after its results were compared with those of data parallel.

All systems and an exact twin (the plain model in fp64, with gradients averaged over the ranks in fp64) take the same
few steps. Any system may be twice as far from the exact result as `DistributedDataParallel` is, in the Euclidean norm:

    |got - exact| <= 2 |ddp - exact| + slack

The systems round differently, and none is preferred; an error in scale, order, averaging or
weight decay is larger by orders of magnitude. `slack` is what rounding the exact result once to fp32 costs, for DDP may
be exact by chance; for a loss, which is a mean of `n` terms, it is what adding them in pairs costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.support.systems import BETAS, LR, WEIGHT_DECAY, Build, Floor, Trainer
from bench.support.workloads import Workload

STEPS = 3
"""How many steps are compared: the last ones depend on the optimizer's state."""

UNIT_ROUNDOFF = 2.0**-24
"""The largest relative error of rounding to fp32."""


class ResultError(Exception):
    """A system computes something else than data parallel does."""


@dataclass(frozen=True)
class Record:
    """What a system computed in the first steps."""

    losses: list[Tensor]
    """Of this rank's batches, one for each step, []."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The gradients of the first step and the weights after the last one, whole and flat."""


def verify(workload: Workload, systems: Mapping[str, Build], group: dist.ProcessGroup) -> dict[str, float]:
    """Return for each system how much of the tolerance it needs at most: 1 is as much as is allowed.

    To be called by every rank; `systems` must hold `ddp`.

    Raises:
        ResultError: on every rank, if a system is out of tolerance on any.
    """
    exact = record(_build_exact(workload, group), workload, group)
    ddp = record(systems["ddp"](workload, group), workload, group)
    shares = {}
    for name, build in systems.items():
        got = ddp if name == "ddp" else record(build(workload, group), workload, group)
        share, where = max(_shares(got, ddp, exact, workload.terms))
        shares[name] = _largest(share, group)
        if shares[name] > 1:
            raise ResultError(
                f"{name} on {workload.name} is {shares[name]:.3g} times as far from the exact result as allowed; "
                f"on rank {group.rank()} the worst is {where}, {share:.3g} times"
            )
    return shares


def record(trainer: Trainer, workload: Workload, group: dist.ProcessGroup) -> Record:
    """Take the first steps. The floor's model never moves, so only its first loss means anything."""
    batches = [workload.batch(group.rank(), step) for step in range(STEPS)]
    first = trainer.backward(batches[0])
    if isinstance(trainer, Floor):
        return Record([first])
    gradients = {f"the gradient of {name}": gradient for name, gradient in trainer.gradients().items()}
    trainer.update()
    losses = [first, *(trainer.step(batch) for batch in batches[1:])]
    weights = {f"the weight {name}": weight for name, weight in trainer.weights().items()}
    return Record(losses, gradients | weights)


def _build_exact(workload: Workload, group: dist.ProcessGroup) -> Trainer:
    """The twin in fp64, which averages each gradient as it comes."""

    def average(param: Tensor) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad, group=group)
        param.grad /= group.size()

    model = workload.model().double()
    model.register_forward_pre_hook(lambda _, batch: tuple(_widened(tensor) for tensor in batch))
    for param in model.parameters():
        on_gradient: Any = param.register_post_accumulate_grad_hook
        on_gradient(average)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    return Trainer(model, optimizer, lambda tensor: tensor.detach().reshape(-1).clone())


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _shares(got: Record, ddp: Record, exact: Record, terms: int) -> list[tuple[float, str]]:
    """How much of the tolerance each result needs, and its name."""
    if got.tensors and got.tensors.keys() != exact.tensors.keys():
        return [(math.inf, f"the set of names ({sorted(got.tensors.keys() ^ exact.tensors.keys())})")]
    shares = []
    for step, (loss, theirs, true) in enumerate(zip(got.losses, ddp.losses, exact.losses, strict=False)):
        slack = max(1.0, math.log2(terms)) * UNIT_ROUNDOFF
        shares.append((_share(loss, theirs, true, slack), f"the loss of step {step}"))
    for name, tensor in got.tensors.items():
        shares.append((_share(tensor, ddp.tensors[name], exact.tensors[name], UNIT_ROUNDOFF), name))
    return shares


def _share(got: Tensor, ddp: Tensor, exact: Tensor, slack: float) -> float:
    if got.shape != exact.shape:
        return math.inf
    distance = _distance(got, exact)
    allowed = 2 * _distance(ddp, exact) + slack * float(exact.norm())
    if distance == allowed == 0:
        return 0.0
    return distance / allowed if allowed and not math.isnan(distance) else math.inf


def _distance(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor.double() - exact).norm())


def _largest(value: float, group: dist.ProcessGroup) -> float:
    """The largest value of all ranks."""
    most = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return most.item()
