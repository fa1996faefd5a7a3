"""What all units of one wrapped model share: the ranks, the device, and the books."""

from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
from torch import Tensor

from shardlite.lane import Lane, make_lane
from shardlite.ledger import Ledger
from shardlite.ring import Operation, all_reduce
from shardlite.trace import Trace
from shardlite.traffic import Traffic
from shardlite.transport import Groups, Transport, connect


@dataclass
class Steps:
    """How many steps optimizers have taken with a model."""

    taken: int = 0


@dataclass(frozen=True)
class Shared:
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

    control: Transport
    """To the ranks over which the model is sharded, for what hosts tell each other: CPU tensors."""

    device: torch.device
    steps: Steps
    trace: Trace
    ledger: Ledger
    traffic: Traffic

    @property
    def label(self) -> str:
        """The model and the step in the name of an operation.

        So no two models hear each other's messages, nor ranks of which one has left a step out.
        """
        return f"of model {self.instance} at step {self.steps.taken}"

    @property
    def transports(self) -> list[Transport]:
        """All: what goes over one after the other reaches every rank."""
        return [self.transport] if self.replicas is None else [self.transport, self.replicas]

    def counted(self, purpose: str) -> list[Transport]:
        """Return them, with what is sent for a purpose of the whole model counted."""
        return [self.traffic.counted(transport, purpose) for transport in self.transports]

    def add_up(self, numbers: Tensor, purpose: str, operation: Operation) -> None:
        """Add [n] up over all ranks, replicas included, in place."""
        for transport in self.counted(purpose):
            all_reduce(numbers, transport, operation=operation)

    @property
    def world_size(self) -> int:
        """How many ranks there are, replicas included."""
        return prod(transport.world_size for transport in self.transports)

    @property
    def rank(self) -> int:
        """This rank among all of them."""
        replica = 0 if self.replicas is None else self.replicas.rank
        return replica * self.transport.world_size + self.transport.rank

    def lane(self, name: str) -> Lane:
        """Return a new lane for operations that use these transports."""
        return make_lane(name, self.device, blocking=any(transport.blocking for transport in self.transports))


def connect_all(
    groups: Groups, device: torch.device, timeout: timedelta, *, apart: bool
) -> tuple[Transport, Transport | None]:
    """Connect this rank to those that it shares a model with, and to those that hold the same shards, if any.

    Connections that are made at the first message are made here, where all ranks come in the same order.
    """
    shard = connect(groups.shard, device, timeout, apart=apart)
    replicas = None if groups.replicas is None else connect(groups.replicas, device, timeout, apart=apart)
    for transport in (shard, replicas):
        if transport is not None and transport.batched:
            all_reduce(torch.zeros(transport.world_size, device=device), transport)
    return shard, replicas
