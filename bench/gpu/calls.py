"""Measure the price of each call of the host that `bench.gpu_path` counts, and compare counts x prices with real steps.

A price is the host's time per call, without a wait for the GPU. *predicted* is what a system adds to the plain model,
per block and step: the counts of `bench/results/host-gpu-path.jsonl` times prices, without collectives. *measured* is
the difference of the CPU times of real steps, in which collectives do nothing. Only predictions that agree with the
measured time may be quoted.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from shardlite_kernels.launch import launch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bench import gpu_path
from bench.gpu.fake_ranks import RANKS
from bench.gpu.report import Report, Times, free, synchronize, take_turn
from shardlite import NonFiniteWarning
from shardlite.comm import streams
from shardlite.comm.transport import group_collectives
from shardlite.lab.fake.fake_group import as_one_rank, fake_group, launching_queue
from shardlite.lab.fake.simulated_cuda import Cuda
from shardlite.lab.ranks import only_rank
from shardlite.lab.table import RESULTS, read_rows
from shardlite.lab.timer import percentile

AGREE = 0.15
"""Maximum difference between a prediction and the measured time, as a fraction of that time."""

_BATCH, _BATCHES = 400, 5
_LAYERS = (4, 12)
_WARM_UP, _ROUNDS = 3, 9
_SYSTEMS = ("floor", "fsdp2", "exact")

Call = Callable[[], object]


def calls(report: Report) -> None:
    """Report the price of each call, and for each block and system the predicted and the measured time."""
    prices: dict[str, float] = {}
    for part, source in {"PyTorch": _of_pytorch, "autograd": _of_autograd, "Triton": _of_kernels}.items():
        with report.guarded(call=part):
            for name, us in source(report).items():
                prices[name] = us
                report(call=name, us=round(us, 2))
    with report.guarded(call="collectives"), only_rank(report.device) as group:
        for name, call in _collectives(group, report.device).items():
            with report.guarded(call=name):
                report(call=name, us=round(_us(call, report), 2))
    counts = {(row["block"], row["system"]): row for row in read_rows([RESULTS / "host-gpu-path.jsonl"])}
    for block in gpu_path.BLOCKS:
        floor: float | None = None
        for system in _SYSTEMS:
            with report.guarded(call=f"{block}, {system}"):
                measured = _measured(block, system, report)
                if system == "floor":
                    floor = measured
                elif floor is not None:
                    found = beside(added(counts[block, system], counts[block, "floor"], prices), measured - floor)
                    report(call=f"{block}, {system}, above the plain model", **found)


def added(system: Mapping[str, Any], floor: Mapping[str, Any], prices: Mapping[str, float]) -> float:
    """Return the microseconds that a system adds to the plain model: counts x prices."""
    return sum((system.get(key, 0) - floor.get(key, 0)) * us for key, us in prices.items())


def beside(predicted: float, measured: float) -> dict[str, Any]:
    """Return a row of both times in microseconds, and whether they agree."""
    agree = abs(predicted - measured) <= AGREE * abs(measured)
    return {"us": round(predicted, 1), "measured_us": round(measured, 1), "agree": agree}


def _us(call: Call, report: Report) -> float:
    """Return the median of the host's time per call."""
    batch, spent = 2 if report.dry else _BATCH, []
    call()
    for _ in range(_BATCHES):
        synchronize(report.device)  # an empty queue, so that no launch waits for the GPU
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        spent.append(1e6 * (time.perf_counter() - begin) / batch)
    return percentile(spent, 50)


class _Typical:
    """A method of typical length."""

    def __init__(self) -> None:
        self.first, self.second = 1, 2

    def method(self, other: object) -> bool:
        """Read two attributes, and compare."""
        return isinstance(other, int) and self.first < self.second


def _of_pytorch(report: Report) -> dict[str, float]:
    """Return prices of Python, streams and events, operators and assignments of memory."""
    device = report.device
    x, wide, others = torch.zeros(1, device=device), torch.zeros(64, 64, device=device), nn.Parameter(torch.zeros(1))
    many = [torch.zeros(64, device=device) for _ in range(24)]
    typical = _Typical()
    with Cuda().in_place() if report.dry else nullcontext():
        stream, event, current = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.current_stream()
        event.record()
        timed: dict[str, Call] = {
            "all calls": lambda: typical.method(1),
            "events recorded": event.record,
            "events waited for": lambda: current.wait_event(event),
            "stream contexts": lambda: _enter(torch.cuda.stream(stream)),
            "device contexts": lambda: _enter(torch.cuda.device(device)),
            "current stream": torch.cuda.current_stream,
            "launches": x.zero_,
            "a strided copy": lambda: wide[:, :32].copy_(wide[:, 32:]),
            "_foreach_copy_ of 12": lambda: torch._foreach_copy_(many[:12], many[12:]),
            "views": lambda: x.as_strided((1,), (1,)),
            "set_data": lambda: torch._C.TensorBase.data.__set__(others, others.detach()),
        }
        prices = {name: _us(call, report) for name, call in timed.items()}
        prices["events created"] = _us(lambda: torch.cuda.Event().record(), report) - prices["events recorded"]
    return prices


def _enter(context: Any) -> None:
    with context:
        pass


def _of_autograd(report: Report) -> dict[str, float]:
    """Return prices of hooks, as differences to the same call without a hook. The hooks do nothing."""
    x, module = torch.zeros(1, device=report.device, requires_grad=True), nn.Identity()

    def forward() -> Tensor:
        return x.exp()

    def step() -> None:
        forward().backward()

    def hooked(call: Call) -> None:
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            call()

    def unhooked(call: Call) -> None:
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            pass
        call()

    forwards, steps = (
        _us(partial(hooked, call), report) - _us(partial(unhooked, call), report) for call in (forward, step)
    )
    plain, outer = _us(step, report), _us(lambda: module(x), report)
    x.register_post_accumulate_grad_hook(lambda _: None)
    module.register_forward_pre_hook(lambda *_: None)
    return {
        "packed": forwards,
        "unpacked": steps - forwards,
        "gradient hooks": _us(step, report) - plain,
        "inner hooks": _us(lambda: module(x), report) - outer,
    }


def _of_kernels(report: Report) -> dict[str, float]:
    """Return prices of launches of Triton, with the arguments of a step. A dry run has none."""
    if report.dry:
        return {}
    prices = {}
    for name, (arguments, options) in gpu_path.launched(report.device).items():
        prices[f"triton {name}"] = _us(partial(launch, *arguments, **options), report)
    return prices


def _collectives(group: dist.ProcessGroup, device: torch.device) -> dict[str, Call]:
    """Return calls of the collectives of one rank, as the library makes them."""
    out, x = torch.zeros(1024, device=device), torch.zeros(1024, device=device)
    return {
        "collective all-gather": lambda: group._allgather_base(out, x, group_collectives._GATHER),
        "collective reduce-scatter": lambda: group._reduce_scatter_base(out, x, group_collectives._SUM_SCATTERED),
        "collective all-to-all": lambda: group.alltoall_base(out, x, [], [], group_collectives._EXCHANGE),
        "collective all-to-all of lists": lambda: group.alltoall([out], [x], group_collectives._EXCHANGE),
    }


@contextmanager
def _fake(block: str, device: torch.device, fills: list[bool]) -> Iterator[dist.ProcessGroup]:
    """Be rank 0 of `RANKS` with collectives that do nothing. While `fills` is not empty, they write zeros."""

    def exchange(_: str, target: Tensor, *__: Any) -> None:
        if fills:
            with torch.no_grad():
                target.zero_()

    make_queue: Callable[..., object] = streams.make_queue if device.type == "cuda" else launching_queue
    with ExitStack() as stack:
        group = stack.enter_context(fake_group(RANKS, exchange))
        stack.enter_context(as_one_rank(partial(gpu_path.connect, gpu_path.SLICES[block]), make_queue))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", NonFiniteWarning)  # of numbers in memory that nothing has written
        yield group


def _measured(block: str, system: str, report: Report) -> float:
    """Return the microseconds of CPU time per block and step of a system: the difference of two models."""
    few, many = (1, 2) if report.dry else _LAYERS
    spent: dict[int, float] = {}
    for layers in (few, many):
        workload, fills = gpu_path.BLOCKS[block](layers).on(report.device), [True]
        with _fake(block, report.device, fills) as group:
            trainer = replace(gpu_path.BUILDS[system](workload, group), max_norm=1.0)
            step = partial(trainer.step, workload.batch(0, 0))
            for _ in range(_WARM_UP):
                step()
            fills.clear()
            times = Times()
            for _ in range(1 if report.dry else _ROUNDS):
                take_turn(step, report.device, 1, times)
            spent[layers] = percentile(times.works, 50)
            del trainer, step
        free()
    return 1e3 * (spent[many] - spent[few]) / (many - few)
