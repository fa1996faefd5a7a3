"""Collectives of gloo or NCCL and of ShardLite, each with a check of its result.

A `Case` is one collective of one system on its own buffers, which are filled before each call. Buffers of gloo and NCCL
are ordinary tensors. ShardLite's buffers are allocated by the transport, as in the library.

Legend: `W` ranks, `r` this rank, `n` elements in the full buffer, a multiple of `W`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardlite.comm import collectives
from shardlite.comm import operation as names
from shardlite.comm.schedule import IN_RING_ORDER, Algorithm
from shardlite.comm.traffic import Tally
from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.select import connect
from shardlite.config import Route, TransportName
from shardlite.lab.compared.check import UNIT_ROUNDOFF, ResultError

Operation = Literal["all-gather", "reduce-scatter", "all-reduce"]

OPERATIONS: tuple[Operation, ...] = ("all-gather", "reduce-scatter", "all-reduce")

Peer = Literal["gloo", "nccl"]

GLOO: Peer = "gloo"
NCCL: Peer = "nccl"
"""The peers of ShardLite: gloo on CPUs, NCCL on GPUs."""

_CPU = torch.device("cpu")
_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class System:
    """A transport of ShardLite with an algorithm, or a peer (gloo or NCCL)."""

    transport: TransportName | Peer
    algorithm: Algorithm | Literal[""] = ""

    @property
    def is_ours(self) -> bool:
        """Whether the system is a transport of ShardLite."""
        return self.transport not in (GLOO, NCCL)

    @property
    def route(self) -> Route:
        """The route of a system of ShardLite."""
        assert self.is_ours, "a peer has none"
        if self.transport == "collectives":  # the process group chooses the schedule
            return Route(transport=self.transport)
        return Route(transport=self.transport, algorithm=self.algorithm)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.transport, self.algorithm)))


@dataclass(frozen=True)
class Case:
    """A collective and its buffers."""

    system: System
    operation: Operation
    group: dist.ProcessGroup
    brought: Sequence[Tensor]
    """Each rank's input of a reduction, [n]. Segment `k` of rank `k`'s input is also rank `k`'s input of a gather."""

    full: Tensor
    """Buffer [n] to reduce or to fill."""

    shard: Tensor
    """Input of a peer's gather and output of a reduce-scatter, [n/W]."""

    call: Callable[[], object]
    tally: Tally | None
    """Counter of the messages of the first call; only for ShardLite."""

    def fill(self) -> None:
        """Write this rank's input, and fill the outputs with NaN."""
        world_size, rank = self.group.size(), self.group.rank()
        if self.operation == "all-gather":
            segment = self.brought[rank].view(world_size, -1)[rank]
            self.full.fill_(float("nan"))
            self.shard.copy_(segment)
            if self.system.is_ours:
                self.full.view(world_size, -1)[rank].copy_(segment)
        else:
            self.full.copy_(self.brought[rank])
            self.shard.fill_(float("nan"))

    def verify(self) -> None:
        """Call the collective once, and compare its result with the sum in ring order.

        Bits must be equal if the system adds in ring order.

        Raises:
            ResultError: If the result is wrong on any rank. Raised on every rank.
        """
        self.fill()
        self.call()
        wrong = self._difference(self.shard if self.operation == "reduce-scatter" else self.full)
        anywhere = torch.tensor(float(bool(wrong)))
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.group)
        if anywhere.item():
            raise ResultError(
                f"{self.operation} of {self.full.nbytes} bytes by {self.system} on rank {self.group.rank()}: "
                f"{wrong or 'right here, but wrong on another rank'}"
            )

    def _difference(self, got: Tensor) -> str:
        """Return a description of the error of a result, or an empty string."""
        world_size = self.group.size()
        rows = [each.view(world_size, -1) for each in self.brought]
        if self.operation == "all-gather":
            gathered = torch.cat([rows[k][k] for k in range(world_size)])
            return "" if got.equal(gathered) else "the gathered segments are not those of the ranks"
        owners = range(world_size) if self.operation == "all-reduce" else [self.group.rank()]
        if self.system.algorithm in IN_RING_ORDER:
            ordered = [[rows[(k + 1 + i) % world_size][k] for i in range(world_size)] for k in owners]
            sums = torch.cat([reduce(torch.add, addends) for addends in ordered])
            return "" if got.equal(sums) else "the sum differs in bits from one in the order of the ring"
        addends = [torch.cat([row[k] for k in owners]).double() for row in rows]
        exact, magnitude = reduce(torch.add, addends), reduce(torch.add, [each.abs() for each in addends])
        # W-1 additions in any order (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2).
        bound = 1.01 * (world_size - 1) * UNIT_ROUNDOFF * magnitude
        near = bool(((got.double() - exact).abs() <= bound).all())
        return "" if near else "the sum is not within the bound of its rounding"


def cases(systems: Sequence[System], numel: int, group: dist.ProcessGroup, device: torch.device = _CPU) -> list[Case]:
    """Return all collectives of all systems for buffers of `numel` elements. The cases of a system share buffers."""
    brought = [torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(device) for r in range(group.size())]
    made = []
    for system in systems:
        shard = torch.empty(numel // group.size(), device=device)
        if not system.is_ours:
            full = torch.empty(numel, device=device)
            for operation in OPERATIONS:
                call = _of_peer(operation, full, shard, group)
                made.append(Case(system, operation, group, brought, full, shard, call, None))
            continue
        transport = connect(group, device, _TIMEOUT, route=system.route)
        full = transport.empty(4 * numel, device).view(torch.float32)
        staging = full.new_empty(collectives.staging_numel(numel, transport, full.dtype))
        for operation in OPERATIONS:
            tally = Tally()
            call = _of_ours(operation, full, shard, staging, transport, tally)
            made.append(Case(system, operation, group, brought, full, shard, call, tally))
    return made


def _of_peer(operation: Operation, full: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name issues a warning
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    match operation:
        case "all-gather":
            return lambda: gather(full, shard, group=group)
        case "reduce-scatter":
            return lambda: scatter(shard, full, group=group)
        case "all-reduce":
            return lambda: dist.all_reduce(full, group=group)


def _of_ours(
    operation: Operation, full: Tensor, shard: Tensor, staging: Tensor, transport: Transport, tally: Tally
) -> Callable[[], object]:
    """Return a function that calls a collective. Only its first call counts messages, because counting takes time."""
    first = iter([names.Operation(tally=tally)])

    def name() -> names.Operation:
        return next(first, names.UNNAMED)

    match operation:
        case "all-gather":
            return lambda: collectives.all_gather(full, transport, operation=name())
        case "reduce-scatter":
            return lambda: collectives.reduce_scatter(
                full, transport, last=collectives.StoreMean(shard), staging=staging, operation=name()
            )
        case "all-reduce":
            return lambda: collectives.all_reduce(full, transport, staging=staging, operation=name())
