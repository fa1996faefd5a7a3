"""Simulate rank 0 of 8 on one GPU: kernels, streams and memory are real, but each collective is a sleep.

For both ShardLite and FSDP2, a collective of `n` bytes over `W` ranks sleeps for `(W - 1) / W * n / bandwidth` plus a
latency, on the stream on which NCCL would run the collective. Bandwidth and latency are those that `shardlite plan`
assumes for a DGX H100; `CLUSTER.source` is their source. During the sleep, the other ranks' parts of the target are
filled with this rank's part, so that numbers are finite and memory is written. Losses are meaningless. The simulation
does not include the use of multiprocessors by NCCL's kernels, the time spent waiting for other ranks, or the time of
all-reduces (of norms and flags).

Legend: `W` ranks.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.gpu.report import Report, free, milliseconds, synchronize
from bench.support.fake_group import as_one_rank, connect_as_over_nccl, fake_group, launches, launching_queue
from shardlite import NonFiniteWarning, Precision
from shardlite.comm import streams
from shardlite.lab.plan.clusters import CLUSTERS
from shardlite.lab.plan.plan import Planner, Setting
from shardlite.lab.plan.source import Source
from shardlite.lab.systems import Build, Trainer, build_format, build_fsdp2, build_shardlite
from shardlite.lab.timer import percentile
from shardlite.lab.workloads import WORKLOADS, Workload, llama_blocks, transformers_gpt2

RANKS = 8
CLUSTER = CLUSTERS["dgx-h100"]
BANDWIDTH = 1 / CLUSTER.inside.beta
"""Bytes per second in each direction."""

_BF16 = Precision(compute=torch.bfloat16)
_CLIP = 1.0
_WARM_UP = 3
_ROUNDS, _ROUNDS_AWAKE = 8, 4

_SHARDLITE = partial(build_shardlite, stage=3, transport="collectives", compute=torch.bfloat16)
SYSTEMS: Mapping[str, Build] = {
    "fsdp2": partial(build_fsdp2, compute=torch.bfloat16),
    "exact": _SHARDLITE,
    "fast": partial(_SHARDLITE, reduce="fast"),
    "in_backward": partial(build_format, precision=_BF16, in_backward=True, transport="collectives"),
    "quantized": partial(_SHARDLITE, quantized_gather=True),
}
"""Systems of the probes. All compute in bf16 and reduce in fp32. All clip to 1.0, except `in_backward`, which cannot
clip. FSDP2 is first, because the other systems are compared with it."""

CAPTURED = "exact, captured"
"""Name of the system `exact` with its whole step in a CUDA graph."""

PLANNED = {
    "exact": Setting(world_size=RANKS, precision=_BF16),
    "in_backward": Setting(world_size=RANKS, precision=_BF16, in_backward=True),
}
"""Settings with which `shardlite plan` predicts the peak of these systems."""

_ON_A_CPU: Mapping[str, Workload] = {
    "gpt2-xl": transformers_gpt2("gpt2-xl", layers=1, width=1600, vocabulary=50257, context=8, batch=1),
    "gpt2-xl-2k": transformers_gpt2("gpt2-xl-2k", layers=1, width=1600, vocabulary=50257, context=8, batch=1),
    "llama-1k": llama_blocks("llama-1k", layers=1, context=8),
    "llama-4k": llama_blocks("llama-4k", layers=1, context=16),
}
"""The workloads of the probes, with one layer each, for a dry run on a CPU."""


class Sleeps:
    """A function that replaces every collective: it sleeps for as long as the collective would take."""

    def __init__(self, world_size: int, device: torch.device, cycles: float | None = None) -> None:
        """Create the replacement. `cycles` is the rate of the GPU's sleep in cycles per second, measured if `None`."""
        self.world_size = world_size
        self.awake = False
        """If true, collectives do not sleep. A target is still filled when it is seen for the first time."""

        self.seconds = 0.0
        """Seconds of all sleeps so far."""

        self.calls: Counter[str] = Counter()
        on_gpu = device.type == "cuda"
        self.cycles = (cycles_per_second() if on_gpu else 0.0) if cycles is None else cycles
        self._seen: set[tuple[int, int]] = set()
        self._on_gpu = on_gpu
        self._beside: dict[torch.cuda.Stream, torch.cuda.Stream] = {}
        """For each stream of collectives, a second stream that fills the targets, so that streams stay independent."""

        self._exchanges: torch.cuda.Stream | None = None

    def __call__(self, name: str, target: Tensor, source: Tensor, *rest: Any) -> Any:
        """Sleep on the current stream. An asynchronous exchange sleeps on a separate stream, as with NCCL."""
        if not (self._on_gpu and name == "alltoall_base" and rest[-1].asyncOp):
            return self._sleep(name, target, source)
        self._exchanges = self._exchanges or _stream_of_nccl()
        self._exchanges.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._exchanges):
            self._sleep(name, target, source)
            return _Asleep(self._exchanges.record_event())

    def _sleep(self, name: str, target: Tensor, source: Tensor) -> None:
        self.calls[name] += 1
        place = (target.data_ptr(), target.nbytes)
        if self.awake and place in self._seen:
            return
        self._seen.add(place)
        nbytes = max(target.nbytes, source.nbytes)
        seconds = (self.world_size - 1) / self.world_size * nbytes / BANDWIDTH + CLUSTER.base
        self.seconds += 0.0 if self.awake else seconds
        if not self._on_gpu:
            self._fill(target, source)
            return
        current = torch.cuda.current_stream()
        if current not in self._beside:
            self._beside[current] = _stream_of_nccl()
        beside = self._beside[current]
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            self._fill(target, source)
        if not self.awake:
            torch.cuda._sleep(int(seconds * self.cycles))  # type: ignore[no-untyped-call]
        current.wait_stream(beside)

    def forget(self) -> None:
        """Fill all targets again at their next use, because their memory may belong to other tensors."""
        self._seen.clear()

    def _fill(self, target: Tensor, source: Tensor) -> None:
        """Copy this rank's part to every rank's part of the target [n], with one kernel if the parts are equal."""
        with torch.no_grad():
            out, own = _in_wide_elements(target.detach().view(-1), source.detach().reshape(-1))
            if len(out) == self.world_size * len(own):
                out.view(self.world_size, -1).copy_(own.expand(self.world_size, -1))
            else:
                count = min(len(out), len(own))
                out[:count].copy_(own[:count])


class _Asleep(NamedTuple):
    """The handle of a simulated asynchronous exchange."""

    end: torch.cuda.Event

    def wait(self) -> bool:
        """Let the current stream wait for the exchange."""
        torch.cuda.current_stream().wait_event(self.end)
        return True


def _in_wide_elements(out: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors as views of the widest possible integers, so that bytes are copied as fast as bf16."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        places = [each.nbytes for each in (out, own)] + [each.data_ptr() for each in (out, own)]
        offsets = [each.storage_offset() * each.itemsize for each in (out, own)]
        if not any(place % dtype.itemsize for place in (*places, *offsets)):
            return out.view(dtype), own.view(dtype)
    return out, own


def _stream_of_nccl() -> torch.cuda.Stream:
    """Return a high-priority stream, like NCCL's, whose kernels do not queue behind the computation."""
    return torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]


def cycles_per_second() -> float:
    """Return the cycles per second of the GPU's sleep, measured for 10 ms at the clock rate of matrix products."""
    factor = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(50):
        factor @ factor
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    cycles = 20_000_000
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    start.record()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    end.record()
    torch.cuda.synchronize()
    return float(cycles / (start.elapsed_time(end) / 1e3))


@contextmanager
def one_of(world_size: int, device: torch.device) -> Iterator[tuple[dist.ProcessGroup, Sleeps]]:
    """Initialize a fake process group whose collectives are sleeps. This process is rank 0."""
    sleeps = Sleeps(world_size, device)
    make_queue: Callable[..., object] = streams.make_queue if device.type == "cuda" else launching_queue
    with fake_group(world_size, sleeps) as group, as_one_rank(connect_as_over_nccl, make_queue):
        yield group, sleeps


def fake8(report: Report) -> None:
    """Report steps of eight ranks: step time, exposed communication, host time, and measured and predicted peaks."""
    with one_of(RANKS, report.device) as (group, sleeps):
        report(bandwidth_gbps=round(BANDWIDTH / 1e9), latency_us=round(1e6 * CLUSTER.base, 1), source=CLUSTER.source)
        for model in ("llama-1k", "llama-4k", "gpt2-xl"):
            workload = _workload(model, report)
            predicted = _predicted(workload, report)
            fsdp2: dict[str, Any] = {}
            for system, build in SYSTEMS.items():
                names = {"model": model, "system": system, "ranks": RANKS}
                with report.guarded(**names):
                    found = _step(workload, build, group, sleeps, clip=system != "in_backward", report=report)
                    fsdp2 = found if system == "fsdp2" else fsdp2
                    found |= {f"{key}_vs_fsdp2": _ratio(found, fsdp2, key) for key in ("ms_p50", "peak_bytes")}
                    report(**names, words=workload.words, **found, predicted_bytes=predicted.get(system))
            if not report.dry:
                names = {"model": model, "system": CAPTURED, "ranks": RANKS}
                with report.guarded(**names):
                    found = _captured(workload, group, sleeps, report)
                    report(**names, words=workload.words, **found, ms_p50_vs_fsdp2=_ratio(found, fsdp2, "ms_p50"))
        if sleeps.cycles:
            report(cycles_per_us=[round(sleeps.cycles / 1e6, 1), round(cycles_per_second() / 1e6, 1)])


def _step(
    workload: Workload, build: Build, group: dist.ProcessGroup, sleeps: Sleeps, *, clip: bool, report: Report
) -> dict[str, Any]:
    """Return the times of a step, and by how much its peak of memory exceeds the memory before the build."""
    device, before, rounds = report.device, _allocated(report.device), 1 if report.dry else _ROUNDS
    trainer, step = _prepared(workload, build, group, sleeps, clip=clip, report=report)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    slept = sleeps.seconds
    found: dict[str, Any] = milliseconds(step, device, rounds)
    found["slept_ms"] = round(1e3 * (sleeps.seconds - slept) / rounds, 3)
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    _check_loss(step)
    sleeps.awake = True
    try:
        with _any_numbers():
            awake = milliseconds(step, device, 1 if report.dry else _ROUNDS_AWAKE)
    finally:
        sleeps.awake = False
    del trainer
    return {**found, "exposed_ms": round(found["ms_p50"] - awake["ms_p50"], 3), "clip": _CLIP if clip else None}


def _captured(workload: Workload, group: dist.ProcessGroup, sleeps: Sleeps, report: Report) -> dict[str, Any]:
    """Return the times of replaying a CUDA graph of a whole step: forward, backward, clipping and optimizer."""
    trainer, step = _prepared(workload, SYSTEMS["exact"], group, sleeps, clip=True, report=report)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    found: dict[str, Any] = milliseconds(graph.replay, report.device, _ROUNDS)
    assert loss == loss, "the loss is not a number"
    del trainer
    return found | {"clip": _CLIP}


@contextmanager
def _any_numbers() -> Iterator[None]:
    """Allow steps whose loss is NaN. Such steps may occur, because `awake` collectives fill each target only once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)
        yield


Step = Callable[[], Tensor]


def _prepared(
    workload: Workload, build: Build, group: dist.ProcessGroup, sleeps: Sleeps, *, clip: bool, report: Report
) -> tuple[Trainer, Step]:
    """Build a system, and take its first steps. Return the system and a function that takes a step."""
    warnings.simplefilter("error", NonFiniteWarning)  # the time of a skipped step is meaningless
    sleeps.forget()
    trainer = replace(build(workload, group), max_norm=_CLIP if clip else None)
    step = partial(trainer.step, workload.batch(0, 0))
    for _ in range(1 if report.dry else _WARM_UP):
        step()
    return trainer, step


def _check_loss(step: Step) -> None:
    """Take a step, and raise if the loss is NaN. If it is NaN, the optimizer may have skipped timed steps."""
    loss = float(step())
    assert loss == loss, "the loss is not a number"


def _workload(model: str, report: Report) -> Workload:
    return (_ON_A_CPU if report.dry else WORKLOADS)[model].on(report.device)


def _allocated(device: torch.device) -> int:
    free()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _ratio(found: Mapping[str, Any], reference: Mapping[str, Any], key: str) -> float | None:
    return round(found[key] / reference[key], 3) if reference.get(key) and found.get(key) else None


def _predicted(workload: Workload, report: Report) -> dict[str, int]:
    """Return the peak in bytes that `shardlite plan` predicts for some systems."""
    predicted: dict[str, int] = {}
    with report.guarded(model=workload.name, system="plan"):
        planner = Planner(Source(workload.name, workload.make, lambda: workload.draw(0, 0), workload.words))
        predicted = {system: planner.plan(setting).peak for system, setting in PLANNED.items()}
    return predicted


# ---- the host -------------------------------------------------------------------------------------------------------

_BLOCKING_CALLS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Names that the profiler gives to CUDA calls that wait for the GPU. `cudaMemcpy` is a blocking copy."""


class Waits:
    """Counter and timer of the calls by which the library waits on the host: queries of events, and sleeps."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0

    @contextmanager
    def counted(self, event: Any = torch.cuda.Event) -> Iterator[None]:
        """Within the block, count and time calls of the class `event`, and sleeps in `shardlite.comm.streams`."""
        with ExitStack() as stack:
            for owner, name in ((event, "query"), (event, "synchronize"), (streams, "sleep")):
                timed = self._timed(name, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, timed))
            yield

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.counts[name] += 1
                self.seconds += time.perf_counter() - begin

        return call


def host(report: Report) -> None:
    """Report the host's time per unit, the host's waits and the GPU's idle time, if communication takes no time."""
    with one_of(RANKS, report.device) as (group, sleeps):
        workload = _workload("gpt2-xl-2k", report)
        for system in ("fsdp2", "exact", "in_backward", "fast"):
            names = {"model": workload.name, "system": system, "ranks": RANKS}
            with report.guarded(**names):
                clip = system != "in_backward"
                sleeps.awake = False
                trainer, step = _prepared(workload, SYSTEMS[system], group, sleeps, clip=clip, report=report)
                sleeps.awake = True
                with _any_numbers():
                    found = _host(trainer, step, workload, report)
                del trainer, step
                report(**names, words=workload.words, **found)


def _host(trainer: Trainer, step: Step, workload: Workload, report: Report) -> dict[str, Any]:
    device, units = report.device, len(workload.units(trainer.model))
    synchronize(device)
    waits, works, rounds = Waits(), [], 1 if report.dry else 4
    with waits.counted():
        found: dict[str, Any] = milliseconds(lambda: works.append(_worked(step)), device, rounds)
    found |= {
        "host_us_per_unit": round(1e6 * percentile(works, 50) / units, 1),
        "waits": {name: count / rounds for name, count in waits.counts.items()},
        "wait_ms": round(1e3 * waits.seconds / rounds, 3),
    }
    loss = float(step())
    return found | _profiled(trainer, workload, units, report) | {"finite": loss == loss}


def _worked(call: Callable[[], object]) -> float:
    """Return the CPU time of all threads in a call, including the thread on which autograd runs a backward on a GPU."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


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
