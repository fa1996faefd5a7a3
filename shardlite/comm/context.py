"""The context that all units (sharded submodules) of one model share: its ranks, device, reports and counters.

In: ranks, a device and a route. Out: connections, queues, and names of operations. This file does not depend on units.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, partial
from math import prod
from os import getpid
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shardlite.comm.collectives import all_reduce
from shardlite.comm.consensus import Ranks, WeightVersion, agree, identify
from shardlite.comm.control.failure_reports import FailureReports, StoreReports
from shardlite.comm.control.interrupts import defer_interrupts, report_uncaught
from shardlite.comm.control.process import Owner
from shardlite.comm.control.progress import Progress
from shardlite.comm.operation import Operation
from shardlite.comm.program_streams import ProgramStreams, check_connections
from shardlite.comm.streams import StreamQueue, make_queue
from shardlite.comm.traffic import NO_UNIT, Tally, Traffic
from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.gloo import GlooTransport, member_group, reconnect
from shardlite.comm.transport.group_collectives import GlooCollectives
from shardlite.comm.transport.select import connect, connect_hosts
from shardlite.config import Route
from shardlite.telemetry import Held, Ledger, Trace

SPARE = 32 << 20
"""Bytes of free shared memory that keep their pages at the end of a backward, because the next step will use them.

Reallocating pages costs about 1 ms per MiB on a CPU (measured with two ranks on two cores).
"""

MANY = 16
"""Minimum number of ranks that agree by collectives. Fewer ranks agree by messages from each rank to every other."""


_TallyKey: TypeAlias = tuple[int, str, str, str]
"""The process, the kind of operation, its purpose, and its unit."""


@dataclass(frozen=True, eq=False)
class Context:
    """Ranks, device, reports and counters of one wrapped model."""

    instance: int
    """Number that identifies the wrapped model. It is equal on every rank."""

    name: str
    """Name of the wrapped model. It is unique in the store of the process group."""

    ranks: Ranks
    transport: Transport
    """Transport for gathers, between the ranks over which the model is sharded."""

    replicas: Transport | None
    """Transport between the ranks that hold the same shards (hybrid sharding), or `None`."""

    reducing: tuple[Transport, Transport | None]
    """The two transports for reductions: between the ranks that shard the model, and between replicas. Reductions
    overlap with gathers in no fixed order. NCCL and whole collectives have no tags, so reductions need separate
    connections.
    """

    inline: tuple[Transport, Transport | None]
    """The two transports for operations that run on the program's thread and not on a queue. These operations are small
    or rare, so they do not use symmetric memory.

    Over NCCL, inline operations use the program's own communicator, on the compute stream. Sharing the communicator
    is safe, because an inline operation is part of a call (a norm, the end of a backward, a state dict), and the
    program must make each call at the same place on all ranks, like its own collectives. Gathers could not share the
    communicator. A gather starts when a rank's forward needs the gathered weights. So ranks that take different
    branches start a gather at different places between the program's collectives.
    """

    hosts: tuple[Transport, Transport | None]
    """The two transports over which the ranks' hosts exchange tensors in CPU memory."""

    rounds: GlooCollectives | None
    """Collectives for short agreements of the ranks that shard the model, or `None` if there are fewer than `MANY`
    ranks or `hosts` is not gloo. A collective takes fewer messages than an exchange between all pairs of ranks. The
    collectives use a separate connection, because they have no tags.
    """

    device: torch.device
    timeout: timedelta
    """Maximum time that a rank waits for a message."""

    streams: ProgramStreams
    traffic: Traffic
    high_priority: bool
    """Whether queues of a GPU use high-priority streams."""

    members: Sequence[int] = ()
    """Numbers of the ranks that shard the model in the default process group. Empty if unknown."""

    version: WeightVersion = field(default_factory=WeightVersion)
    trace: Trace = field(default_factory=Trace)
    ledger: Ledger = field(default_factory=Ledger)
    owner: Owner = field(default_factory=Owner)
    _numbers: Counter[str] = field(default_factory=Counter)
    _tallies: dict[_TallyKey, Tally] = field(default_factory=dict)

    def operation(
        self, what: str, purpose: str, unit: str = NO_UNIT, *, at_any_step: bool = False, during: str = ""
    ) -> Operation:
        """Return the name of an operation of this model at its current step.

        The name contains the model and the step. So different models, or ranks at different steps, do not receive each
        other's messages.

        Args:
            what: the kind of operation. Operations of one kind are numbered.
            purpose: what the operation is for. Traffic is counted by purpose and unit.
            unit: name of the unit.
            at_any_step: leaves the step out of the name, so that ranks at different steps can exchange messages and
                detect the difference.
            during: detail for error messages.

        Raises:
            CommError: this process is a forked child, which cannot communicate.
        """
        key: _TallyKey = getpid(), what, purpose, unit  # a forked child finds none, and is refused
        if (tally := self._tallies.get(key)) is None:
            self.owner.check()
            tally = self._tallies[key] = self.traffic.tally(purpose, unit)
        else:
            tally.calls += 1
        self._numbers[what] += 1
        step = None if at_any_step else self.version.number
        return Operation(what, self._numbers[what], self.reports, during, tally, self.instance, step)

    def agree(
        self,
        what: str,
        problem: Exception | None,
        facts: Sequence[str] = (),
        *,
        subject: str = "models",
        loads: bool | None = None,
    ) -> None:
        """Raise an error on every rank if any rank has a `problem` with the call `what` or facts differ. Collective.

        If `loads` is `False`, the call reads weights, which must have the same version on all ranks. If it is `True`,
        the call replaces them, and if it is `None`, their version does not matter.
        """
        agree(
            self.ranks,
            facts,
            problem,
            what=what,
            timeout=self.timeout,
            subject=subject,
            watch=self.reports.watching,
            version=None if loads is None else self.version,
            loads=bool(loads),
        )

    @property
    def transports(self) -> list[Transport]:
        """The `inline` transports except `None`. An operation over one transport after the other reaches every rank."""
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
        """Return 1 if `flag` [] is above 0 on any rank, else 0. Collective."""
        ranks = flag.reshape(1).clone()
        self.all_reduce_numbers(ranks, self.operation("a flag of any rank", "flags"))
        return (ranks[0] > 0).to(flag.dtype)

    def all_gather_int(self, number: int, what: str) -> list[int]:
        """Return the `number` of every rank. Collective; `what` names the operation in errors."""
        ranks = torch.zeros(self.world_size, dtype=torch.int64)
        ranks[self.rank] = number
        self.all_reduce_host(ranks, self.operation(what, what))
        return ranks.tolist()

    @cached_property
    def reports(self) -> FailureReports:
        """Failure reports of the ranks."""
        transport = self.transport

        def is_gone(other: int) -> bool:
            # With replicas, the transport has different numbers for the ranks than this context.
            return transport.world_size == self.world_size and transport.is_gone(other)

        # Deadlocks are detected by the operations that ranks wait in. On a GPU this is impossible, because the host
        # does not see the waits of the GPU. With replicas it is impossible, because not all ranks are in every
        # operation.
        shows_waits = self.device.type == "cpu" and self.replicas is None
        waits = StoreReports(f"{self.name}, waits") if shows_waits else None
        board = StoreReports(self.name)
        reports = FailureReports(board, self.rank, self.world_size, waits=waits, is_gone=is_gone, members=self.members)
        report_uncaught(reports)
        defer_interrupts()
        return reports

    @cached_property
    def progress(self) -> Progress:
        """Progress of the ranks in the current backward."""
        first = self.rank - self.transport.rank
        gathering = range(first, first + self.transport.world_size)
        ahead = not self.transport.blocking
        limit = self.timeout.total_seconds() / 2
        board = StoreReports(f"{self.name}, standings")
        return Progress(board, self.rank, self.world_size, gathering, ahead=ahead, limit=limit)

    @contextmanager
    def reporting_failures(self, what: str = "its forward", *, permanently: bool = False) -> Iterator[None]:
        """If the block raises an error, publish a failure report, because other ranks may wait.

        The report names the block by the argument `what`. With `permanently`, later operations and saves raise
        an error on every rank, because the block may have changed only some of the weights.
        """
        self.reports.withdraw()
        defer_interrupts()  # repeated, because a notebook resets Python's handler for each cell
        try:
            yield
        except Exception as error:
            why = f"{what} at step {self.version.number} ended in {type(error).__name__}: {error}"
            if permanently and self.world_size > 1:
                self.version.partial = why
                self.reports.fail(why)
            self.reports.leave(why)
            raise

    @property
    def world_size(self) -> int:
        """Number of ranks, replicas included."""
        return prod(transport.world_size for transport in self.transports)

    @property
    def rank(self) -> int:
        """Number of this rank among all ranks, replicas included."""
        replica = 0 if self.replicas is None else self.replicas.rank
        return replica * self.transport.world_size + self.transport.rank

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialized memory [numel] for tensors that are sent to other ranks."""
        memory = self.transport.empty(numel * dtype.itemsize, self.device)
        return memory if dtype == memory.dtype else memory.view(dtype)

    def trim(self, *, keep: int | None = None) -> None:
        """Release memory that no unit has used for a step or, with `keep`, all unused memory except `keep` bytes."""
        for transport in self.transports:
            transport.trim(keep=keep)

    def held(self) -> dict[str, Held]:
        """Return the bytes that this rank holds for each purpose, including the transports' memory."""
        every = (self.transport, self.replicas, *self.reducing, *self.hosts)
        holders = {id(each.holder): each.holder for each in every if each is not None and each.holder is not None}
        total = self.ledger.held()
        for holder in holders.values():
            for purpose, held in holder.held().items():
                before = total.get(purpose, Held(0, 0))
                total[purpose] = Held(before.now + held.now, before.peak + held.peak)
        return total

    def queue(self, name: str, *, blocking: bool = False) -> StreamQueue:
        """Return a new queue for operations over these transports. If `blocking`, all operations block the host."""
        blocking = blocking or any(transport.blocking for transport in self.transports)
        return make_queue(
            name, self.device, self.streams, blocking=blocking, reports=self.reports, high_priority=self.high_priority
        )


def share(groups: Ranks, device: torch.device, timeout: timedelta, route: Route) -> Context:
    """Connect this rank to the other ranks that wrap the same model. Collective.

    Raises:
        LayoutError: the route is not available.
        CommError: a rank did not arrive or cannot be connected.
    """
    check_connections(device)
    model = identify(groups, timeout)
    connect_to = partial(_connect, device=device, timeout=timeout)
    in_any_order = replace(route, order="ring", parts=None)  # the order of addition affects only gradients
    transport = connect_to(groups.shard, route=in_any_order, apart=True)
    rest = replace(in_any_order, transport="auto") if route.transport == "symmetric_memory" else in_any_order
    inline = (
        transport if transport.has_tags else connect_to(groups.shard, route=rest),
        _of_replicas(groups, partial(connect_to, route=rest)),
    )
    hosts = _of_both(groups, partial(connect_hosts, timeout=timeout, route=route))
    reducing = _of_both(groups, partial(connect_to, route=route, apart=True, reduces=True))
    rounds = None
    if hosts[0].world_size >= MANY and isinstance(hosts[0], GlooTransport):
        rounds = GlooCollectives(reconnect(member_group(groups.shard), timeout), timeout)
    return Context(
        instance=model.number,
        name=f"model {model.number} from rank {model.first}, {model.mark}",
        ranks=groups,
        transport=transport,
        replicas=inline[1],
        reducing=reducing,
        inline=inline,
        hosts=hosts,
        rounds=rounds,
        device=device,
        timeout=timeout,
        streams=ProgramStreams(device),
        traffic=Traffic(device),
        high_priority=route.high_priority,
        members=dist.get_process_group_ranks(groups.shard),
    )


def _connect(group: dist.ProcessGroup | None, **options: Any) -> Transport:
    """Connect this rank to the other ranks of `group`, as `connect` does.

    Some backends connect ranks only at the first message. So this function sends a message now, while all ranks still
    make the same calls.
    """
    transport = connect(group, **options)
    if transport.batched:
        all_reduce(torch.zeros(transport.world_size, device=options["device"]), transport)
    return transport


def _of_both(
    groups: Ranks, connect: Callable[[dist.ProcessGroup | None], Transport]
) -> tuple[Transport, Transport | None]:
    """Connect this rank to the ranks that shard the model and, if there are replicas, to ranks with the same shards."""
    return connect(groups.shard), _of_replicas(groups, connect)


def _of_replicas(groups: Ranks, connect: Callable[[dist.ProcessGroup | None], Transport]) -> Transport | None:
    return None if groups.replicas is None else connect(groups.replicas)
