"""Live tensor bytes at every operator of one training step, with the passes of the units that they belong to.

In: a `System`. Out: a `Timeline`. Bytes are counted by `telemetry.Meter`, above those that existed before the model was
made, and by purpose as `model.memory()` has them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from shardlite_kernels import chunk_memory
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from shardlite import ShardLite
from shardlite.apps.memory.systems import System
from shardlite.apps.plan.source import Source
from shardlite.build import ACTIVATIONS, HELD
from shardlite.telemetry import Held, Meter

PURPOSES = (*HELD, "gradients", "gradient buckets", "gather buffers")
"""Those of `memory()` that are tensors, in the order of a table."""

CHUNKS = "chunks of a step"
"""The purpose that counts what all models of the process share."""

ROOT = None
"""The unit with the rest."""

FORWARD, BACKWARD, STEP = "forward", "backward", "step"

_WARM_UP = 2  # steps until all states and buffers are allocated


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
    """Bytes of one step of a rank, from sample to sample: two of each operator, before it and after it."""

    system: str
    units: Sequence[str]
    phases: Sequence[Phase]
    totals: Sequence[int]
    purposes: Sequence[dict[str, int]]
    """Of each sample, activations included. Empty dicts if the system keeps no account."""

    most: Mapping[str, int]
    """The most bytes of each purpose, between operators, too; moments differ."""

    @property
    def peak(self) -> int:
        """Return the most bytes together."""
        return max(self.totals)

    def places(self) -> list[float]:
        """Return the place of each sample on an axis on which every phase is 1 wide."""
        stops = [*(phase.first for phase in self.phases[1:]), len(self.totals)]
        return [
            number + i / (stop - phase.first)
            for number, (phase, stop) in enumerate(zip(self.phases, stops, strict=True))
            for i in range(stop - phase.first)
        ]


def record(name: str, build: Callable[[], System], source: Source) -> Timeline:
    """Build a system, train it for some steps, and record one. To be called by every rank."""
    before, chunks = _live(), sum(each.nbytes for each in chunk_memory())
    system = build()
    loss = source.loss(system.model, None)
    for _ in range(_WARM_UP):
        _step(system, loss, lambda *_: None)
    gc.collect()
    recorder = _Recorder(system, before, chunks)
    if isinstance(system.model, ShardLite):
        system.model.ledger.reset_peak()
    with recorder.recording():
        _step(system, loss, recorder.begin)
    peaks = recorder.held(lambda each: each.peak)
    return Timeline(
        system=name,
        units=system.units,
        phases=recorder.phases,
        totals=recorder.totals,
        purposes=recorder.purposes,
        most={**peaks, ACTIVATIONS: max(each.get(ACTIVATIONS, 0) for each in recorder.purposes)},
    )


def _live() -> int:
    """Return the bytes of all tensors."""
    gc.collect()
    meter: Meter[None] = Meter()
    with meter:
        return meter.live


def _step(system: System, loss: Callable[[], Tensor], begin: Callable[[str, int | None], None]) -> None:
    """Take one step, and say which phases begin."""
    begin(FORWARD, ROOT)
    result = loss()
    begin(BACKWARD, ROOT)
    torch.autograd.backward(result)
    del result
    begin(STEP, ROOT)
    system.optimizer.step()
    system.optimizer.zero_grad()


class _Operators(TorchDispatchMode):
    """Call `sample` before and after each operator on tensors that have memory."""

    def __init__(self, sample: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sample = sample

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`. A DTensor is unwrapped first, as in `Meter`."""
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented
        self._sample()
        result = func(*args, **(kwargs or {}))
        self._sample()
        return result


@dataclass
class _Recorder:
    """Takes samples, and notes where phases begin."""

    system: System
    before: int
    """Bytes that existed before the model was made."""

    chunks: int
    """Bytes among them that steps of earlier models left in this process. `memory()` counts them, too."""

    phases: list[Phase] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    purposes: list[dict[str, int]] = field(default_factory=list)
    meter: Meter[None] = field(default_factory=Meter)

    def begin(self, name: str, unit: int | None) -> None:
        """Begin a phase. What the root does between two units belongs to the first of them."""
        between = len(self.phases) > 1 and self.phases[-1].unit is ROOT
        if between and name == FORWARD and unit is not ROOT:
            self.phases.pop()
        self.phases.append(Phase(name, unit, len(self.totals)))
        self.sample()

    def sample(self) -> None:
        """Note what is alive. Memory that is made by no operator is known to its purpose first."""
        held = self.held(lambda each: each.now)
        total = max(self.meter.live - self.before, sum(held.values()))
        self.totals.append(total)
        self.purposes.append({**held, ACTIVATIONS: total - sum(held.values())} if held else {})

    def held(self, bytes_of: Callable[[Held], int]) -> dict[str, int]:
        """Return the bytes of each purpose, without the chunks that earlier models left."""
        held = {name: bytes_of(each) for name, each in self.system.held().items() if name in PURPOSES}
        if CHUNKS in held:
            held[CHUNKS] = max(held[CHUNKS] - self.chunks, 0)
        return held

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operators and phases of the block."""
        handles = [
            handle
            for number, name in enumerate(self.system.units)
            for handle in self._watch(number, self.system.module.get_submodule(name))
        ]
        try:
            with self.meter, _Operators(self.sample):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, unit: int, module: nn.Module) -> Iterator[Any]:
        """Register hooks by which a unit's passes begin phases. A forward begins before its weights are gathered."""

        def after(_: nn.Module, __: Any, outputs: Any) -> None:
            grown = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.requires_grad]
            if grown:
                grown[0].register_hook(lambda _: self.begin(BACKWARD, unit))  # type: ignore[no-untyped-call]
            self.begin(FORWARD, ROOT)

        yield module.register_forward_pre_hook(lambda *_: self.begin(FORWARD, unit), prepend=True)
        yield module.register_forward_hook(after)
