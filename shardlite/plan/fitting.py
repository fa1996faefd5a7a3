"""Find the cheapest runs of a model that fit into the memory of a rank.

In: a `Planner`, the run to start from (`Setting`), and a number of bytes. Out: a `Fit`, the cheapest run, with the next
cheapest runs as alternatives. `DIMENSIONS` is the table of what the search may change, and `RULES` the table of the
changes that a program can notice in its numbers. `fit_model.py` calls the search for a model in Python.

A run is cheaper than another if it uses weaker rules; then if its predicted step takes less time; then if it copies
fewer states to the host and back; then if it needs less memory. So runs that compute the same numbers as the run to
start from always come first. The time of a launch is not predicted, so of runs that differ in the micro-batch only, the
one with the largest that fits is a candidate. If it is accumulated, gradients are reduced either once per step or in
each micro-batch, whichever is cheaper.

The search skips runs without planning them if their permanent memory alone is too large, or if this memory and the
activations are. It assumes that a smaller micro-batch does not need more memory if both are accumulated.

Legend: `W` ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch

from shardlite.config import STATES, MemoryLimit
from shardlite.errors import LayoutError
from shardlite.plan.budget import Budget
from shardlite.plan.clusters import CLUSTERS, Cluster
from shardlite.plan.fit_text import arguments, heading, lines, nothing_fits, paragraph, size
from shardlite.plan.planner import Planner, RankPlan, Setting
from shardlite.plan.step_time import StepTime, simulate
from shardlite.plan.timeline import plain_events, timeline_of
from shardlite.wrapping import Offload

MOST_RUNS = 3
"""Number of runs that a search returns."""

Changes = Mapping[str, Any]
"""Fields of a `Setting` with their new values."""


# ---- what the search may change -------------------------------------------------------------------------------------


def _stages(start: Setting) -> Iterator[Changes]:
    if start.world_size > 1 and start.precision.quantized_gather is False:
        yield from ({"stage": stage, "reshard_after_forward": True} for stage in (0, 1, 2))
    yield {"stage": 3, "reshard_after_forward": True}
    if start.world_size > 1:
        yield {"stage": 3, "reshard_after_forward": False}


def _precisions(start: Setting) -> Iterator[Changes]:
    given = start.precision
    narrow = replace(given, compute=torch.bfloat16) if given.compute in (None, torch.bfloat16) else given
    split = replace(narrow, master="split24") if narrow.compute == torch.bfloat16 else given
    yield from ({"precision": each} for each in dict.fromkeys((given, narrow, split)))


def _offloads(start: Setting) -> Iterator[Changes]:
    more = (Offload(share=0.5), Offload()) if start.on_gpu else ()
    yield from ({"offload": each} for each in dict.fromkeys((start.offload, *more)))


DIMENSIONS: Mapping[str, Callable[[Setting], Iterable[Changes]]] = {
    "stage": _stages,
    "precision": _precisions,
    "moments": lambda start: ({"state": each} for each in STATES[STATES.index(start.state) :]),
    "in_backward": lambda start: ({"in_backward": each} for each in sorted({start.in_backward, True})),
    "checkpointing": lambda start: ({"checkpoint": each} for each in sorted({start.checkpoint, True})),
    "offload": _offloads,
}
"""What the search may change beside the micro-batch: names for `keep=`, and the choices from a run to start from."""

NAMES = (*DIMENSIONS, "batch")
"""All names for `keep=`. `"batch"` is the micro-batch, and with it the accumulation."""


class Rule(NamedTuple):
    """A change after which a program may compute other numbers."""

    words: str
    applies: Callable[[Setting], bool]


RULES = (
    Rule("steps in the backward: no clipping by a norm, no gradient scaler", lambda run: run.in_backward),
    Rule("forward and backward in bf16", lambda run: run.precision.compute == torch.bfloat16),
    Rule("weights in 24 bits", lambda run: run.precision.master == "split24"),
    Rule("moments in bf16", lambda run: run.state == "bf16"),
    Rule("moments in int8", lambda run: run.state == "int8"),
)
"""Rules from weak to strong. A rule is stronger than all earlier rules together."""


def check_keep(keep: str | Iterable[str]) -> frozenset[str]:
    """Return the names of what a search must not change.

    Raises:
        ValueError: a name is unknown.
    """
    names = (keep,) if isinstance(keep, str) else tuple(keep)
    for name in names:
        if name not in NAMES:
            raise ValueError(f"keep takes names of what must not change ({', '.join(NAMES)}), got {name!r}")
    return frozenset(names)


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A run that fits, and the next cheapest runs. `repr` prints them with the lines of Python to write."""

    plan: RankPlan
    """The predicted bytes of a rank. `plan.setting` is the run."""

    memory_limit: MemoryLimit
    """The promise. `ShardLite` raises a `LayoutError` if the model that it wraps would not keep it."""

    rules: Sequence[str]
    """The changes after which a program may compute other numbers, in words."""

    step: StepTime
    """Predicted time of a step on the cluster or, if none was given, on `REFERENCE`, which is used for the order."""

    cluster: Cluster | None = None
    """The cluster that was given, whose times are printed."""

    heading: str = ""
    """The first line of `repr`: the model, its batch, the ranks and the limit."""

    classes: Sequence[str] = ()
    """Names of the classes of the blocks that `checkpointing` recomputes."""

    alternatives: Sequence["Fit"] = ()
    """The next cheapest runs."""

    @property
    def shardlite(self) -> dict[str, Any]:
        """Keyword arguments of `ShardLite`, with the memory limit."""
        return {**arguments(self.plan.setting), "memory_limit": self.memory_limit}

    @property
    def adamw(self) -> dict[str, Any]:
        """Keyword arguments of `shardlite.AdamW`."""
        return {"state": self.plan.setting.state, "in_backward": self.plan.setting.in_backward}

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch of a rank."""
        return self.plan.setting.rows or 0

    @property
    def accumulate(self) -> int:
        """Number of micro-batches of a rank in a step."""
        return self.plan.setting.accumulate

    @property
    def sharded(self) -> bool:
        """Whether all micro-batches but the last run inside `no_sync(sharded=True)`, instead of `no_sync()`."""
        return self.plan.setting.sharded

    @property
    def checkpointing(self) -> bool:
        """Whether the backward must recompute each block."""
        return self.plan.setting.checkpoint

    @property
    def lines(self) -> list[str]:
        """The lines of Python to write, in a program with a `model` and a function `loss_of(part)`."""
        return list(lines(self.plan.setting, self.shardlite, self.adamw, self.classes))

    def __repr__(self) -> str:
        runs = [
            f"{number}. {paragraph(each.plan, each.rules, each.step, each.cluster, each.lines)}"
            for number, each in enumerate((self, *self.alternatives), 1)
        ]
        return "\n\n".join([self.heading, *runs])


# ---- the search -----------------------------------------------------------------------------------------------------

REFERENCE = {True: "pcie-a100", False: "cpu"}
"""The cluster whose predicted times order the runs if none is given, on GPUs and on CPUs."""


def search(
    planner: Planner,
    start: Setting,
    nbytes: int,
    *,
    keep: str | Iterable[str] = (),
    cluster: Cluster | None = None,
) -> Fit:
    """Return the cheapest run in which a rank holds at most `nbytes`.

    Args:
        planner: plans the model.
        start: the run to start from, with the rows and the number of its micro-batches.
        nbytes: memory of a rank.
        keep: names from `NAMES` of what must not change.
        cluster: the cluster that orders runs by time.

    Raises:
        LayoutError: no run fits. The message names the smallest run, and what it holds.
        ValueError: a name in `keep` is unknown.
        SourceError: the model cannot be traced.
    """
    return _Search(planner, start, nbytes, check_keep(keep), cluster).run()


class _Search:
    """A search in progress."""

    def __init__(
        self, planner: Planner, start: Setting, nbytes: int, keep: frozenset[str], cluster: Cluster | None
    ) -> None:
        keep |= {"precision"} if planner.is_double else frozenset()  # `ShardLite` would refuse to narrow the weights
        self._planner, self._nbytes, self._keep, self._cluster = planner, nbytes, keep, cluster
        self._start = replace(start, rows=start.rows or planner.source.rows())
        assert self._start.rows is not None
        self._total = self._start.rows * start.accumulate
        if "batch" in keep and start.in_backward and start.accumulate > 1:
            raise ValueError("a search plans steps in the backward without accumulation only: do not keep the batch")
        choices: list[Sequence[Changes]] = [
            [{}] if name in keep else list(choose(start)) for name, choose in DIMENSIONS.items()
        ]
        every = [replace(self._start, **{k: v for each in some for k, v in each.items()}) for some in product(*choices)]
        self._settings = sorted(every, key=self._strength)  # stable: cheap choices come first

    def run(self) -> Fit:
        """Search in the order of the rules, until enough runs are found."""
        self._check_units()
        found: list[RankPlan] = []
        for setting in self._settings:
            if len(found) >= MOST_RUNS and self._strength(setting) > max(
                self._strength(each.setting) for each in found
            ):
                break
            if (plan := self._with_batch(setting)) is not None:
                found.append(plan)
        if not found:
            raise LayoutError(self._nothing_fits())
        return self._fit(sorted(found, key=self._cost)[:MOST_RUNS])

    # ---- order of runs ----

    def _strength(self, setting: Setting) -> int:
        return sum(2**i for i, rule in enumerate(RULES) if self._breaks(rule, setting))

    def _breaks(self, rule: Rule, setting: Setting) -> bool:
        return rule.applies(setting) and not rule.applies(self._start)

    def _cost(self, plan: RankPlan) -> tuple[int, float, int, int]:
        """Return what orders runs. Times are compared in microseconds, because sums of them round."""
        return self._strength(plan.setting), round(self._time(plan).total, 6), plan.host_traffic, plan.peak

    def _time(self, plan: RankPlan) -> StepTime:
        return simulate(plan, self._cluster or CLUSTERS[REFERENCE[self._start.on_gpu]])

    # ---- what fits ----

    def _with_batch(self, setting: Setting) -> RankPlan | None:
        """Return the setting with the largest micro-batch with which it fits, accumulated in the cheaper way."""
        if sum(self._planner.budget(setting).held.values()) > self._nbytes:
            return None
        found = []
        for way, sizes in self._batches(setting):
            if (plan := self._largest(way, sizes)) is not None:
                if plan.setting.accumulate == 1:
                    return plan
                found.append(plan)
        return min(found, key=self._cost, default=None)

    def _batches(self, setting: Setting) -> Iterator[tuple[Setting, Sequence[int]]]:
        """Yield ways to run a batch, each with the rows of its micro-batches, in ascending order.

        Accumulated gradients need the memory that steps in the backward save, so such runs do not accumulate.
        """
        sizes = [rows for rows in range(1, self._total + 1) if self._total % rows == 0]
        if "batch" in self._keep:
            sizes = [self._start.rows or 0]
        if self._total in sizes:
            yield setting, [self._total]
        parts = [rows for rows in sizes if rows != self._total]
        if parts and not setting.in_backward:
            ways = (False, True) if setting.world_size > 1 else (False,)
            yield from ((replace(setting, sharded=each), parts) for each in ways)

    def _largest(self, setting: Setting, sizes: Sequence[int]) -> RankPlan | None:
        """Return the run with the largest micro-batch of `sizes` with which it fits, by bisection."""
        low, high, best = 0, len(sizes), None
        while low < high:
            middle = (low + high) // 2
            plan = self._fitting(self._sized(setting, sizes[middle]))
            best = plan or best
            low, high = (low, middle) if plan is None else (middle + 1, high)
        return best

    def _sized(self, setting: Setting, rows: int) -> Setting:
        return replace(setting, rows=rows, accumulate=self._total // rows)

    def _fitting(self, setting: Setting) -> RankPlan | None:
        """Return the plan of a setting if it fits. A step is traced only if what it holds anyway fits."""
        if self._always(setting) > self._nbytes or self._least(setting) > self._nbytes:
            return None
        plan = self._planner.plan(setting)
        return plan if max(plan.peak, _without_activations(plan.budget)) <= self._nbytes else None

    def _least(self, setting: Setting) -> int:
        """Return a lower bound of the peak: what the setting always holds, and the peak of activations."""
        return self._always(setting) + max(event.most for event in self._planner.events_of(setting))

    def _always(self, setting: Setting) -> int:
        """Return the bytes of permanent memory and, with several micro-batches, of sums of gradients."""
        budget, sums = self._planner.budget(setting), 0
        if setting.accumulate > 1 and not budget.single_rank:
            flats = [flat for unit in budget.units for flat in unit.flats]
            sums = sum(flat.mean or flat.bucket if setting.sharded else flat.bucket for flat in flats)
        return sum(budget.held.values()) + sums

    # ---- results ----

    def _fit(self, plans: Sequence[RankPlan]) -> Fit:
        fits = [
            Fit(
                plan=plan,
                memory_limit=self._limit(plan),
                rules=[rule.words for rule in RULES if self._breaks(rule, plan.setting)],
                step=self._time(plan),
                cluster=self._cluster,
                heading=heading(self._planner, self._start, self._nbytes, len(plans)),
                classes=self._planner.recomputed_classes,
            )
            for plan in plans
        ]
        return replace(fits[0], alternatives=fits[1:])

    def _limit(self, plan: RankPlan) -> MemoryLimit:
        """Return the limit with which `ShardLite` accepts a plan: it adds `activations` to a run without any."""
        setting = plan.setting
        return MemoryLimit(
            nbytes=self._nbytes,
            state=setting.state,  # type: ignore[arg-type]
            in_backward=setting.in_backward,
            activations=max(0, plan.peak - _without_activations(plan.budget)),
        )

    def _check_units(self) -> None:
        """Refuse a limit below the full weights of the smallest unit in the narrowest format.

        Raises:
            LayoutError: the limit is below them.
        """
        units = [unit for unit in self._planner.budget(self._settings[-1]).units if unit.full]
        least = min(units, key=lambda unit: unit.full)
        if self._nbytes < least.full:
            raise LayoutError(
                f"a memory of {size(self._nbytes)} is below the full weights of the smallest unit, "
                f"{least.name!r}, which are {size(least.full)}: no number of ranks can train this model"
            )

    def _nothing_fits(self) -> str:
        """Return a message with the run that needs the least memory."""
        smallest = [self._sized(each, sizes[0]) for setting in self._settings for each, sizes in self._batches(setting)]
        best: RankPlan | None = None
        for setting in sorted(smallest, key=self._least):
            if best is not None and self._least(setting) >= best.peak:
                break
            plan = self._planner.plan(setting)
            best = plan if best is None or plan.peak < best.peak else best
        assert best is not None, "there is at least the run to start from"
        return nothing_fits(self._planner, best, self._nbytes, self._keep)


def _without_activations(budget: Budget) -> int:
    """Return the peak of a step without activations, as `ShardLite` predicts it for a memory limit."""
    return timeline_of(budget, list(plain_events(budget))).total
