"""Plan one rank: bytes by purpose and bytes sent, computed by the code that wraps models in a real run.

A `Planner` creates the model once, with fake tensors. It traces a step for each compute dtype, with and without
activation checkpointing. It then plans any number of settings (stages, formats, ranks) by arithmetic.

Legend: `W` ranks.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlite.config import Keep, Precision
from shardlite.engine import cast_inputs
from shardlite.errors import LayoutError
from shardlite.plan.budget import Budget, Recipe, budget_of
from shardlite.plan.limit import MOST_RANKS
from shardlite.plan.source import Source, SourceError
from shardlite.plan.timeline import ACTIVATIONS, Event, StepTimeline, timeline_of
from shardlite.plan.trace import trace
from shardlite.wrapping import Offload, Options, Plan, UnitPlan, build_units, placement_of, plan_units, validate

_META = torch.device("meta")
_Nothing = type("_Nothing", (nn.Module,), {})  # the class of no module: this room does not know `ShardLite`


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The configuration of a training run."""

    stage: int = 3
    world_size: int = 1
    precision: Precision = field(default_factory=Precision)
    state: str = "fp32"
    in_backward: bool = False
    prefetch: int = 1
    reshard_after_forward: bool = True
    checkpoint: bool = False
    """Whether the backward recomputes each repeated block."""

    rows: int | None = None
    """Rows of a micro-batch. `None`: those of the source's batch."""

    accumulate: int = 1
    """Number of micro-batches in a step."""

    sharded: bool = False
    """Whether each micro-batch reduces its gradients (`no_sync(sharded=True)`), instead of only the last one."""

    offload: Offload | None = None
    """Which optimizer states are kept in host memory. Ignored on CPUs."""

    on_gpu: bool = True
    hierarchical: bool = False
    """Whether gradients are first reduced inside each node, so that fewer bytes cross nodes. The total of the sent
    bytes is the same.
    """

    @property
    def recipe(self) -> Recipe:
        """The options that determine the bytes."""
        return Recipe(
            options=Options(
                stage=self.stage,
                precision=self.precision,
                prefetch=self.prefetch,
                reshard_after_forward=self.reshard_after_forward,
                offload=self.offload if self.on_gpu else None,
            ),
            world_size=self.world_size,
            device=torch.device("cuda" if self.on_gpu else "cpu"),
            state=self.state,
            in_backward=self.in_backward,
        )


@dataclass(frozen=True)
class RankPlan:
    """The bytes that one rank holds and sends in a step."""

    setting: Setting
    budget: Budget
    timeline: StepTimeline
    """The step if each reduction ends as late as possible. Its bytes are upper bounds."""

    events: Sequence[Event]

    @cached_property
    def prompt(self) -> StepTimeline:
        """The step if each reduction ends before the next gradient. Its bytes are lower bounds."""
        return _timeline(self.setting, self.budget, self.events, prompt=True)

    @property
    def at_least(self) -> int:
        """Lower bound of the bytes at the peak."""
        return self.prompt.total

    @property
    def peak(self) -> int:
        """Upper bound of the bytes at the peak."""
        return self.timeline.total

    @property
    def by_purpose(self) -> dict[str, int]:
        """Bytes at the peak by purpose: the purposes of `model.memory()`, and activations."""
        return {purpose: nbytes for purpose, nbytes in self.timeline.peak.items() if nbytes}

    @property
    def activations(self) -> int:
        """Peak of the program's own tensors. All tensors together may peak at another moment."""
        return self.timeline.most.get(ACTIVATIONS, 0)

    @property
    def host_nbytes(self) -> int:
        """Bytes of pinned host memory for offloaded optimizer states."""
        return self.budget.host_nbytes

    @property
    def host_traffic(self) -> int:
        """Bytes of offloaded states that one step copies from host memory to the GPU. It copies as many bytes back."""
        return sum(unit.offloaded for unit in self.budget.units)

    @property
    def sent_by_gathers(self) -> int:
        """Bytes that this rank sends in one step to gather weights."""
        return sum(self.budget.units[a.unit].sent for a in self.timeline.actions if a.name == "gather")

    @property
    def sent_by_reductions(self) -> int:
        """Bytes that this rank sends in one step to reduce gradients, and at stage 0 to gather their means."""
        reduced = [a.unit for a in self.timeline.actions if a.name == "reduce"]
        return sum(flat.sent for unit in reduced for flat in self.budget.units[unit].flats)


class Planner:
    """Plans one model in many settings."""

    def __init__(self, source: Source, *, progress: Callable[[str], None] = lambda _: None) -> None:
        """Create the model with fake tensors, and call `progress` with a line about each slow part.

        Raises:
            SourceError: the model cannot be created with fake tensors.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode  # late: imports sympy

        self.source = source
        self._progress = progress
        self._fake = FakeTensorMode()
        progress(f"making {source.name} of fake tensors")
        self._module = self._make()
        validate.check_module(self._module, Precision(), wrapper=_Nothing)
        self.numel = sum(param.numel() for param in self._module.parameters())
        self.weight_nbytes = sum(param.nbytes for param in self._module.parameters())
        self.is_double = any(param.dtype == torch.float64 for param in self._module.parameters())
        self.trained_numels = [param.numel() for param in self._module.parameters() if param.requires_grad]
        self.trainable = sum(self.trained_numels)
        self._buffers = sum(each.untyped_storage().nbytes() for each in self._module.buffers())
        self._budget = cache(self._budget_of)
        self.events = cache(self._trace)
        """`events(compute, checkpoint, keep, rows)` returns the events of the forward and backward of `rows`."""

    @property
    def unit_names(self) -> list[str]:
        """Names of the units."""
        return [unit.name for unit in self.budget(Setting()).units]

    def plan(self, setting: Setting) -> RankPlan:
        """Plan rank 0. No other rank holds more.

        Raises:
            SourceError: the model cannot be traced.
        """
        budget, events = self.budget(setting), self.events_of(setting)
        return RankPlan(setting, budget, _timeline(setting, budget, events), events)

    def events_of(self, setting: Setting) -> Sequence[Event]:
        """Return the events of the forward and backward of one micro-batch.

        Raises:
            SourceError: the model cannot be traced.
        """
        precision = setting.precision
        return self.events(precision.compute, setting.checkpoint, precision.keep, setting.rows)  # type: ignore[arg-type]

    def smallest_world(self, setting: Setting, nbytes: int) -> int | None:
        """Return the smallest number of ranks (at most 4096) with which a rank holds at most `nbytes`, or `None`."""

        def fits(ranks: int) -> bool:
            return self.plan(replace(setting, world_size=ranks)).peak <= nbytes

        powers = (2**i for i in range(MOST_RANKS.bit_length()))
        high = next(filter(fits, powers), None)
        return None if high is None else bisect_left(range(high), True, lo=high // 2 + 1, key=fits)

    def units(self, setting: Setting) -> Plan:
        """Return the units of a setting, and the layouts of their flats."""
        return plan_units(self._module, setting.recipe.options, setting.world_size, _META)

    def budget(self, setting: Setting) -> Budget:
        """Return the bytes of a rank that do not depend on the batch. No step is traced."""
        alike = {"rows": None, "accumulate": 1, "sharded": False, "checkpoint": False, "hierarchical": False}
        return self._budget(replace(setting, **alike))  # type: ignore[arg-type]

    @property
    def recomputed_classes(self) -> list[str]:
        """Names of the classes of the units that a run with checkpointing recomputes."""
        return list(dict.fromkeys(type(plan.module).__name__ for plan in _repeated(self.units(Setting()).units)))

    def _budget_of(self, setting: Setting) -> Budget:
        return budget_of(self.units(setting), setting.recipe, buffers=self._buffers)

    def _trace(
        self, compute: torch.dtype | None, recomputes: bool, keep: Keep = None, rows: int | None = None
    ) -> Sequence[Event]:
        size = "" if rows is None else f" of {rows} row{'s' * (rows > 1)}"
        how = f"{size}{'' if compute is None else f' in {compute}'}{' with checkpointing' * recomputes}"
        self._progress(f"tracing a step{how}")
        module = self._make()
        dtypes = plan_units(module, Options(precision=Precision(compute=compute, keep=keep)), 2, _META).dtypes
        for param in module.parameters():
            if compute is not None and param.is_floating_point():
                param.data = param.data.to(dtypes.kept.get(param, compute))  # as gathered; tied parameters stay tied
        cast_inputs(dtypes.inputs)
        plan = plan_units(module, Options(), 2, _META)
        units = build_units(plan, placement_of(plan, Options(), 0, 2))
        if recomputes:
            _checkpoint(plan.units)
        with self._faking(), torch.enable_grad():
            return trace(module, units, plan.units, self.source.loss(module, dtypes.model, rows))

    def _make(self) -> nn.Module:
        with self._faking():
            module = self.source.make()
        if not isinstance(module, nn.Module):
            raise SourceError(f"--model {self.source.name} returned a {type(module).__name__}; expected an nn.Module")
        return module

    @contextmanager
    def _faking(self) -> Iterator[None]:
        """Make new tensors fake in the `with` block.

        Errors become `SourceError`s, for example if the model reads the value of a fake tensor.
        """
        try:
            with self._fake:
                yield
        except (SourceError, LayoutError):
            raise
        except Exception as error:
            raise SourceError(
                f"{self.source.name} cannot be traced with fake tensors, which have shapes and no values: "
                f"{type(error).__name__}: {error}"
            ) from error


def _timeline(setting: Setting, budget: Budget, events: Sequence[Event], *, prompt: bool = False) -> StepTimeline:
    return timeline_of(budget, events, prompt=prompt, accumulate=setting.accumulate, sharded=setting.sharded)


def _checkpoint(plans: Sequence[UnitPlan]) -> None:
    """Make the backward recompute the repeated units."""
    for plan in _repeated(plans):
        plan.module.__class__ = _recomputed(type(plan.module))  # type: ignore[arg-type]


def _repeated(plans: Sequence[UnitPlan]) -> list[UnitPlan]:
    """Return the units whose class occurs more than once."""
    classes = [type(plan.module) for plan in plans]
    return [plan for plan in plans if classes.count(type(plan.module)) > 1]


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose call goes through `checkpoint`. No random state is kept, as fake tensors have none."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kind.__call__, self, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call})
