"""The context that all units of one wrapped model share: its ranks, device, reports and counters.

In: ranks, a device and a route. Out: connections, names of operations and queues. Knows nothing of units.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlite.comm.collectives import all_reduce
from shardlite.comm.consensus import Ranks, identify
from shardlite.comm.control.failure_reports import FailureReports, StoreReports
from shardlite.comm.control.interrupts import defer_interrupts, report_uncaught
from shardlite.comm.control.process import Owner
from shardlite.comm.control.progress import Progress
from shardlite.comm.operation import Operation
from shardlite.comm.streams import ProgramStreams, StreamQueue, check_connections, make_queue
from shardlite.comm.traffic import NO_UNIT, Traffic
from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.gloo import GlooTransport, member_group, reconnect
from shardlite.comm.transport.group_collectives import GlooCollectives, WholeCollectives
from shardlite.comm.transport.select import connect, connect_hosts
from shardlite.config import Route
from shardlite.telemetry import Held, Ledger, Trace

SPARE = 32 << 20
"""Bytes of free shared memory that may keep their pages at the end of a backward, for the next step.

Reallocating pages costs about 1 ms per MiB on a CPU (measured with two ranks on two cores).
"""

MANY = 16
"""Ranks from which on agreements of hosts are collectives: a message to each takes longer."""


@dataclass
class WeightVersion:
    """How often all weights of a model have changed: by optimizer steps, and by loads."""

    number: int = 0


@dataclass(frozen=True)
class Context:
    """Ranks, device, reports and counters of one wrapped model."""

    instance: int
    """A number that identifies the wrapped model, equal on every rank."""

    transport: Transport
    """To the ranks over which the model is sharded: for gathers."""

    replicas: Transport | None
    """To the ranks that hold the same shards, or `None` (hybrid sharding)."""

    reducing: tuple[Transport, Transport | None]
    """Both transports for reductions, which overlap with gathers in no fixed order. NCCL and whole collectives have no
    tags, so they need separate connections for them.
    """

    inline: tuple[Transport, Transport | None]
    """Both transports for operations that the program's thread runs itself, not on a queue. They are small
    or rare, so they do not go over symmetric memory.

    Over NCCL they are operations of the program's own communicator. That is safe where a gather would not be: a gather
    is started where a rank's forward needs it, at another place between the program's collectives on ranks that take
    other branches. An inline operation is part of a call (a norm, the end of a backward, a state dict) that a program
    must make at the same place on all ranks, as it must its own collectives; and it runs on the compute stream.
    """

    hosts: tuple[Transport, Transport | None]
    """Both transports for CPU tensors exchanged by the hosts."""

    rounds: GlooCollectives | None
    """For short agreements of the hosts that share the model, where they are `MANY` and exchange messages: a collective
    takes fewer. It has a connection of its own, because collectives have no tags.
    """

    device: torch.device
    timeout: timedelta
    """Maximum time that a rank waits for a message."""

    version: WeightVersion
    board: StoreReports
    waits: StoreReports | None
    """Where ranks report the operation they wait in. `None` where that does not show whether they will continue: the
    host does not see what a GPU waits for, and with replicas not all ranks are in every operation.
    """

    standings: StoreReports
    """Where ranks report their progress in a backward."""

    streams: ProgramStreams
    trace: Trace
    ledger: Ledger
    traffic: Traffic
    high_priority: bool = True
    """Whether queues of a GPU have streams of high priority."""

    owner: Owner = field(default_factory=Owner)
    _numbers: Counter[str] = field(default_factory=Counter)

    def operation(
        self, what: str, purpose: str, unit: str = NO_UNIT, *, at_any_step: bool = False, during: str = ""
    ) -> Operation:
        """Name an operation of this model at its current step.

        So models do not receive each other's messages, nor do ranks of which one has skipped a step. With
        `at_any_step`, ranks at different steps meet, which reveals the difference. Operations called `what` are
        numbered. Their traffic is counted by `unit` and `purpose`. `during` is a detail for error messages.

        Raises:
            CommError: this is a forked child, which cannot take part.
        """
        self.owner.check()
        when = "" if at_any_step else f" at step {self.version.number}"
        self._numbers[what] += 1
        label, tally = f"{what} of model {self.instance}{when}", self.traffic.tally(purpose, unit)
        return Operation(label, self._numbers[what], self.reports, during, tally)

    @property
    def transports(self) -> list[Transport]:
        """The `inline` transports, which together reach every rank when used one after the other."""
        return [each for each in self.inline if each is not None]

    def all_reduce_host(self, numbers: Tensor, operation: Operation) -> None:
        """Sum `numbers` [n] on the CPU over all ranks, replicas included, in place, through the host transports."""
        for transport in self.hosts:
            if transport is not None:
                all_reduce(numbers, transport, operation=operation)

    def all_reduce_numbers(self, numbers: Tensor, operation: Operation) -> None:
        """Sum `numbers` [n] over all ranks, replicas included, in place."""
        for transport in self.transports:
            all_reduce(numbers, transport, operation=operation)

    def on_any_rank(self, flag: Tensor) -> Tensor:
        """Return whether `flag` [] is above 0 on any rank, as 0 or 1. Collective: every rank must call it."""
        ranks = flag.reshape(1).clone()
        self.all_reduce_numbers(ranks, self.operation("a flag of any rank", "flags"))
        return (ranks[0] > 0).to(flag.dtype)

    def all_gather_int(self, number: int, what: str) -> list[int]:
        """Return the numbers of all ranks. Collective: errors name it by `what` if a rank does not call it."""
        ranks = torch.zeros(self.world_size, dtype=torch.int64)
        ranks[self.rank] = number
        self.all_reduce_host(ranks, self.operation(what, what))
        return ranks.tolist()

    @cached_property
    def reports(self) -> FailureReports:
        """Failure reports of the ranks."""
        transport = self.transport

        def is_gone(other: int) -> bool:
            """With replicas, ranks here are numbered differently from those of a transport."""
            return transport.world_size == self.world_size and transport.is_gone(other)

        reports = FailureReports(self.board, self.rank, self.world_size, waits=self.waits, is_gone=is_gone)
        report_uncaught(reports)
        defer_interrupts()
        return reports

    @cached_property
    def progress(self) -> Progress:
        """Progress of the ranks in a backward."""
        first = self.rank - self.transport.rank
        gathering = range(first, first + self.transport.world_size)
        ahead = not self.transport.blocking
        limit = self.timeout.total_seconds() / 2
        return Progress(self.standings, self.rank, self.world_size, gathering, ahead=ahead, limit=limit)

    @contextmanager
    def reporting_failures(self, what: str = "its forward") -> Iterator[None]:
        """Publish a failure report, which calls the block `what`, if it raises: other ranks wait for this one."""
        self.reports.withdraw()
        defer_interrupts()  # a notebook resets Python's handler for each cell
        try:
            yield
        except Exception as error:
            self.reports.leave(f"{what} at step {self.version.number} ended in {type(error).__name__}: {error}")
            raise

    @property
    def world_size(self) -> int:
        """Number of ranks, replicas included."""
        return prod(transport.world_size for transport in self.transports)

    @property
    def rank(self) -> int:
        """This rank among all ranks, replicas included."""
        replica = 0 if self.replicas is None else self.replicas.rank
        return replica * self.transport.world_size + self.transport.rank

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory [numel] for tensors that are sent to other ranks."""
        memory = self.transport.empty(numel * dtype.itemsize, self.device)
        return memory if dtype == memory.dtype else memory.view(dtype)

    def trim(self, *, keep: int | None = None) -> None:
        """Free memory that no unit has used for a step, or all free memory except `keep` bytes."""
        for transport in self.transports:
            transport.trim(keep=keep)

    def held(self) -> dict[str, Held]:
        """Return the bytes that this rank holds by purpose, including the transports' memory."""
        every = (self.transport, self.replicas, *self.reducing, *self.hosts)
        holders = {id(each.holder): each.holder for each in every if each is not None and each.holder is not None}
        total = self.ledger.held()
        for holder in holders.values():
            for purpose, held in holder.held().items():
                before = total.get(purpose, Held(0, 0))
                total[purpose] = Held(before.now + held.now, before.peak + held.peak)
        return total

    def queue(self, name: str, *, blocking: bool = False) -> StreamQueue:
        """Return a new queue for operations over these transports, or for such that are `blocking` in any case."""
        blocking = blocking or any(transport.blocking for transport in self.transports)
        return make_queue(
            name,
            self.device,
            self.streams,
            blocking=blocking,
            reports=self.reports,
            high_priority=self.high_priority,
        )


def share(groups: Ranks, device: torch.device, timeout: timedelta, route: Route) -> Context:
    """Connect this rank to all other ranks that wrap the same model now. Collective.

    Raises:
        LayoutError: the route is not available.
        CommError: a rank did not arrive.
    """
    check_connections(device)
    model = identify(groups, timeout)
    connect_to = partial(_connect, device=device, timeout=timeout)
    in_any_order = replace(route, order="ring", parts=None)  # nothing but gradients depends on it
    transport = connect_to(groups.shard, route=in_any_order, apart=True)
    has_tags = not (transport.batched or isinstance(transport, WholeCollectives))
    rest = replace(in_any_order, transport="auto") if route.transport == "symmetric_memory" else in_any_order
    inline = (
        transport if has_tags else connect_to(groups.shard, route=rest),
        _of_replicas(groups, partial(connect_to, route=rest)),
    )
    hosts = _of_both(groups, partial(connect_hosts, timeout=timeout, route=route))
    name = f"model {model.number} from rank {model.first}, {model.mark}"
    return Context(
        instance=model.number,
        transport=transport,
        replicas=inline[1],
        reducing=_of_both(groups, partial(connect_to, route=route, apart=True, reduces=True)),
        inline=inline,
        hosts=hosts,
        rounds=_connect_rounds(groups, hosts[0], timeout),
        device=device,
        timeout=timeout,
        version=WeightVersion(),
        board=StoreReports(name),
        waits=StoreReports(f"{name}, waits") if device.type == "cpu" and groups.replicas is None else None,
        standings=StoreReports(f"{name}, standings"),
        streams=ProgramStreams(device),
        trace=Trace(),
        ledger=Ledger(),
        traffic=Traffic(device),
        high_priority=route.high_priority,
    )


def _connect(group: dist.ProcessGroup | None, **options: Any) -> Transport:
    """Connect this rank to those of `group`, as `connect` does.

    Connections that would be made by the first message are made here, where all ranks call in the same order.
    """
    transport = connect(group, **options)
    if transport.batched:
        all_reduce(torch.zeros(transport.world_size, device=options["device"]), transport)
    return transport


def _of_both(
    groups: Ranks, connect: Callable[[dist.ProcessGroup | None], Transport]
) -> tuple[Transport, Transport | None]:
    """Connect this rank to the ranks that share the model and, if any, to those that hold the same shards."""
    return connect(groups.shard), _of_replicas(groups, connect)


def _of_replicas(groups: Ranks, connect: Callable[[dist.ProcessGroup | None], Transport]) -> Transport | None:
    return None if groups.replicas is None else connect(groups.replicas)


def _connect_rounds(groups: Ranks, hosts: Transport, timeout: timedelta) -> GlooCollectives | None:
    if hosts.world_size < MANY or not isinstance(hosts, GlooTransport):
        return None
    return GlooCollectives(reconnect(member_group(groups.shard), timeout), timeout)
