"""Record the live tensor bytes at every operator of one training step, by purpose and by the unit that runs.

In: a `System`. Out: a `Timeline`. `telemetry.Meter` counts the bytes of tensors created after the recording began, and
`model.memory()` attributes them to purposes.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from shardlite_kernels import chunk_memory
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardlite import ShardLite
from shardlite.lab.compared.systems import System
from shardlite.lab.memory.recorder import take_step, warm_up
from shardlite.plan import ACTIVATIONS, HELD, Source, units_of
from shardlite.telemetry import Held, Meter

PURPOSES = (*HELD, "gradients", "gradient buckets", "gather buffers")
"""Purposes of `memory()` whose bytes are in tensors, in the order of table rows."""

CHUNKS = "chunks of a step"
"""The name of the purpose whose memory all models of a process share."""

ROOT = None
"""The index of the root unit in a `Phase`: the root has no number."""

FORWARD, BACKWARD, STEP = "forward", "backward", "step"


@dataclass(frozen=True)
class Phase:
    """One part of a step: the forward or backward of a unit, or the optimizer's step."""

    name: str
    unit: int | None
    """Index of the unit, or `ROOT`."""

    first: int
    """Index of the first sample."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Samples of the bytes of a rank during one step. A sample is taken before and after each operator."""

    units: Sequence[str]
    phases: Sequence[Phase]
    totals: Sequence[int]
    purposes: Sequence[Mapping[str, int]]
    """For each sample, bytes per purpose, including activations. Empty for a system without `memory()`."""

    most: Mapping[str, int]
    """Peak bytes of each purpose. A peak may lie between two samples. Purposes peak at different moments."""

    @property
    def peak(self) -> int:
        """Peak of all purposes together."""
        return max(self.totals)

    def places(self) -> list[float]:
        """Return the position of each sample on an axis where every phase has width 1."""
        stops = [*(phase.first for phase in self.phases[1:]), len(self.totals)]
        return [
            number + i / (stop - phase.first)
            for number, (phase, stop) in enumerate(zip(self.phases, stops, strict=True))
            for i in range(stop - phase.first)
        ]

    @staticmethod
    def of(row: Mapping[str, Any]) -> "Timeline":
        """Return the timeline from which `asdict` has made `row`."""
        return Timeline(**{**row, "phases": [Phase(**phase) for phase in row["phases"]]})


def record(source: Source, system: System, group: dist.ProcessGroup) -> Timeline:
    """Build a system, warm it up, and record one step. Collective."""
    gc.collect()
    with Meter[None]() as meter:
        before, chunks = meter.live, sum(each.nbytes for each in chunk_memory())
    made = source.make()
    units = units_of(made)
    trainer = system.train(replace(source, make=lambda: made), group)
    warm_up(trainer)
    gc.collect()
    recorder = _Recorder(trainer.model, units.values(), before, chunks)
    if isinstance(trainer.model, ShardLite):
        trainer.model.ledger.reset_peak()
    with recorder.meter:
        take_step(trainer, lambda name: recorder.enter(name, ROOT))
    return Timeline(
        units=list(units),
        phases=recorder.phases,
        totals=recorder.totals,
        purposes=recorder.purposes,
        most={
            **recorder.held(lambda each: each.peak),
            ACTIVATIONS: max(each.get(ACTIVATIONS, 0) for each in recorder.purposes),
        },
    )


class _Recorder:
    """Takes samples while its meter is on, and records the index of each phase's first sample."""

    def __init__(self, model: nn.Module, units: Iterable[nn.Module], before: int, chunks: int) -> None:
        self.phases: list[Phase] = []
        self.totals: list[int] = []
        self.purposes: list[dict[str, int]] = []
        self.meter: Meter[None] = Meter(on_operator=self._sample)
        self._model = model
        self._before = before  # bytes that existed before the model was created
        self._chunks = chunks  # bytes of `before` in chunks of earlier models, which `memory()` counts, too
        for number, module in enumerate(units):
            self._hook(number, module)

    def enter(self, name: str, unit: int | None) -> None:
        """Begin a phase. In the forward, the root's work between two units becomes part of the earlier unit's phase."""
        between = len(self.phases) > 1 and self.phases[-1].unit is ROOT
        if between and name == FORWARD and unit is not ROOT:
            self.phases.pop()
        self.phases.append(Phase(name, unit, len(self.totals)))
        self._sample()

    def held(self, bytes_of: Callable[[Held], int]) -> dict[str, int]:
        """Return the bytes of each purpose, without the chunks of earlier models."""
        known = self._model.memory() if isinstance(self._model, ShardLite) else {}
        held = {name: bytes_of(each) for name, each in known.items() if name in PURPOSES}
        if CHUNKS in held:
            held[CHUNKS] = max(held[CHUNKS] - self._chunks, 0)
        return held

    def _sample(self) -> None:
        """Record all live bytes. `memory()` counts memory that no operator has used yet. The meter does not."""
        held = self.held(lambda each: each.now)
        total = max(self.meter.live - self._before, sum(held.values()))
        self.totals.append(total)
        self.purposes.append({**held, ACTIVATIONS: total - sum(held.values())} if held else {})

    def _hook(self, unit: int, module: nn.Module) -> None:
        """Begin a phase at each pass of a unit. A forward begins before the unit's weights are gathered."""

        def after(_: nn.Module, __: Any, outputs: Any) -> None:
            tracked = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.requires_grad]
            if tracked:
                tracked[0].register_hook(lambda _: self.enter(BACKWARD, unit))  # type: ignore[no-untyped-call]
            self.enter(FORWARD, ROOT)

        module.register_forward_pre_hook(lambda *_: self.enter(FORWARD, unit), prepend=True)
        module.register_forward_hook(after)
