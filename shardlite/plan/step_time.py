"""Predict step time by an event simulation of one processor and one link.

    computation   |  u1  |  u2  |wait| u3 ...      at the card's measured efficiency
    link          | gather u2 | gather u3 |  ...    one collective at a time, first started, first served

Gathers and reductions overlap with the computation. The computation waits for a gather that has not ended, or for a
free bucket. This waiting time is exposed communication. `shardlite.plan` gives the order of operations, and the cost
model gives the times of collectives. The simulation ignores launches, operators that compute little, stragglers, and
the slowdown of the computation by collectives.

Legend: `W` ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardlite.plan.budget import UnitBudget
from shardlite.plan.clusters import Cluster
from shardlite.plan.planner import RankPlan

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of one step."""

    total: float
    compute: float
    """Forward and backward."""

    update: float
    """The optimizer's step. Zero if the step is in the backward."""

    communication: float
    """All gathers and reductions, overlapped or not."""

    flops: float
    """Floating-point operations of this rank, not seconds."""

    @property
    def exposed(self) -> float:
        """Seconds in which computation waits for communication."""
        return self.total - self.compute - self.update


def simulate(plan: RankPlan, cluster: Cluster, *, scale: float = 1.0) -> StepTime:
    """Predict the step of a planned rank. `scale` multiplies the computation, as a larger batch would."""
    rate = cluster.card.flops(narrow=plan.setting.precision.compute in _NARROW)
    run = _Run(plan, cluster, rate / scale)
    for action in plan.timeline.actions:
        run.apply(action.name, action.unit, action.flops)
    flops = scale * sum(action.flops for action in plan.timeline.actions)
    return StepTime(
        total=max(run.now, run.link_free),
        compute=flops / rate,
        update=run.update,
        communication=run.communication,
        flops=flops,
    )


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Scaling efficiencies at one number of ranks. 1 means `W` times the throughput of one rank."""

    world_size: int
    weak: float
    """Efficiency with the same batch on each rank."""

    strong: float
    """Efficiency with a constant global batch: the batch of a rank times the largest number of ranks."""

    amdahl: float
    """Efficiency by Amdahl's law for the constant global batch, without overlap. The serial fraction is the
    communication at the largest number of ranks, divided by the time of one rank.
    """


def scaling(one: RankPlan, plans: Sequence[RankPlan], cluster: Cluster) -> list[Scaling]:
    """Return the efficiencies of plans that differ only in the number of ranks, relative to `one` rank.

    Memory is not checked, so the model may not fit on one rank.
    """
    worlds = [plan.setting.world_size for plan in plans]
    most = max(worlds)
    alone = simulate(one, cluster).total
    all_alone = simulate(one, cluster, scale=most).total
    serial = max(simulate(plan, cluster).communication for plan in plans) / all_alone
    return [
        Scaling(
            world_size=ranks,
            weak=alone / simulate(plan, cluster).total,
            strong=all_alone / ranks / simulate(plan, cluster, scale=most / ranks).total,
            amdahl=1 / (ranks * serial + 1 - serial),
        )
        for ranks, plan in zip(worlds, plans, strict=True)
    ]


class _Run:
    """A simulation in progress: the current time, and the time at which the link is free."""

    def __init__(self, plan: RankPlan, cluster: Cluster, rate: float) -> None:
        self._plan, self._cluster, self._rate = plan, cluster, rate
        self._ranks = plan.setting.world_size
        self._gathered: dict[int, float] = {}
        self._reduced: dict[int, float] = {}
        self.now = self.link_free = self.communication = self.update = 0.0

    def apply(self, name: str, unit: int, flops: float) -> None:
        """Apply one action."""
        if name == "compute":
            self.now += flops / self._rate
        elif name == "gather":
            self._gathered[unit] = self._send(self._gather_seconds(self._plan.budget.units[unit]))
        elif name == "need":
            self.now = max(self.now, self._gathered.get(unit, 0.0))
        elif name == "reduce":
            self._reduced[unit] = self._send(self._reduce_seconds(self._plan.budget.units[unit]))
        elif name == "land":
            self.now = max(self.now, self._reduced[unit])
        elif name == "step" and not self._plan.setting.in_backward:
            self.update = sum(map(self._step_seconds, self._plan.budget.units))
            self.now = max(self.now, self.link_free) + self.update

    def _send(self, seconds: float) -> float:
        """Occupy the link as soon as it is free, and return the time at which the transfer ends."""
        self.link_free = max(self.now, self.link_free) + seconds
        self.communication += seconds
        return self.link_free

    def _gather_seconds(self, unit: UnitBudget) -> float:
        if unit.sent == 0:
            return 0.0
        full = unit.sent * self._ranks // (self._ranks - 1)  # a rank sends all parts of the buffer except one
        return self._cluster.seconds("all-gather", full, self._ranks)

    def _reduce_seconds(self, unit: UnitBudget) -> float:
        """Return the time of a reduction. Stage 0 adds the time of a gather, and `in_backward` adds the update."""
        setting, seconds = self._plan.setting, 0.0
        for flat in unit.flats:
            args = flat.bucket, self._ranks
            seconds += self._cluster.seconds("reduce-scatter", *args, hierarchical=setting.hierarchical)
            seconds += self._cluster.seconds("all-gather", *args) if setting.stage == 0 else 0.0
        return seconds + (self._step_seconds(unit) if setting.in_backward else 0.0)

    def _step_seconds(self, unit: UnitBudget) -> float:
        return unit.step / self._cluster.card.bandwidth
