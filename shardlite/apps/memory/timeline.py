"""Live tensor bytes at every operator of one training step, by purpose and by the unit that runs.

In: a `System`. Out: a `Timeline`. `telemetry.Meter` counts bytes, above those that existed before the model was made;
`model.memory()` says what they are for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from shardlite_kernels import chunk_memory
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardlite import ShardLite
from shardlite.apps.memory.measure import warm_up
from shardlite.apps.memory.systems import System, Trainer
from shardlite.apps.plan.source import Source
from shardlite.build import ACTIVATIONS, HELD
from shardlite.telemetry import Held, Meter

PURPOSES = (*HELD, "gradients", "gradient buckets", "gather buffers")
"""The purposes of `memory()` that are tensors, in the order of a table."""

CHUNKS = "chunks of a step"
"""The purpose that counts what all models of the process share."""

ROOT = None
"""Number of the root unit."""

FORWARD, BACKWARD, STEP = "forward", "backward", "step"


@dataclass(frozen=True)
class Phase:
    """A part of the step: the forward or backward of one unit, or the optimizer's step."""

    name: str
    unit: int | None
    """Number of the unit, or `ROOT`."""

    first: int
    """Number of the first sample."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Bytes of one step of a rank, in samples: one before each operator, and one after it."""

    units: Sequence[str]
    phases: Sequence[Phase]
    totals: Sequence[int]
    purposes: Sequence[Mapping[str, int]]
    """Of each sample, including activations. Empty for a system without `memory()`."""

    most: Mapping[str, int]
    """The peak of each purpose, also between operators. Purposes peak at different moments."""

    @property
    def peak(self) -> int:
        """Return the peak of all purposes together."""
        return max(self.totals)

    def places(self) -> list[float]:
        """Return the place of each sample on an axis on which every phase has the width 1."""
        stops = [*(phase.first for phase in self.phases[1:]), len(self.totals)]
        return [
            number + i / (stop - phase.first)
            for number, (phase, stop) in enumerate(zip(self.phases, stops, strict=True))
            for i in range(stop - phase.first)
        ]

    @staticmethod
    def of(row: Mapping[str, Any]) -> Timeline:
        """Return the timeline of `asdict`."""
        return Timeline(**{**row, "phases": [Phase(**phase) for phase in row["phases"]]})


def record(source: Source, system: System, group: dist.ProcessGroup) -> Timeline:
    """Build a system, warm it up, and record one step. Collective."""
    before, chunks = _live(), sum(each.nbytes for each in chunk_memory())
    trainer = system.build(source, group)
    warm_up(trainer)
    gc.collect()
    recorder = _Recorder(trainer, before, chunks)
    if isinstance(trainer.model, ShardLite):
        trainer.model.ledger.reset_peak()
    with recorder.recording():
        trainer.step(lambda name: recorder.enter(name, ROOT))
    return Timeline(
        units=list(trainer.units),
        phases=recorder.phases,
        totals=recorder.totals,
        purposes=recorder.purposes,
        most={
            **recorder.held(lambda each: each.peak),
            ACTIVATIONS: max(each.get(ACTIVATIONS, 0) for each in recorder.purposes),
        },
    )


def _live() -> int:
    """Return the bytes of all tensors."""
    gc.collect()
    meter: Meter[None] = Meter()
    with meter:
        return meter.live


class _Recorder:
    """Takes samples, and the numbers of the samples with which phases begin."""

    def __init__(self, trainer: Trainer, before: int, chunks: int) -> None:
        self.phases: list[Phase] = []
        self.totals: list[int] = []
        self.purposes: list[dict[str, int]] = []
        self._trainer = trainer
        self._before = before  # bytes that existed before the model was made
        self._chunks = chunks  # of them, what earlier models have left: `memory()` counts it, too
        self._meter: Meter[None] = Meter(on_operator=self._sample)

    def enter(self, name: str, unit: int | None) -> None:
        """Begin a phase. What the root does between two units belongs to the first of them."""
        between = len(self.phases) > 1 and self.phases[-1].unit is ROOT
        if between and name == FORWARD and unit is not ROOT:
            self.phases.pop()
        self.phases.append(Phase(name, unit, len(self.totals)))
        self._sample()

    def held(self, bytes_of: Callable[[Held], int]) -> dict[str, int]:
        """Return the bytes of each purpose, without the chunks that earlier models have left."""
        model = self._trainer.model
        known = model.memory() if isinstance(model, ShardLite) else {}
        held = {name: bytes_of(each) for name, each in known.items() if name in PURPOSES}
        if CHUNKS in held:
            held[CHUNKS] = max(held[CHUNKS] - self._chunks, 0)
        return held

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operators and phases of the block."""
        handles = [
            handle
            for number, module in enumerate(self._trainer.units.values())
            for handle in self._hook(number, module)
        ]
        try:
            with self._meter:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _sample(self) -> None:
        """Record what is alive. Memory that no operator has allocated is known to its purpose first."""
        held = self.held(lambda each: each.now)
        total = max(self._meter.live - self._before, sum(held.values()))
        self.totals.append(total)
        self.purposes.append({**held, ACTIVATIONS: total - sum(held.values())} if held else {})

    def _hook(self, unit: int, module: nn.Module) -> Iterator[Any]:
        """Register hooks with which a unit's passes begin phases. A forward begins before its weights are gathered."""

        def after(_: nn.Module, __: Any, outputs: Any) -> None:
            tracked = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.requires_grad]
            if tracked:
                tracked[0].register_hook(lambda _: self.enter(BACKWARD, unit))  # type: ignore[no-untyped-call]
            self.enter(FORWARD, ROOT)

        yield module.register_forward_pre_hook(lambda *_: self.enter(FORWARD, unit), prepend=True)
        yield module.register_forward_hook(after)
