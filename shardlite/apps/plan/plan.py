"""The plan of one rank: bytes by purpose and bytes sent, computed by the code that wraps models in a real run.

A `Planner` creates the model once, with fake tensors, and traces a step for each dtype of computation, with and without
activation checkpointing. It then plans any number of settings (stages, formats, ranks) by arithmetic.

Legend: `W` ranks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shardlite.apps.options import precision_of
from shardlite.apps.plan.source import Source, SourceError
from shardlite.apps.plan.trace import trace
from shardlite.build import (
    ACTIVATIONS,
    MOST_RANKS,
    Budget,
    Event,
    Options,
    Recipe,
    StepTimeline,
    UnitPlan,
    budget_of,
    build_units,
    placement_of,
    plan_units,
    timeline_of,
    validate,
)
from shardlite.config import Precision
from shardlite.errors import LayoutError

_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained."""

    stage: int = 3
    world_size: int = 1
    precision: Precision = field(default_factory=Precision)
    state: str = "fp32"
    in_backward: bool = False
    prefetch: int = 1
    reshard_after_forward: bool = True
    checkpoint: bool = False
    """Whether each repeated block is recomputed in the backward."""

    on_gpu: bool = True
    hierarchical: bool = False
    """Whether gradients are reduced inside each node first. The total is the same, but fewer bytes cross nodes."""

    @property
    def recipe(self) -> Recipe:
        """The options that determine the bytes."""
        return Recipe(
            options=_options(self),
            world_size=self.world_size,
            device=torch.device("cuda" if self.on_gpu else "cpu"),
            state=self.state,
            in_backward=self.in_backward,
        )


def setting_of(options: Namespace) -> Setting:
    """Return the options `training` of `options.json` as a setting.

    Raises:
        ValueError: the dtypes do not go together.
    """
    return Setting(
        precision=precision_of(options.compute, options.reduce, options.master),
        state=options.state,
        in_backward=options.in_backward,
        prefetch=options.prefetch,
    )


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and sends."""

    setting: Setting
    budget: Budget
    timeline: StepTimeline
    """The step if reductions end as late as possible, which is an upper bound."""

    events: Sequence[Event]

    @cached_property
    def at_least(self) -> int:
        """Bytes at the peak if every reduction ends before the next gradient, which is a lower bound."""
        return timeline_of(self.budget, self.events, prompt=True).total

    @property
    def peak(self) -> int:
        """Bytes at the peak, as an upper bound."""
        return self.timeline.total

    @property
    def by_purpose(self) -> dict[str, int]:
        """Bytes at the peak by purpose: those of `model.memory()`, and activations."""
        return {purpose: nbytes for purpose, nbytes in self.timeline.peak.items() if nbytes}

    @property
    def activations(self) -> int:
        """Peak of the program's own tensors, which may be at another moment than that of all tensors."""
        return self.timeline.most.get(ACTIVATIONS, 0)

    @property
    def sent_by_gathers(self) -> int:
        """Bytes that this rank sends in one step to gather weights."""
        return sum(self.budget.units[a.unit].sent for a in self.timeline.actions if a.name == "gather")

    @property
    def sent_by_reductions(self) -> int:
        """Bytes that this rank sends in one step to reduce gradients (stage 0: and to gather their means)."""
        reduced = [a.unit for a in self.timeline.actions if a.name == "reduce"]
        return sum(flat.sent for unit in reduced for flat in self.budget.units[unit].flats)


class Planner:
    """Plans one model in many settings."""

    def __init__(self, source: Source, *, progress: Callable[[str], None] = lambda _: None) -> None:
        """Create the model with fake tensors.

        Raises:
            SourceError: the model cannot be created with fake tensors.
        """
        self.source = source
        self._progress = progress
        self._fake = FakeTensorMode()
        progress(f"making {source.name} of fake tensors")
        self._module = self._make()
        validate.check_module(self._module, Precision(), wrapper=_Never)
        self.numel = sum(param.numel() for param in self._module.parameters())
        self.weight_nbytes = sum(param.nbytes for param in self._module.parameters())
        self.trained_numels = [param.numel() for param in self._module.parameters() if param.requires_grad]
        self.trainable = sum(self.trained_numels)
        self.largest_layer = max(_own_numel(each) for each in self._module.modules())
        """Parameters of the module with the most parameters of its own."""

        self._buffers = sum(each.untyped_storage().nbytes() for each in self._module.buffers())
        self.events = cache(self._trace)
        """`events(compute, checkpoint)` are those of one step."""

    @property
    def unit_names(self) -> list[str]:
        """Names of the units."""
        return [unit.name for unit in self._units(Setting()).units]

    def plan(self, setting: Setting) -> RankPlan:
        """Plan rank 0, which holds as much as any other.

        Raises:
            LayoutError: the setting is invalid.
            SourceError: the model cannot be traced.
        """
        events = self.events(setting.precision.compute, setting.checkpoint)
        budget = self._units(setting)
        return RankPlan(setting, budget, timeline_of(budget, events), events)

    def smallest_world(self, setting: Setting, nbytes: int) -> int | None:
        """Return the fewest ranks, up to 4096, with which a rank holds at most `nbytes`, or `None`."""

        def fits(ranks: int) -> bool:
            return self.plan(replace(setting, world_size=ranks)).peak <= nbytes

        high = 1
        while not fits(high):
            high *= 2
            if high > MOST_RANKS:
                return None
        low = high // 2  # does not fit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high

    def _units(self, setting: Setting) -> Budget:
        _check(setting)
        plan = plan_units(self._module, _options(setting), setting.world_size, _META)
        return budget_of(plan, setting.recipe, buffers=self._buffers)

    def _trace(self, compute: torch.dtype | None, recomputes: bool) -> Sequence[Event]:
        how = f"{'' if compute is None else f' in {compute}'}{' with checkpointing' * recomputes}"
        self._progress(f"tracing a step{how}")
        module = _cast(self._make(), compute)
        plan = plan_units(module, _options(Setting()), 2, _META)
        units = build_units(plan, placement_of(plan, Options(), 0, 2))
        if recomputes:
            _checkpoint(plan.units)
        with self._faking(), torch.enable_grad():
            return trace(module, units, plan.units, self.source.loss(module, compute))

    def _make(self) -> nn.Module:
        with self._faking():
            module = self.source.make()
        if not isinstance(module, nn.Module):
            raise SourceError(f"--model {self.source.name} made a {type(module).__name__}, not an nn.Module")
        return module

    @contextmanager
    def _faking(self) -> Iterator[None]:
        """Create fake tensors within the block. Code that needs values raises a `SourceError`."""
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


def _own_numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters(recurse=False))


class _Never(nn.Module):
    """Wraps nothing."""


def _check(setting: Setting) -> None:
    if setting.stage not in validate.STAGES or not 1 <= setting.world_size <= MOST_RANKS or setting.prefetch < 0:
        raise LayoutError(
            f"a plan takes stages {validate.STAGES}, 1 to {MOST_RANKS} ranks and a prefetch of at least 0; got stage "
            f"{setting.stage}, {setting.world_size} ranks, prefetch {setting.prefetch}"
        )


def _options(setting: Setting) -> Options:
    return Options(
        stage=setting.stage,
        precision=setting.precision,
        prefetch=setting.prefetch,
        reshard_after_forward=setting.reshard_after_forward,
    )


def _cast(module: nn.Module, compute: torch.dtype | None) -> nn.Module:
    """Cast the parameters of a module to the dtype in which they are gathered. Tied ones stay tied."""
    if compute is None:
        return module
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for each in module.modules():
        for name, param in each._parameters.items():
            if param is not None and param.is_floating_point():
                if param not in cast:
                    cast[param] = nn.Parameter(param.detach().to(compute), requires_grad=param.requires_grad)
                each._parameters[name] = cast[param]
    return module


def _checkpoint(plans: Sequence[UnitPlan]) -> None:
    """Recompute each unit whose class is repeated in the backward."""
    classes = [type(plan.module) for plan in plans]
    for plan in plans:
        if classes.count(kind := type(plan.module)) > 1:
            plan.module.__class__ = _recomputed(kind)  # type: ignore[arg-type]


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass that is called through `checkpoint`. Fake tensors have no random state to restore."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kind.__call__, self, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call})
