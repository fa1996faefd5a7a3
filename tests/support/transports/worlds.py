"""Every kind of transport, for bodies that see only a transport: `run(kind, cluster, body, world_size, *args)`.

threads   in-process ranks, message by message
steps     in-process ranks, a ring step at a time
gloo      processes, message by message
shared    processes, messages that stay where they are
staged    processes, each message copied through host memory
batches   processes, a ring step in one batch: the code that drives NCCL, over gloo
whole     processes, whole collectives of their process group
symmetric in-process ranks, whole collectives through symmetric memory that is played
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.batches import BatchTransport
from shardlite.comm.transport.gloo import GlooTransport, StagedTransport
from shardlite.comm.transport.group_collectives import GlooCollectives
from shardlite.comm.transport.messages import Message, Pending
from shardlite.comm.transport.nccl import NcclTransport
from shardlite.comm.transport.shared_memory.rendezvous import rendezvous
from shardlite.comm.transport.shared_memory.transport import SharedMemoryTransport
from tests.support.ranks.cluster import GLOO_TIMEOUT, Cluster, run_local
from tests.support.transports.delegating import Delegating
from tests.support.transports.played_symmetric import run_played

IN_PROCESS = ("threads", "steps")
PLAYED = ("symmetric",)


class Batched(Delegating, BatchTransport):
    """`transport` as one that takes nothing but batches; `steps` keeps their messages."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.steps: list[list[Message]] = []

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        raise AssertionError("a single message may wait for its peer for good")

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        raise AssertionError("a single message may wait for its peer for good")

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        self.steps.append(list(messages))
        return self._transport.exchange(messages, tag)


class By:
    """A body that sees its transport with another algorithm."""

    def __init__(self, algorithm: str, node: int, body: Callable[..., Any]) -> None:
        self.algorithm, self.node, self.body = algorithm, node, body

    def __call__(self, transport: Transport, *args: Any) -> Any:
        around = Delegating(transport)
        around.algorithm, around.node = self.algorithm, self.node
        return self.body(around, *args)


def run(
    kind: str,
    cluster: Cluster,
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    algorithm: str | None = None,
    node: int = 1,
) -> list[Any]:
    """Run `body(transport, *args)` on each rank of a world of that kind, and return the results by rank."""
    if algorithm is not None:
        body = By(algorithm, node, body)
    if kind == "threads":
        return run_local(body, world_size, *args)
    if kind == "steps":
        return run_local(lambda transport, *given: body(Batched(transport), *given), world_size, *args)
    if kind in PLAYED:
        return run_played(body, world_size, *args)
    return cluster.run(_on_process, world_size, kind, body, args)


def _on_process(group: Any, kind: str, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    match kind:
        case "gloo":
            return body(GlooTransport(group, GLOO_TIMEOUT), *args)
        case "shared":
            neighbours = rendezvous(group).neighbours
            assert neighbours is not None, rendezvous(group).why_not
            return body(SharedMemoryTransport(neighbours, GLOO_TIMEOUT), *args)
        case "staged":
            return body(StagedTransport(group, GLOO_TIMEOUT), *args)
        case "batches":
            return body(NcclTransport(group), *args)
        case "whole":
            return body(GlooCollectives(group, GLOO_TIMEOUT), *args)
    raise AssertionError(kind)
