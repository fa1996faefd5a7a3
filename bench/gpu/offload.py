"""Keep optimizer states in host memory: bandwidth, step time and peak, beside CPU offload of FSDP2 and of torchao.

One rank trains GPT-2 XL in bf16 without clipping, with 0, 50 or 100 % of the states in host memory. Systems are built
one after the other, because the states of two would not fit. Each is compared with itself with all states on the GPU.

| system | what is in host memory at 100 % | steps on |
|---|---|---|
| `fp32`, `in_backward` | moments in fp32 | the GPU, in chunks |
| `compact` | moments in int8, and the low bits of weights | the GPU, in chunks |
| `fsdp2` | `CPUOffloadPolicy`: weights, gradients and moments in fp32 | the CPU |
| `torchao` | `CPUOffloadOptimizer`: copies of weights, gradients, and moments in fp32 | the CPU |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import fsdp
from torch.optim import Optimizer

from bench.gpu.fake_ranks import workload_of
from bench.gpu.report import Report, milliseconds
from shardlite import Precision
from shardlite.lab.compared.systems import OPTIONS, Build, build_fsdp2, build_plain, build_shardlite
from shardlite.lab.compared.trainer import Autocast
from shardlite.lab.compared.workloads import Workload, perceptrons
from shardlite.lab.ranks import only_rank
from shardlite.params.host_states import OFFLOADED, HostStates
from shardlite.plan import Planner, Setting, Source
from shardlite.wrapping import offload_of

GOAL = 1.15
"""Maximum time of a step with all states in host memory, as a multiple of a step with none. Not measured yet."""

NBYTES = 256 << 20
"""Bytes of a copy whose bandwidth is measured."""

AGAIN = "fp32, again"
_WARM_UP, _ROUNDS = 3, 6
_BF16 = Precision(compute=torch.bfloat16)
_SPLIT = Precision(compute=torch.bfloat16, master="split24")
_FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": _BF16},
    "in_backward": {"precision": _BF16, "in_backward": True},
    "compact": {"precision": _SPLIT, "state": "int8"},
}
_TINY = perceptrons("mlp", blocks=3, width=64, batch=4)  # of a dry run


class System(NamedTuple):
    """A system with some of its states in host memory."""

    name: str
    share: float
    build: Build
    setting: Setting | None = None
    """The setting with which `shardlite plan` predicts the system."""


def systems(report: Report) -> Iterator[System]:
    """Yield the systems in the order of their runs. The first is repeated at the end."""
    shares = {"fp32": (0.0, 0.5, 1.0)}
    for name, options in _FORMATS.items():
        for share in shares.get(name, (0.0, 1.0)):
            yield _shardlite(name, share, options)
    pinned = fsdp.CPUOffloadPolicy(pin_memory=not report.dry)
    for share, policy in ((0.0, None), (1.0, pinned)):
        yield System("fsdp2", share, partial(build_fsdp2, compute=torch.bfloat16, tuned=True, offload=policy))
    for share, optimizer in ((0.0, None), (1.0, _torchao)):
        yield System("torchao", share, partial(build_plain, kind=Autocast, optimizer=optimizer))
    yield _shardlite(AGAIN, 0.0, _FORMATS["fp32"])


def _shardlite(name: str, share: float, options: dict[str, Any]) -> System:
    build = partial(build_shardlite, **options, offload=share or None)
    return System(name, share, build, Setting(**options, offload=offload_of(share)))


def _torchao(params: Any) -> Optimizer:
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(params, torch.optim.AdamW, fused=True, **OPTIONS)  # type: ignore[no-any-return]


def offload(report: Report) -> None:
    """Report bandwidths, and the steps of each system. An optional system that is missing is noted."""
    with report.guarded(system="copies"):
        _bandwidths(report)
    workload = _TINY if report.dry else workload_of("gpt2-xl", report)
    planner = Planner(Source(workload.name, workload.make, lambda: workload.draw(0, 0), workload.words))
    losses: dict[tuple[str, float], list[float]] = {}
    times: dict[str, float] = {}
    with only_rank(report.device) as group:
        for system in systems(report):
            key = {"system": system.name, "share": system.share}
            if system.build.keywords.get("optimizer") is _torchao and (why := _no_torchao(report)):  # type: ignore[attr-defined]
                report(**key, note=why)
                continue
            with report.guarded(**key):
                losses[system.name, system.share], found = _trained(system, workload, group, report)
                first = "fp32" if system.name == AGAIN else system.name
                found["vs_resident"] = round(found["ms_p50"] / times.setdefault(first, found["ms_p50"]), 3)
                found["same_bits"] = losses[system.name, system.share] == losses.get((first, 0.0))
                report(**key, words=workload.words, goal=GOAL, **_predicted(planner, system), **found)
    with report.guarded(system="bits"):
        _check_bits(losses)


def _no_torchao(report: Report) -> str:
    if report.dry:
        return "needs a GPU"
    try:
        import torchao.optim  # noqa: F401
    except Exception as error:  # an extension that was built for another PyTorch may raise anything
        return f"torchao cannot be imported: {type(error).__name__}"[:300]
    return ""


def _trained(
    system: System, workload: Workload, group: dist.ProcessGroup, report: Report
) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of the first steps, and times and bytes of later ones."""
    device, batch = report.device, workload.batch(0, 0)
    trainer = system.build(workload, group)
    losses = [float(trainer.step(batch)) for _ in range(_WARM_UP)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found: dict[str, Any] = milliseconds(partial(trainer.step, batch), device, 1 if report.dry else _ROUNDS)
    found["peak_bytes"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    if system.setting is not None:
        held = trainer.model.memory()  # type: ignore[operator]
        found["host_bytes"] = held[OFFLOADED].now if OFFLOADED in held else 0
        found["step_gbps"] = round(found["host_bytes"] / found["ms_p50"] / 1e6, 2)
    return losses, found


def _predicted(planner: Planner, system: System) -> dict[str, Any]:
    if system.setting is None:
        return {}
    plan = planner.plan(system.setting)
    return {"predicted_bytes": plan.peak, "predicted_host_bytes": plan.host_nbytes}


def _check_bits(losses: dict[tuple[str, float], list[float]]) -> None:
    """Check that offload changes no bits, if the first system repeats its own: attention may add in any order."""
    if losses.get((AGAIN, 0.0)) != losses.get(("fp32", 0.0)):
        return
    wrong = [each for each in losses if each[0] in _FORMATS and losses[each] != losses.get((each[0], 0.0))]
    assert not wrong, f"losses differ from those with all states on the GPU: {wrong}"


def _bandwidths(report: Report) -> None:
    """Report the bandwidth of copies from the library's pinned memory, to it, and both ways at once."""
    device, nbytes = report.device, 1 << 20 if report.dry else NBYTES
    there = [_host_memory(nbytes, device) for _ in range(2)]
    here = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    up, down = partial(_copy, here[0], there[0]), partial(_copy, there[1], here[1])
    ways: dict[str, Callable[[], object]] = {
        "up": up,
        "down": down,
        "both at once": partial(_at_once, device, up, down),
    }
    for direction, call in ways.items():
        found = milliseconds(call, device, 2 if report.dry else 20)
        report(system=f"copies {direction}", nbytes=nbytes, gbps=round(nbytes / found["ms_p50"] / 1e6, 2), **found)


def _host_memory(nbytes: int, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.zeros(nbytes, dtype=torch.uint8)
    return HostStates(device).zeros(nbytes, torch.uint8)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _at_once(device: torch.device, *calls: Callable[[], object]) -> None:
    """Run calls on streams of their own, and order the current stream after them."""
    if device.type == "cpu":
        for call in calls:
            call()
        return
    current = torch.cuda.current_stream(device)
    streams = [torch.cuda.Stream(device) for _ in calls]  # type: ignore[no-untyped-call]
    for stream, call in zip(streams, calls, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            call()
    for stream in streams:
        current.wait_stream(stream)
