"""Simulate rank 0 of 8 on one GPU: kernels, streams and memory are real, but each collective is a kernel that waits.

For ShardLite and FSDP2 alike, `link.py` replaces the collectives. All systems of a model are built first, and then take
turns, because the speed of a host drifts.

Legend: `W` ranks.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.gpu.link import BANDWIDTH, CLUSTER, FakeLink
from bench.gpu.report import AGAIN, Report, Times, free, in_turns, synchronize
from shardlite import NonFiniteWarning, Precision
from shardlite.comm import streams
from shardlite.lab.compared.systems import ON_GPU, Build
from shardlite.lab.compared.trainer import Trainer
from shardlite.lab.compared.workloads import WORKLOADS, Workload, llama_blocks, transformers_gpt2
from shardlite.lab.fake.fake_group import as_one_rank, connect_as_over_nccl, fake_group, launches, launching_queue
from shardlite.lab.timer import percentile
from shardlite.plan import Planner, Setting, Source

RANKS = 8

_BF16 = Precision(compute=torch.bfloat16)
_CLIP = 1.0
_WARM_UP = 3
_TURNS, _ROUNDS = 3, 3

SYSTEMS: Mapping[str, Build] = {
    name: ON_GPU[name] for name in ("fsdp2", "floor", "exact", "fast", "in_backward", "quantized")
}
"""Systems of the probes. All compute in bf16 and reduce in fp32. All clip to 1.0, except `in_backward`, which cannot
clip. `floor` is the plain model in bf16, which steps an eighth of the parameters. FSDP2 is first, because the other
systems are compared with it."""

CAPTURED = ("fsdp2", "exact")
"""Systems whose whole step is also captured in a CUDA graph, as "SYSTEM, captured"."""

PLANNED = {
    "exact": Setting(world_size=RANKS, precision=_BF16),
    "in_backward": Setting(world_size=RANKS, precision=_BF16, in_backward=True),
}
"""Settings with which `shardlite plan` predicts the peak of these systems."""

_ON_A_CPU: Mapping[str, Workload] = {
    name: transformers_gpt2(name, layers=1, width=256, vocabulary=8192, context=8, batch=1)
    for name in ("gpt2-xl", "gpt2-xl-12")
} | {name: llama_blocks(name, layers=1, context=8, width=512) for name in ("llama-1k", "llama-4k")}
"""The workloads of the probes, with one narrow layer each, for a dry run on a CPU."""

GPU_BOUND = 0.1
"""A step is bound by the GPU if the GPU works on for this fraction of its time after the host has launched it."""


@contextmanager
def one_of(world_size: int, device: torch.device) -> Iterator[tuple[dist.ProcessGroup, FakeLink]]:
    """Initialize a fake process group whose collectives share a fake link. This process is rank 0."""
    link = FakeLink(world_size, device)
    make_queue: Callable[..., object] = streams.make_queue if device.type == "cuda" else launching_queue
    with fake_group(world_size, link) as group, as_one_rank(connect_as_over_nccl, make_queue):
        yield group, link


Step = Callable[[], Tensor]


@dataclass
class _System:
    """A system that is ready to be timed."""

    trainer: Trainer
    step: Step
    """Function that takes a step, and returns the loss."""

    found: dict[str, Any]
    """Keys of the row that are known before the timing."""

    fakes: list[float] = field(default_factory=list)
    """Milliseconds that the host has spent in fake collectives in each step."""


@dataclass(frozen=True)
class Bench:
    """What all systems of a model share."""

    workload: Workload
    group: dist.ProcessGroup
    link: FakeLink
    report: Report

    @property
    def names(self) -> dict[str, Any]:
        """Return the keys of all rows."""
        return {"model": self.workload.name, "ranks": RANKS}

    def prepare(self, systems: Sequence[str], captured: Sequence[str] = ()) -> dict[str, _System]:
        """Build systems, and let each take its first steps. A system that fails is reported and left out."""
        warnings.simplefilter("error", NonFiniteWarning)  # the time of a skipped step is meaningless
        ready: dict[str, _System] = {}
        for name in [*systems, *(f"{each}, captured" for each in captured)]:
            system, _, graph = name.partition(", ")
            with self.report.guarded(**self.names, system=name):
                ready[name] = self._captured(system) if graph else self.built(system)
        return ready

    def _trainer(self, system: str) -> tuple[Trainer, Step]:
        clip = None if system == "in_backward" else _CLIP
        trainer = replace(SYSTEMS[system](self.workload, self.group), max_norm=clip)
        return trainer, partial(trainer.step, self.workload.batch(0, 0))

    def built(self, system: str) -> _System:
        """Build a system, and let it take its first steps."""
        before = _allocated(self.report.device)
        trainer, step = self._trainer(system)
        for _ in range(0 if self.report.dry else _WARM_UP):
            step()
        return _System(trainer, step, self._counted(step, before) | {"clip": trainer.max_norm})

    def _captured(self, system: str) -> _System:
        """Capture forward, backward, clipping and optimizer. PyTorch requires the first steps on the same stream."""
        before = _allocated(self.report.device)
        trainer, step = self._trainer(system)
        for options in trainer.optimizer.param_groups:
            options.update({"capturable": True} if "capturable" in options else {})
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                step()
        losses: list[Tensor] = []

        def capture() -> None:
            with torch.cuda.graph(graph, stream=stream):
                losses.append(step())

        found = self._counted(capture, before)

        def replay() -> Tensor:
            graph.replay()
            return losses[0]

        return _System(trainer, replay, found | {"clip": trainer.max_norm})

    def _counted(self, step: Callable[[], object], before: int) -> dict[str, Any]:
        """Take a step. Return how long the step occupies the link, and how far the memory's peak is above `before`."""
        device, seconds = self.report.device, self.link.seconds
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        step()
        found = {"link_ms": round(1e3 * (self.link.seconds - seconds), 3)}
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
        return found | {"peak_bytes": peak}

    def time(self, ready: Mapping[str, _System], turns: int = _TURNS) -> dict[str, Times]:
        """Time systems in turns."""
        turns, rounds = (1, 1) if self.report.dry else (turns, _ROUNDS)
        steps = {name: partial(self._timed, system) for name, system in ready.items()}
        gc.collect()
        gc.freeze()  # a collection during a step would visit the modules of all systems
        try:
            return in_turns(self.report, self.names, steps, turns, rounds)
        finally:
            gc.unfreeze()

    def checked(self, ready: Mapping[str, _System], times: Mapping[str, Times]) -> dict[str, Times]:
        """Return the times of the systems whose loss is a number. Systems with a NaN may have skipped steps."""
        right = set()
        for name, system in ready.items():
            with self.report.guarded(**self.names, system=name):
                loss = float(system.step())
                assert loss == loss, "the loss is not a number"
                right |= {name, f"{name}, {AGAIN}"}
        return {name: each for name, each in times.items() if name in right}

    def _timed(self, system: _System) -> None:
        spent = self.link.host_seconds
        system.step()
        system.fakes.append(1e3 * (self.link.host_seconds - spent))


def fake8(report: Report) -> None:
    """Report steps of eight ranks: step time, exposed communication, host time, and measured and predicted peaks."""
    with one_of(RANKS, report.device) as (group, link):
        report(bandwidth_gbps=round(BANDWIDTH / 1e9), latency_us=round(1e6 * CLUSTER.base, 1), source=CLUSTER.source)
        for model in ("llama-1k", "llama-4k", "gpt2-xl"):
            _fake8(Bench(workload_of(model, report), group, link, report))
            free()


def _fake8(bench: Bench) -> None:
    predicted = _predicted(bench.workload, bench.report)
    ready = bench.prepare([*SYSTEMS], () if bench.report.dry else CAPTURED)
    times = bench.time(ready)
    with bench.link.awake():
        awake = bench.time(ready, 1)
    for name, row in rows_of(bench.checked(ready, times), awake).items():
        if (system := ready.get(name)) is not None:  # not a repetition
            row |= system.found | {"fakes_ms": round(percentile(system.fakes, 50), 3)}
            row |= {"predicted_bytes": predicted.get(name)}
            if "fsdp2" in ready and row["peak_bytes"]:
                row["peak_bytes_vs_fsdp2"] = round(row["peak_bytes"] / ready["fsdp2"].found["peak_bytes"], 3)
        bench.report(**bench.names, system=name, words=bench.workload.words, **row)


def rows_of(times: Mapping[str, Times], awake: Mapping[str, Times]) -> dict[str, dict[str, Any]]:
    """Return the keys of a row for each system.

    `vs_fsdp2` are ratios of the medians of each turn to FSDP2's in the same turn. `exposed_ms` is how much longer a
    step takes than with collectives that take no time, if the GPU bounds both.
    """
    medians = {name: [percentile(turn, 50) for turn in each.steps] for name, each in times.items()}
    found = {}
    for name, each in times.items():
        row: dict[str, Any] = {**each.summary(), "runs": len(each.steps), "bound": _bound(each)}
        row["turns_ms"] = [round(median, 4) for median in medians[name]]
        if "fsdp2" in medians:
            ratios = [ours / theirs for ours, theirs in zip(medians[name], medians["fsdp2"], strict=False)]
            row["vs_fsdp2"] = [round(ratio, 3) for ratio in ratios]
            row["ms_p50_vs_fsdp2"] = round(percentile(ratios, 50), 3)
        if name in awake and _bound(each) == _bound(awake[name]) == "GPU":
            row["exposed_ms"] = round(row["ms_p50"] - awake[name].summary()["ms_p50"], 3)
        found[name] = row
    return found


def _bound(times: Times) -> str:
    """Return what bounds a step. At the end of a turn, a host that bounds the step is hardly ahead of the GPU."""
    return "GPU" if percentile(times.ahead, 50) >= GPU_BOUND * times.summary()["ms_p50"] else "host"


def workload_of(model: str, report: Report) -> Workload:
    """Return a workload on the device of the report, with one narrow layer in a dry run."""
    return (_ON_A_CPU if report.dry else WORKLOADS)[model].on(report.device)


def _allocated(device: torch.device) -> int:
    free()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _predicted(workload: Workload, report: Report) -> dict[str, int]:
    """Return the peak in bytes that `shardlite plan` predicts for some systems."""
    predicted: dict[str, int] = {}
    with report.guarded(model=workload.name, system="plan"):
        planner = Planner(Source(workload.name, workload.make, lambda: workload.draw(0, 0), workload.words))
        predicted = {system: planner.plan(setting).peak for system, setting in PLANNED.items()}
    return predicted


# ---- the host -------------------------------------------------------------------------------------------------------

_BLOCKING_CALLS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaEventQuery", "cudaMemcpy")
"""Names that the profiler gives to CUDA calls that wait for the GPU, or ask whether it is done. `cudaMemcpy` is a
blocking copy."""

HOST_SYSTEMS = ("fsdp2", "floor", "exact", "fast", "in_backward")


def host(report: Report) -> None:
    """Report the host's time per unit, calls that wait, and the GPU's idle time, if communication takes no time."""
    with one_of(RANKS, report.device) as (group, link), link.awake():
        bench = Bench(workload_of("gpt2-xl-12", report), group, link, report)
        ready = bench.prepare(HOST_SYSTEMS)
        times = bench.checked(ready, bench.time(ready))
        for name, row in rows_of(times, {}).items():
            with report.guarded(**bench.names, system=name):
                if name in ready:
                    trainer = ready[name].trainer
                    units = len(bench.workload.units(trainer.model))
                    row["host_us_per_unit"] = round(1e3 * percentile(times[name].works, 50) / units, 1)
                    row |= _profiled(trainer, bench.workload, units, report)
                report(**bench.names, system=name, words=bench.workload.words, **row)


def _profiled(trainer: Trainer, workload: Workload, units: int, report: Report) -> dict[str, Any]:
    """Return launches per unit, blocking calls, and the idle time of the GPU from a backward to the next forward."""
    device, batch = report.device, workload.batch(0, 0)
    if device.type == "cpu":
        count = launches(lambda: trainer.step(batch))
        return {"launches_per_unit": round(count / units, 1), "blocking_calls": {}, "idle_ms": None}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        trainer.backward(batch)
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]  # a kernel whose name marks the end of a backward
        trainer.update()
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        trainer.backward(batch)
        trainer.update()
        synchronize(device)
    events = [
        each
        for each in profiled.events()
        if str(each.device_type).endswith("CUDA") and not getattr(each, "is_user_annotation", False)
    ]
    spans = [(each.time_range.start, each.time_range.end, each.name) for each in events]
    marks = sorted(start for start, _, name in spans if "spin" in name)
    calls = Counter(each.name for each in profiled.events() if each.name in _BLOCKING_CALLS)
    busy = [(start, end) for start, end, name in spans if "spin" not in name]
    found = {
        "launches_per_unit": round(len(busy) / 2 / units, 1),
        "blocking_calls": {name: count / 2 for name, count in calls.items()},
        "idle_ms": None,
    }
    if len(marks) == 2:
        found["idle_ms"] = round(idle(busy, marks[0], marks[1]) / 1e3, 3)
    return found


def idle(busy: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the time that no span in `busy` covers, from `begin` to the first span that starts at or after `end`."""
    ahead = [start for start, _ in busy if start >= end]
    end = min(ahead, default=end)
    free_since, found = begin, 0.0
    for start, stop in sorted(busy):
        if start >= end:
            break
        found += max(0.0, start - free_since) if start > begin else 0.0
        free_since = max(free_since, stop)
    return found + max(0.0, end - free_since)
