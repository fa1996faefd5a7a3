"""A simulated link. Each fake collective is one kernel, which fills its target and waits for its turn.

In a collective, a rank sends and receives at the same time. So all collectives of a rank, gathers and reductions, share
one link. Each collective has the link alone for `bytes / bandwidth` plus a latency. A collective that begins while
another one has the link waits for its turn, also if the two are on different streams:

    stream of gathers      [ fills, has the link ]
    stream of reductions        [ fills, waits   ][ has the link ]

The moment at which the link is free lies in the memory of the GPU, in nanoseconds of the GPU's clock. Each kernel moves
this moment forward by its own time, and ends at that moment. So collectives have the link in the order in which their
kernels begin, and a CUDA graph of collectives shares the link like launched ones. The host only launches.

Bandwidth and latency are those that `shardlite plan` assumes for a DGX H100; `CLUSTER.source` is their source. The
target is filled with this rank's part, so that numbers are finite and memory is written. Losses are meaningless. The
simulation does not include the use of multiprocessors by NCCL's kernels, the time spent waiting for other ranks, or the
time of all-reduces (of norms and flags).

Legend: `W` ranks.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from shardlite_kernels.launch import constexpr, jit, launch, tl, use_triton
from torch import Tensor

from bench.gpu.report import synchronize
from shardlite.plan import CLUSTERS

CLUSTER = CLUSTERS["dgx-h100"]
BANDWIDTH = 1 / CLUSTER.inside.beta
"""Bytes per second in each direction."""

_PROGRAMS = 32
_TILE = constexpr(4096)


@jit
def _now() -> tl.tensor:
    """Return the time in nanoseconds by a clock that all multiprocessors share."""
    return tl.extra.cuda.globaltimer()


@partial(jit, unspecialized=("out", "own", "numel", "ns", "n"))
def _collective_kernel(
    link: tl.tensor,
    out: tl.tensor,
    own: tl.tensor,
    numel: tl.tensor,
    ns: tl.tensor,
    n: tl.tensor,
    ROWS: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy `own` [numel] to each row of `out` [ROWS, numel], and occupy the link for `ns`. Both are addresses.

    `link` [2] is the moment at which the link is free, and 1, or 0 if collectives take no time. `n` programs copy. Two
    atomic operations suffice: between them, other kernels can only move the moment forward.
    """
    program = tl.program_id(0).to(tl.int64)
    until = program * 0
    if program == 0:
        spent = ns * tl.load(link + 1)
        tl.atomic_max(link, _now())
        until = tl.atomic_add(link, spent) + spent
    source, target = own.to(tl.pointer_type(ELEMENT)), out.to(tl.pointer_type(ELEMENT))
    start = program * _TILE
    while start < numel:
        places = start + tl.arange(0, _TILE)
        mask = places < numel
        part = tl.load(source + places, mask=mask)
        for row in range(ROWS):
            tl.store(target + row * numel.to(tl.int64) + places, part, mask=mask)
        start += n * _TILE
    now = until * 0
    while now < until:
        now = _now()


class FakeLink:
    """A function that replaces every collective. It launches one kernel on the current stream, as NCCL would."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size = world_size
        self.device = device
        self.seconds = 0.0
        """Seconds for which all collectives so far have the link."""

        self.host_seconds = 0.0
        """Seconds that the host has spent in this function so far."""

        self.fills = True
        """Whether collectives fill their targets."""

        self._link = torch.tensor([0, 1], device=device)

    def __call__(self, method: str, target: Tensor, source: Tensor, *rest: Any) -> None:
        """Fill `target` [n] and occupy the link. `method` is that of a process group, with its arguments."""
        begin = time.perf_counter()
        nbytes = max(target.nbytes, source.nbytes)
        if method == "alltoall_base" and rest[0]:  # bytes from and to each rank, of which this one is rank 0
            nbytes = max(sum(splits[1:]) for splits in rest[:2])
        else:
            nbytes -= nbytes // self.world_size
        seconds = nbytes / BANDWIDTH + CLUSTER.base
        self.seconds += seconds
        self._launch(target, source, round(1e9 * seconds))
        self.host_seconds += time.perf_counter() - begin

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Within the block, collectives take no time on the link, also those of a CUDA graph."""
        synchronize(self.device)
        self._link[1] = 0
        try:
            yield
        finally:
            synchronize(self.device)
            self._link[1] = 1

    def _launch(self, target: Tensor, source: Tensor, ns: int) -> None:
        """Copy this rank's part to every rank's part of the target, or its beginning if the target is one part."""
        rows = self.world_size if target.nbytes == self.world_size * source.nbytes else 1
        nbytes = min(source.nbytes, target.nbytes // rows) if self.fills else 0
        if not use_triton(self._link):
            with torch.no_grad():
                own = source.detach().view(-1).view(torch.uint8)[:nbytes]
                target.detach().view(-1).view(torch.uint8)[: rows * nbytes].view(rows, -1).copy_(own.expand(rows, -1))
            return
        out, own = target.data_ptr(), source.data_ptr()
        width = next(width for width in (8, 4, 2, 1) if not (out | own | nbytes) % width)
        element = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[width]
        numel = nbytes // width
        launch(*(_collective_kernel, self._link, out, own, numel, ns), n=_PROGRAMS, block=1, ROWS=rows, ELEMENT=element)
