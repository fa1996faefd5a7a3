"""What all units of one wrapped model share: the ranks, the device, and the books."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import count
from math import prod

import torch
from torch import Tensor

from shardlite.comm.collectives import Operation, all_reduce
from shardlite.comm.consensus import identify
from shardlite.comm.control.failure_reports import FailureReports, ReportBoard, StoreReports
from shardlite.comm.control.interrupts import defer_interrupts
from shardlite.comm.control.process import Owner
from shardlite.comm.control.progress import Progress
from shardlite.comm.control.uncaught import tell_of_the_end
from shardlite.comm.streams import StreamQueue, make_queue
from shardlite.comm.traffic import Traffic
from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.groups import Ranks
from shardlite.comm.transport.select import connect, connect_hosts
from shardlite.config import Route
from shardlite.telemetry import Held, Ledger, Trace

SPARE = 32 << 20
"""Bytes of free shared memory that may keep their pages at the end of a backward, for the next step.

To have pages back takes about 1 ms per MiB on a CPU (measured with two ranks on two cores).
"""


@dataclass
class WeightVersion:
    """How often all weights of a model were changed: by a step of an optimizer, mostly, or by a load."""

    number: int = 0


@dataclass(frozen=True)
class Context:
    """The ranks, the device and the books of one wrapped model."""

    instance: int
    """A number that tells wrapped models apart, the same on every rank."""

    transport: Transport
    """To the ranks over which the model is sharded."""

    replicas: Transport | None
    """To the ranks that hold the same shards, if there are any (hybrid sharding)."""

    reducing: tuple[Transport, Transport | None]
    """Both again for reductions, which run in no fixed order beside gathers: over NCCL each needs connections of its
    own, for it knows no tags."""

    hosts: tuple[Transport, Transport | None]
    """Both once more, for what hosts tell each other: CPU tensors."""

    device: torch.device
    timeout: timedelta
    """How long a rank waits for a message."""

    version: WeightVersion
    board: ReportBoard
    waits: ReportBoard | None
    """Where ranks say what they wait in; `None` where that does not tell whether they will go on: what a GPU does the
    host does not see, and replicas have operations that not all ranks are in."""

    standings: ReportBoard
    """Where ranks say how far they are in a backward."""

    trace: Trace
    ledger: Ledger
    traffic: Traffic
    owner: Owner = field(default_factory=Owner)
    _flags: Iterator[int] = field(default_factory=count)
    _exchanges: Iterator[int] = field(default_factory=count)

    def operation(self, what: str, sequence: int = 0, *, at_any_step: bool = False, during: str = "") -> Operation:
        """Name an operation of this model at its step, and say `during` what it happens.

        So no two models hear each other's messages, nor do ranks of which one has left a step out: unless they are to
        meet `at_any_step`, to be told so.

        Raises:
            CommError: this is a forked child, which cannot take part.
        """
        self.owner.check()
        when = "" if at_any_step else f" at step {self.version.number}"
        return Operation(f"{what} of model {self.instance}{when}", sequence, self.reports, during)

    @property
    def transports(self) -> list[Transport]:
        """All: what goes over one after the other reaches every rank."""
        return [self.transport] if self.replicas is None else [self.transport, self.replicas]

    def counted(self, purpose: str) -> list[Transport]:
        """Return them, with what is sent for a purpose of the whole model counted."""
        return [self.traffic.counted(transport, purpose) for transport in self.transports]

    def count_up(self, numbers: Tensor, purpose: str, operation: Operation) -> None:
        """Add numbers of the hosts [n], on the CPU, up over all ranks, replicas included, in place."""
        for transport in self.hosts:
            if transport is not None:
                all_reduce(numbers, self.traffic.counted(transport, purpose), operation=operation)

    def add_up(self, numbers: Tensor, purpose: str, operation: Operation) -> None:
        """Add [n] up over all ranks, replicas included, in place."""
        for transport in self.counted(purpose):
            all_reduce(numbers, transport, operation=operation)

    def on_any_rank(self, flag: Tensor) -> Tensor:
        """Return whether a flag, [], is more than 0 on any rank, as 0 or 1. To be called by every rank."""
        ranks = flag.reshape(1).clone()
        self.add_up(ranks, "flags", self.operation("a flag of any rank", next(self._flags)))
        return (ranks[0] > 0).to(flag.dtype)

    def exchange(self, number: int, what: str) -> list[int]:
        """Return the numbers of all ranks, each of which calls this: `what` it is for is named where one does not."""
        ranks = torch.zeros(self.world_size, dtype=torch.int64)
        ranks[self.rank] = number
        self.count_up(ranks, what, self.operation(what, next(self._exchanges)))
        return ranks.tolist()

    @cached_property
    def reports(self) -> FailureReports:
        """What ranks leave for each other when something has failed."""
        transport = self.transport

        def is_gone(other: int) -> bool:
            """(With replicas ranks here are numbered differently from those of a transport.)"""
            return transport.world_size == self.world_size and transport.is_gone(other)

        reports = FailureReports(self.board, self.rank, self.world_size, waits=self.waits, is_gone=is_gone)
        tell_of_the_end(reports)
        defer_interrupts()
        return reports

    @cached_property
    def progress(self) -> Progress:
        """How far ranks are in a backward."""
        first = self.rank - self.transport.rank
        gathering = range(first, first + self.transport.world_size)
        ahead = not self.transport.blocking
        limit = self.timeout.total_seconds() / 2
        return Progress(self.standings, self.rank, self.world_size, gathering, ahead=ahead, limit=limit)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Leave a note about an exception, for other ranks that will wait for this one in vain."""
        self.reports.withdraw()
        defer_interrupts()  # a notebook sets Python's handler anew for each cell
        try:
            yield
        except Exception as error:
            self.reports.leave(f"its forward at step {self.version.number} ended in {type(error).__name__}: {error}")
            raise

    @property
    def world_size(self) -> int:
        """How many ranks there are, replicas included."""
        return prod(transport.world_size for transport in self.transports)

    @property
    def rank(self) -> int:
        """This rank among all of them."""
        replica = 0 if self.replicas is None else self.replicas.rank
        return replica * self.transport.world_size + self.transport.rank

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory [numel], uninitialised, for what goes to other ranks."""
        return self.transport.empty(numel * dtype.itemsize, self.device).view(dtype)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the same, zeroed."""
        return self.transport.zeros(numel * dtype.itemsize, self.device).view(dtype)

    def trim(self, *, keep: int | None = None) -> None:
        """Give memory back to the system that no unit has used for a step, or all that is free but `keep` bytes."""
        for transport in self.transports:
            transport.trim(keep=keep)

    def held(self) -> dict[str, Held]:
        """Return the bytes that this rank holds by purpose, those of messages included."""
        every = (self.transport, self.replicas, *self.reducing, *self.hosts)
        holders = {id(each.holder): each.holder for each in every if each is not None and each.holder is not None}
        total = self.ledger.held()
        for holder in holders.values():
            for purpose, held in holder.held().items():
                before = total.get(purpose, Held(0, 0))
                total[purpose] = Held(before.now + held.now, before.peak + held.peak)
        return total

    def queue(self, name: str) -> StreamQueue:
        """Return a new lane for operations that use these transports."""
        blocking = any(transport.blocking for transport in self.transports)
        return make_queue(name, self.device, blocking=blocking, watch=self.reports)


def share(groups: Ranks, device: torch.device, timeout: timedelta, route: Route) -> Context:
    """Connect this rank to all others that wrap the same model now. All of them call this.

    Raises:
        LayoutError: the route cannot be taken.
        CommError: a rank does not come.
    """
    model = identify(groups, timeout)
    transport, replicas = _connect(groups, device, timeout, route, apart=False)
    hosts = connect_hosts(groups.shard, timeout, route=route)
    other_hosts = None if groups.replicas is None else connect_hosts(groups.replicas, timeout, route=route)
    name = f"model {model.number} from rank {model.first}, {model.mark}"
    return Context(
        instance=model.number,
        transport=transport,
        replicas=replicas,
        reducing=_connect(groups, device, timeout, route, apart=True),
        hosts=(hosts, other_hosts),
        device=device,
        timeout=timeout,
        version=WeightVersion(),
        board=StoreReports(name),
        waits=StoreReports(f"{name}, waits") if device.type == "cpu" and replicas is None else None,
        standings=StoreReports(f"{name}, standings"),
        trace=Trace(),
        ledger=Ledger(),
        traffic=Traffic(device),
    )


def _connect(
    groups: Ranks, device: torch.device, timeout: timedelta, route: Route, *, apart: bool
) -> tuple[Transport, Transport | None]:
    """Connect this rank to those that it shares a model with, and to those that hold the same shards, if any.

    Connections that are made at the first message are made here, where all ranks come in the same order.
    """
    shard = connect(groups.shard, device, timeout, route=route, apart=apart)
    replicas = None if groups.replicas is None else connect(groups.replicas, device, timeout, route=route, apart=apart)
    for transport in (shard, replicas):
        if transport is not None and transport.batched:
            all_reduce(torch.zeros(transport.world_size, device=device), transport)
    return shard, replicas
