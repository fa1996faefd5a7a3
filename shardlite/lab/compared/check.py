"""Compare the results of each system with those of `DistributedDataParallel` (DDP), before the measurement.

All systems and an exact twin (the plain model in fp64, with gradients averaged over the ranks in fp64) take the same
few steps. In the Euclidean norm, the error of any system may be twice that of DDP:

    |got - exact| <= 2 |ddp - exact| + slack

Systems round differently, and no rounding is preferred. An error in scale, order, averaging or weight decay is larger
by orders of magnitude. DDP may be exact by chance. Then `slack` alone is the limit: it is the error of rounding the
exact result once to the dtype of computation. A loss is a mean of `n` terms, and its `slack` is the error of pairwise
summation. Weights are always fp32. Adam divides by the size of the gradient, so in a small tensor a few weights with
tiny gradients have most of the error. If DDP's error in a weight tensor is below DDP's average over all weights, the
average is used. Formats other than fp32 are compared only by their losses, within `FORMAT_ERROR`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlite.lab.compared.matrix import ROUNDOFF, Setting
from shardlite.lab.compared.systems import OPTIONS, Build
from shardlite.lab.compared.trainer import Floor, Format, Trainer, flat
from shardlite.lab.compared.workloads import Workload
from shardlite.lab.timer import largest

STEPS = 3
"""Number of compared steps. The later steps depend on the optimizer's state."""

UNIT_ROUNDOFF = ROUNDOFF[None]
"""The largest relative error of rounding to fp32."""

FORMAT_ERROR = 0.05
"""Maximum relative error of the losses of a format, as in `bench.gpu`."""


class ResultError(Exception):
    """Raised if the result of a system differs from that of DDP."""


@dataclass(frozen=True)
class Record:
    """Results of a system in the first steps."""

    losses: list[Tensor]
    """Losses of this rank, one per step, []."""

    computed: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the first step, unsharded and flattened, and their norm before clipping."""

    stored: dict[str, Tensor] = field(default_factory=dict)
    """Weights after the compared steps, unsharded and flattened."""

    is_format: bool = False
    """Whether only the losses are comparable."""


class Expected(NamedTuple):
    """The results with which those of other systems are compared."""

    ddp: Record
    exact: Record
    """Only as many losses are compared as this record has."""

    slack: tuple[float, float]
    """Relative slack of a loss and of other results."""


def verify(
    workload: Workload,
    systems: Mapping[str, Build],
    group: dist.ProcessGroup,
    setting: Setting = Setting(),  # noqa: B008 (frozen)
) -> dict[str, float]:
    """For each system, return its largest error divided by the tolerance. Collective.

    `systems` must include `ddp`. `workload` and all systems have this `setting`.

    Raises:
        ResultError: If the error of a system exceeds the tolerance on any rank. Raised on every rank.
    """
    exact = record(_build_exact(workload, group, setting), workload, group)
    ddp = record(systems["ddp"](workload, group), workload, group)
    expected = Expected(ddp, exact, slack(workload, setting))
    shares = {}
    for name, build in systems.items():
        got = ddp if name == "ddp" else record(build(workload, group), workload, group)
        shares[name] = check(name, got, expected, workload, group)
    return shares


def check(name: str, got: Record, expected: Expected, workload: Workload, group: dist.ProcessGroup) -> float:
    """Return the largest error of a system's results, divided by the tolerance. Collective.

    Raises:
        ResultError: The error exceeds the tolerance on any rank. Raised on every rank.
    """
    share, where = max(_shares(got, expected))
    worst = largest([share], group)[0]
    if worst > 1:
        raise ResultError(
            f"{name} on {workload.name} is {worst:.3g} times as far from the exact result as allowed; "
            f"on rank {group.rank()} the worst is {where}, {share:.3g} times"
        )
    return worst


def record(trainer: Trainer, workload: Workload, group: dist.ProcessGroup) -> Record:
    """Take the compared steps, and return their results. The floor has one loss, because its model never changes."""
    batches = [workload.batch(group.rank(), step) for step in range(STEPS)]
    first = trainer.backward(batches[0])
    if isinstance(trainer, Floor):
        return Record([first])
    is_format = isinstance(trainer, Format)
    computed = {} if is_format else {f"the gradient of {name}": each for name, each in trainer.gradients().items()}
    norm = trainer.update()
    if norm is not None and not is_format:
        computed["the norm of the gradients"] = norm.detach().reshape(1)
    losses = [first, *(trainer.step(batch) for batch in batches[1:])]
    stored = {} if is_format else {f"the weight {name}": weight for name, weight in trainer.weights().items()}
    return Record(losses, computed, stored, is_format)


def _build_exact(workload: Workload, group: dist.ProcessGroup, setting: Setting) -> Trainer:
    """Return the twin in fp64, which processes all micro-batches as one batch."""
    model = exact_model(workload, group)
    return Trainer(model, torch.optim.AdamW(model.parameters(), **OPTIONS), flat, max_norm=setting.max_norm)


def exact_model(workload: Workload, group: dist.ProcessGroup) -> nn.Module:
    """Return the plain model in fp64. Its backward averages the gradients over the ranks."""

    def average(param: Tensor) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad, group=group)
        param.grad /= group.size()

    model = workload.model().double()
    model.register_forward_pre_hook(lambda _, batch: tuple(_widened(tensor) for tensor in batch))
    for param in model.parameters():
        on_gradient: Any = param.register_post_accumulate_grad_hook
        on_gradient(average)
    return model


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def slack(workload: Workload, setting: Setting = Setting()) -> tuple[float, float]:  # noqa: B008 (frozen)
    """Return the relative slack of a loss and of other results."""
    roundoff = ROUNDOFF[setting.compute]
    return max(1.0, math.log2(workload.terms)) * roundoff, roundoff


def _shares(got: Record, expected: Expected) -> list[tuple[float, str]]:
    """Return the error of each result, divided by its tolerance, and the name of the result."""
    ddp, exact, slack = expected
    if got.is_format:
        pairs = enumerate(zip(got.losses, exact.losses, strict=True))
        return [
            (float(abs(loss / true - 1)) / FORMAT_ERROR, f"the loss of step {step}") for step, (loss, true) in pairs
        ]
    if got.stored and (got.computed | got.stored).keys() != (exact.computed | exact.stored).keys():
        names = sorted((got.computed | got.stored).keys() ^ (exact.computed | exact.stored).keys())
        return [(math.inf, f"the set of names ({names})")]
    shares = []
    for step, (loss, theirs, true) in enumerate(zip(got.losses, ddp.losses, exact.losses, strict=False)):
        shares.append((_share(loss, theirs, true, slack[0]), f"the loss of step {step}"))
    for name, tensor in got.computed.items():
        shares.append((_share(tensor, ddp.computed[name], exact.computed[name], slack[1]), name))
    usual = _usual_error(ddp, exact)
    for name, tensor in got.stored.items():
        least = usual * math.sqrt(tensor.numel())
        shares.append((_share(tensor, ddp.stored[name], exact.stored[name], UNIT_ROUNDOFF, least), name))
    return shares


def _usual_error(ddp: Record, exact: Record) -> float:
    """Return the root mean square of DDP's errors over all weights."""
    squares = sum(_distance(tensor, exact.stored[name]) ** 2 for name, tensor in ddp.stored.items())
    return math.sqrt(squares / max(1, sum(tensor.numel() for tensor in ddp.stored.values())))


def _share(got: Tensor, ddp: Tensor, exact: Tensor, slack: float, least: float = 0.0) -> float:
    if got.shape != exact.shape:
        return math.inf
    distance = _distance(got, exact)
    allowed = 2 * max(_distance(ddp, exact), least) + slack * float(exact.norm())
    if distance == allowed == 0:
        return 0.0
    return distance / allowed if allowed and not math.isnan(distance) else math.inf


def _distance(tensor: Tensor, exact: Tensor) -> float:
    return float((tensor.double() - exact).norm())
