"""Predict step time by an event simulation of one processor, one link to other ranks, and one link to the host.

    computation   |  u1  |  u2  |wait| u3 ...      at the card's measured efficiency
    link          | gather u2 | gather u3 |  ...    one collective at a time, first started, first served
    host          | u1 | u2 |  u3  | ...            offloaded states of one unit at a time, both ways at once

Gathers and reductions overlap with the computation. The computation waits for a gather that has not ended, or for a
free bucket. This waiting time is exposed communication. Offloaded states are copied during the backward if the step is
in the backward, and otherwise during the next forward, where a unit is gathered after its copies. The simulated step is
one of many, so it begins with copies for the previous step. `shardlite.plan` gives the order of operations, and the
cost model gives the times of collectives. The simulation ignores launches, operators that compute little, stragglers,
and the slowdown of the computation by collectives and copies.

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

    host: float
    """Copies of offloaded states in one direction, overlapped or not."""

    flops: float
    """Floating-point operations of this rank, not seconds."""

    @property
    def exposed(self) -> float:
        """Seconds in which computation waits for communication, or for copies of offloaded states."""
        return self.total - self.compute - self.update


def simulate(plan: RankPlan, cluster: Cluster, *, scale: float = 1.0) -> StepTime:
    """Predict the step of a planned rank. `scale` multiplies the computation, as a larger batch would."""
    rate = cluster.card.flops(narrow=plan.setting.precision.compute in _NARROW)
    run = _Run(plan, cluster, rate / scale)
    for action in plan.timeline.actions:
        run.apply(action.name, action.unit, action.flops)
    flops = scale * sum(action.flops for action in plan.timeline.actions)
    return StepTime(
        total=max(run.now, run.link_free, run.host_free),
        compute=flops / rate,
        update=run.update,
        communication=run.communication,
        host=sum(map(run.copy_seconds, plan.budget.units)),
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
    """A simulation in progress: the current time, and the times at which the links are free."""

    def __init__(self, plan: RankPlan, cluster: Cluster, rate: float) -> None:
        self._plan, self._cluster, self._rate = plan, cluster, rate
        self._ranks = plan.setting.world_size
        self._gathered: dict[int, float] = {}
        self._reduced: dict[int, float] = {}
        self.now = self.link_free = self.host_free = self.communication = self.update = 0.0
        self._stepped: dict[int, float] = {}
        if not plan.setting.in_backward:
            for unit in dict.fromkeys(action.unit for action in plan.timeline.actions if action.name == "gather"):
                self._stepped[unit] = self._copy(plan.budget.units[unit])

    def apply(self, name: str, unit: int, flops: float) -> None:
        """Apply one action."""
        if name == "compute":
            self.now += flops / self._rate
        elif name == "gather":
            ready = self._stepped.get(unit, 0.0)
            self._gathered[unit] = self._send(self._gather_seconds(self._plan.budget.units[unit]), ready)
        elif name == "need":
            self.now = max(self.now, self._gathered.get(unit, 0.0))
        elif name == "reduce":
            self._reduced[unit] = self._send(self._reduce_seconds(self._plan.budget.units[unit]))
            if self._plan.setting.in_backward:
                self._reduced[unit] = self._copy(self._plan.budget.units[unit], self._reduced[unit])
        elif name == "land":
            self.now = max(self.now, self._reduced[unit])
        elif name == "step":
            self._step()

    def _step(self) -> None:
        """Step the units that are not stepped in a backward, and copy those states that no forward copies."""
        self.now = max(self.now, self.link_free)
        done = self._reduced if self._plan.setting.in_backward else self._stepped
        for unit, each in enumerate(self._plan.budget.units):
            if unit not in done:
                self._copy(each, self.now)
        if not self._plan.setting.in_backward:
            self.update = sum(map(self._step_seconds, self._plan.budget.units))
        self.now = max(self.now + self.update, self.host_free)

    def copy_seconds(self, unit: UnitBudget) -> float:
        """Return the time to copy the offloaded states of a unit in one direction."""
        return unit.offloaded / self._cluster.card.host if unit.offloaded else 0.0

    def _copy(self, unit: UnitBudget, ready: float = 0.0) -> float:
        """Occupy the link to the host when it is free and gradients are ready. Return the time at which copies end."""
        if unit.offloaded:
            ready = self.host_free = max(ready, self.host_free) + self.copy_seconds(unit)
        return ready

    def _send(self, seconds: float, ready: float = 0.0) -> float:
        """Occupy the link once it is free and the data is ready, and return the time at which the transfer ends."""
        self.link_free = max(self.now, self.link_free, ready) + seconds
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
