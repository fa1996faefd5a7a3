"""Step time by an event simulation: one processor, one link, and the order in which the host starts operations.

    computation   |  u1  |  u2  |wait| u3 ...      as fast as the card's measured efficiency says
    link          | gather u2 | gather u3 |  ...    one collective at a time, first started, first served

Gathers and reductions overlap with the computation, which waits for a gather that has not ended, or for a free bucket.
The time that it waits is exposed. The order is that of `build.timeline`, and times of collectives are those of the cost
model. The simulation leaves out launches, operators that compute little, stragglers, and collectives that slow
computation down.

Legend: `W` ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardlite.apps.plan.clusters import Cluster
from shardlite.apps.plan.plan import RankPlan
from shardlite.build import UnitBudget

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of one step."""

    total: float
    compute: float
    """Forward and backward."""

    update: float
    """The optimizer's step, where it is not in the backward."""

    communication: float
    """All gathers and reductions, overlapped or not."""

    flops: float
    """Operations of this rank."""

    @property
    def exposed(self) -> float:
        """Seconds in which communication blocks computation."""
        return self.total - self.compute - self.update


def simulate(plan: RankPlan, cluster: Cluster, *, scale: float = 1.0) -> StepTime:
    """Predict the step of a planned rank. `scale` multiplies its computation, as a larger batch does."""
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
    """With the same batch on each rank."""

    strong: float
    """With the same global batch: the batch of a rank times the largest number of ranks."""

    amdahl: float
    """By Amdahl's law for that batch, with nothing overlapped: of one rank's time, the communication of the largest
    number of ranks is the serial part.
    """


def scaling(one: RankPlan, plans: Sequence[RankPlan], cluster: Cluster) -> list[Scaling]:
    """Return the efficiencies of plans that differ in the number of ranks only, against that of `one` rank.

    Memory is not checked: the model may not fit on one rank.
    """
    most = max(plan.setting.world_size for plan in plans)
    alone = simulate(one, cluster).total
    all_alone = simulate(one, cluster, scale=most).total
    serial = max(simulate(plan, cluster).communication for plan in plans) / all_alone
    rows = []
    for plan in plans:
        ranks = plan.setting.world_size
        rows.append(
            Scaling(
                world_size=ranks,
                weak=alone / simulate(plan, cluster).total,
                strong=all_alone / ranks / simulate(plan, cluster, scale=most / ranks).total,
                amdahl=1 / (ranks * serial + 1 - serial),
            )
        )
    return rows


class _Run:
    """The state of a simulation: the current time, and the time at which the link is free."""

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
        """Use the link when it is free, and return the time at which the transfer ends."""
        self.link_free = max(self.now, self.link_free) + seconds
        self.communication += seconds
        return self.link_free

    def _gather_seconds(self, unit: UnitBudget) -> float:
        return self._cluster.seconds("all-gather", self._whole(unit.sent), self._ranks) if unit.sent else 0.0

    def _reduce_seconds(self, unit: UnitBudget) -> float:
        """Return the time of a reduction, of the gather after it at stage 0, and of the steps that it takes."""
        levels = self._plan.setting.hierarchical
        seconds = sum(
            self._cluster.seconds("reduce-scatter", flat.bucket, self._ranks, hierarchical=levels)
            for flat in unit.flats
        )
        if self._plan.setting.stage == 0:
            seconds += sum(self._cluster.seconds("all-gather", flat.bucket, self._ranks) for flat in unit.flats)
        return seconds + (self._step_seconds(unit) if self._plan.setting.in_backward else 0.0)

    def _whole(self, sent: int) -> int:
        """Return the bytes of a buffer of which each rank sends all but one part."""
        return sent * self._ranks // (self._ranks - 1)

    def _step_seconds(self, unit: UnitBudget) -> float:
        return unit.step / self._cluster.card.bandwidth
