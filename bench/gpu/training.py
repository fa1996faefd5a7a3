"""Parts 3 and 4: whole steps on a GPU, what the host does in them, and the largest model that trains."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bench.gpu.correctness import ROOT, Report
from bench.gpu.run import device_of
from bench.support.fake_group import fake_group
from bench.support.measure import WARM_UP, peak_bytes, percentile, seconds
from bench.support.ranks import only_rank
from bench.support.systems import MIXED, Trainer
from bench.support.table import read_rows
from bench.support.workloads import WORKLOADS, Workload
from shardlite.comm.transport.base import Message
from shardlite.comm.transport.process_group import NcclTransport

_ROUNDS = 10
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
"""What a host that waits for the GPU calls (`cudaMemcpy` is the copy that blocks)."""


def steps(report: Report, *, dry: bool) -> None:
    """Steps of GPT-2 XL in bf16: time, time of the host, peak of memory. One system after the other."""
    with only_rank(device_of(dry)) as group:
        workload = _workload("gpt2-xl", dry)
        reference: dict[str, float] = {}
        for name, build in MIXED.items():
            _free()
            peak = peak_bytes(workload, build, group)
            _free()
            found = _timed(build(workload, group), workload) | {"peak_bytes": peak}
            reference = reference or found
            ratios = {f"{key}_vs_fsdp2": round(found[key] / reference[key], 3) for key in ("ms_p50", "peak_bytes")}
            report(system=name, words=workload.words, **found, **ratios)


def host_waits(report: Report, *, dry: bool) -> None:
    """How often the host waits for the GPU in a steady step: never, if all is well."""
    with only_rank(device_of(dry)) as group:
        workload = _workload("mlp", dry)
        for name, build in MIXED.items():
            trainer, batch = build(workload, group), workload.batch(0, 0)
            for _ in range(WARM_UP):
                trainer.step(batch)
            activities = [ProfilerActivity.CPU, *([] if dry else [ProfilerActivity.CUDA])]
            with profile(activities=activities) as profiled, _refusing_waits(dry) as refused:
                refused(partial(trainer.step, batch))
            waits = Counter(event.name for event in profiled.events() if event.name in _WAITS)
            report(system=name, waits=dict(waits), refused=refused.error)


def compiled(report: Report, *, dry: bool) -> None:
    """Steps with blocks that `torch.compile` has compiled, in both of its modes."""
    ways: dict[str, dict[str, Any]] = {"no": {}, "default": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
    with only_rank(device_of(dry)) as group:
        for way, options in ways.items():
            workload = _workload("mlp", dry)
            if way != "no":
                workload = replace(workload, make=_compiling(workload, {"backend": "eager"} if dry else options))
            for name in ("fsdp2", "standard"):
                torch.compiler.reset()
                report(system=name, compiled=way, **_timed(MIXED[name](workload, group), workload))


def messages_to_itself(report: Report, *, dry: bool) -> None:
    """What a batch of two messages costs the host and the GPU, sent by a rank to itself."""
    with fake_group(1) if dry else only_rank(device_of(dry)) as group:
        transport, device = NcclTransport(group), device_of(dry)
        for nbytes in (1 << 10,) if dry else (1 << 12, 1 << 20, 1 << 26):
            sent, received = (torch.zeros(nbytes // 4, device=device) for _ in range(2))
            batch = [Message(sent, 0, outgoing=True), Message(received, 0, outgoing=False)]
            taken = [seconds(partial(_exchange, transport, batch), device) for _ in range(WARM_UP + 50)]
            wall, cpu = (percentile([each[i] for each in taken[WARM_UP:]], 50) for i in (0, 1))
            report(nbytes=nbytes, us_p50=round(1e6 * wall, 1), host_us_p50=round(1e6 * cpu, 1))


def largest_model(report: Report, *, dry: bool) -> None:
    """The largest model that trains in the memory of the card: `examples/largest_model.py`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / "largest_model.py"), "--out", folder]
        budget = ["--gigabytes", "0.02", "--within", "16"] if dry else ["--within", "0.05"]
        subprocess.run([*command, *budget], cwd=ROOT, check=True)
        for row in read_rows(Path(folder).glob("*.jsonl")):
            report(**{key: value for key, value in row.items() if key != "bench"})


def _exchange(transport: NcclTransport, batch: Sequence[Message]) -> None:
    transport.exchange(batch, tag=0).wait()


def _workload(name: str, dry: bool) -> Workload:
    return WORKLOADS["tiny" if dry else name].on(device_of(dry))


def _timed(trainer: Trainer, workload: Workload) -> dict[str, float]:
    """Return the times of a step in milliseconds, and those that the threads of this process work."""
    batch = workload.batch(0, 0)
    taken = [seconds(partial(trainer.step, batch), workload.device) for _ in range(WARM_UP + _ROUNDS)][WARM_UP:]
    walls = {f"ms_p{percent}": percentile([wall for wall, _ in taken], percent) for percent in (20, 50, 80)}
    found = walls | {"host_ms_p50": percentile([cpu for _, cpu in taken], 50)}
    return {key: round(1e3 * value, 3) for key, value in found.items()}


def _compiling(workload: Workload, options: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return what makes the model with compiled blocks."""

    def make() -> nn.Module:
        model = workload.make()
        for block in workload.units(model):
            block.compile(**options)
        return model

    return make


class _Refusing:
    """Calls something in which a wait of the host is an error, and keeps that."""

    error: str | None = None

    def __call__(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            self.error = str(error).splitlines()[0]


@contextmanager
def _refusing_waits(dry: bool) -> Iterator[_Refusing]:
    """Let PyTorch refuse its own waits of the host."""
    if not dry:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield _Refusing()
    finally:
        if not dry:
            torch.cuda.set_sync_debug_mode("default")


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
