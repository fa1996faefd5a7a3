"""Probes of every kernel: whether its results have the promised bits, and which bandwidth it reaches.

Legend: `S` elements, `W` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain, count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from shardlite_kernels import device_ring
from shardlite_kernels.device_ring import ring_reduce_scatter, ring_reduce_scatter_reference
from shardlite_kernels.signals import Peers, flag_numel, ring_failure, slots_nbytes
from torch import Tensor

from bench.gpu.report import Report, milliseconds, synchronize
from bench.kernels.chain import chains
from bench.kernels.clock import Clock, DeviceClock, HostClock, Work, bandwidth_run, same_bits, verify
from bench.kernels.peers import raw_fused
from bench.kernels.work import works
from shardlite.comm import collectives
from shardlite.comm.transport.group_collectives import NcclCollectives, WholeCollectives
from shardlite.comm.transport.two_level import TwoLevelCollectives
from shardlite.lab.compared.workloads import LLAMA_BLOCK_NUMEL
from shardlite.lab.fake.fake_group import fake_group
from shardlite.lab.timer import percentile

RANKS = 4
"""Number of virtual ranks of the ring kernel, each on its own stream."""

_ROUNDS = 8
_WARM_UP = 2

_LONG = (
    ("adamw", "fp32 weights, fp32 moments, fp32 gradient"),
    ("adamw", "split24 weights, fp32 moments, fp32 gradient"),
    ("adamw", "split24 weights, int8 moments, fp32 gradient"),
    ("cast", "fp32 to bf16"),
    ("quantize", "fp32 to 8 bits"),
    ("dequantize", "8 bits to bf16"),
    ("hop", "fp32"),
    ("hop with statistics", "fp32"),
    ("reduce_adamw", "fp32 weights, fp32 moments, fp32 gradient"),
    ("hop, adamw", "fp32 weights, fp32 moments, fp32 gradient"),
)
"""Kernels that are timed on 2^27 elements."""

_ROWS = (
    ("add 8 rows in ring order", "fp32 to fp32"),
    ("add 8 rows and adamw", "fp32 weights, fp32 moments, fp32 gradient"),
    ("add 8 rows and adamw", "split24 weights, int8 moments, fp32 gradient"),
)
"""Kernels that are timed on the segment that each of 8 ranks has of a Llama-8B block."""


def bits(report: Report) -> None:
    """Compare the results of each kernel with those of its reference."""
    for work in [raw_fused(), *works(report.device)]:
        with report.guarded(kernel=work.operation, format=work.format):
            verdict = verify(work, report.device)
            report(
                kernel=work.operation,
                format=work.format,
                contract=verdict.contract,
                relative_error=verdict.error,
                tolerance_used=verdict.tolerance_used,
            )
    for dtype in (torch.float32, torch.bfloat16):
        name = f"{RANKS} virtual ranks, {str(dtype).removeprefix('torch.')}"
        with report.guarded(kernel="ring reduce-scatter", format=name):
            if report.dry:
                report(kernel="ring reduce-scatter", format=name, note="needs a GPU or Triton's interpreter")
            else:
                report(kernel="ring reduce-scatter", format=name, **ring_on_streams(report.device, dtype))


def ring_on_streams(device: torch.device, dtype: torch.dtype, numel: int = 1 << 20) -> dict[str, Any]:
    """Run the ring kernel of `RANKS` virtual ranks concurrently, on streams of one GPU, and compare each result [S].

    Raises:
        AssertionError: If a rank fails, or if the bits of its result differ from the reference.
    """
    programs = 8  # few, because the programs of all ranks must be resident at the same time
    fulls = [torch.randn(RANKS * numel, device=device).to(dtype) for _ in range(RANKS)]
    outs = [torch.empty(numel, device=device) for _ in range(RANKS)]
    slots = [torch.empty(slots_nbytes(programs), dtype=torch.uint8, device=device) for _ in range(RANKS)]
    flags = [torch.zeros(flag_numel(programs), dtype=torch.int64, device=device) for _ in range(RANKS)]
    peers = [
        Peers(
            rank=rank,
            world_size=RANKS,
            slots=_addresses(slots),
            flags=_addresses(flags),
            error=torch.zeros(1, dtype=torch.int64, device=device),
            programs=programs,
        )
        for rank in range(RANKS)
    ]
    not_cooperative = mock.patch.object(device_ring, "_ring_reduce_scatter_kernel", _NotCooperative())
    streams = [torch.cuda.Stream() if device.type == "cuda" else None for _ in range(RANKS)]  # type: ignore[no-untyped-call]
    synchronize(device)

    def reduce(epoch: int) -> None:
        for rank, stream in enumerate(streams):
            with not_cooperative, nullcontext() if stream is None else torch.cuda.stream(stream):
                ring_reduce_scatter(outs[rank], fulls[rank], peers[rank], epoch=epoch, divisor=3)

    epochs = count(1)
    for epoch in (next(epochs), next(epochs)):
        reduce(epoch)
        synchronize(device)
    for rank, (out, each) in enumerate(zip(outs, peers, strict=True)):
        assert (failure := ring_failure(each.error)) is None, f"rank {rank}: {failure}"
        expected = torch.empty_like(out)
        ring_reduce_scatter_reference(expected, fulls, rank, divisor=3)
        assert same_bits(out, expected), f"rank {rank}: {int((out != expected).sum())} of {numel} sums are wrong"

    def reduce_and_wait() -> None:
        reduce(next(epochs))
        synchronize(device)

    return {"contract": "bits", "ranks": RANKS, **milliseconds(reduce_and_wait, device, _ROUNDS)}


class _NotCooperative:
    """The ring kernel with ordinary launches, because a GPU runs cooperative launches one after the other.

    Even without a cooperative launch, all programs are resident at the same time, because there are few of them.
    """

    def __init__(self) -> None:
        self._kernel = device_ring._ring_reduce_scatter_kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return a function that launches this grid."""

        def launch(*arguments: Any, launch_cooperative_grid: bool = False, **options: Any) -> object:
            del launch_cooperative_grid
            return self._kernel[grid](*arguments, **options)

        return launch


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor([each.data_ptr() for each in tensors], dtype=torch.int64, device=tensors[0].device)


def bandwidth(report: Report) -> None:
    """Time kernels and a copy, at sizes that occur in training. The cache of the GPU is emptied before each run."""
    device, dry = report.device, report.dry
    clock: Clock = HostClock() if dry else DeviceClock(device)
    copy = bandwidth_run(1 << 16 if dry else 1 << 31, device)
    ms = _timed(clock, copy.step)
    ceiling = copy.moved / ms["ms_p50"] / 1e6
    report(kernel="copy", numel=copy.moved // 8, gbps=round(ceiling, 1), **ms)
    known = {(work.operation, work.format): work for work in works(device)}
    torch_fused, ours_chain, theirs_chain = raw_fused(), next(iter(chains())), [*chains()][-2]
    segment = LLAMA_BLOCK_NUMEL // 8
    plan: list[tuple[Work, int]] = [
        (torch_fused, 1 << 27),
        *((known[key], 1 << 27) for key in _LONG),
        *((known[key], segment) for key in _ROWS),
        *((each, 1 << 27) for each in (ours_chain, theirs_chain)),
    ]
    for work, numel in plan:
        names = {"kernel": work.operation, "format": work.format, "system": work.system}
        with report.guarded(**names):
            numel = 3200 if dry else numel
            run = work.make(numel, device)
            ms = _timed(clock, run.step)
            gbps = run.moved / ms["ms_p50"] / 1e6
            report(**names, numel=numel, gbps=round(gbps, 1), share_of_copy=round(gbps / ceiling, 3), **ms)
    with report.guarded(kernel="slices of a reduction"):
        _slices(report)
    with report.guarded(kernel="slices of two levels"):
        _two_levels(report)


def _timed(clock: Clock, step: Any) -> dict[str, float]:
    samples = [clock.sample(step) for _ in range(_WARM_UP + _ROUNDS)][_WARM_UP:]
    walls, cpus = zip(*samples, strict=True)
    found = {f"ms_p{percent}": round(1e3 * percentile(walls, percent), 4) for percent in (20, 50, 80)}
    return found | {"launch_ms_p50": round(1e3 * percentile(cpus, 50), 4)}


def _slices(report: Report) -> None:
    """Time the exact reduction of a Llama-8B block without its messages: the cost of slices on host and GPU."""
    for world_size in (8,) if report.dry else (8, 64, 512):
        _slices_at(world_size, report)


def _slices_at(world_size: int, report: Report) -> None:
    with fake_group(world_size, lambda *_: None) as group:
        _reduction("slices of a reduction", NcclCollectives(group), report)


def _reduction(kernel: str, transport: WholeCollectives, report: Report) -> None:
    """Time the reduction of a Llama-8B block in fp32 over a transport of a fake group."""
    ranks, numel = transport.world_size, LLAMA_BLOCK_NUMEL
    segment = 1024 if report.dry else -(-numel // ranks // 1024) * 1024
    full = torch.zeros(ranks * segment, device=report.device)
    out = torch.empty(segment, device=report.device)
    needed = collectives.staging_numel(len(full), transport, torch.float32, grain=1024)
    staging = torch.zeros(needed, device=report.device)

    def reduce() -> None:
        collectives.reduce_scatter(full, transport, last=collectives.StoreMean(out, ranks), staging=staging)

    reduce()
    found = milliseconds(reduce, report.device, _ROUNDS)
    report(kernel=kernel, format="fp32", ranks=ranks, numel=len(full), **found)


class _Level(NcclCollectives):
    """Collectives of the first ranks of a fake group, as rank 0."""

    def __init__(self, group: dist.ProcessGroup, ranks: int) -> None:
        super().__init__(group)
        self.world_size = ranks


def _two_levels(report: Report) -> None:
    """Time the reduction of `_slices` with `TwoLevelCollectives`, on nodes of eight ranks."""
    for world_size in (16,) if report.dry else (64, 512):
        _two_levels_at(world_size, 8, report)


def _two_levels_at(world_size: int, node: int, report: Report) -> None:
    with fake_group(world_size, lambda *_: None) as group:
        levels = (_Level(group, ranks) for ranks in (world_size, node, world_size // node))
        _reduction("slices of two levels", TwoLevelCollectives(*levels), report)


def all_works(device: torch.device) -> list[Work]:
    """Return all works (kernels with inputs) that these probes launch, so that `warm_up` can compile them."""
    return [*chain([raw_fused()], works(device), chains())]
