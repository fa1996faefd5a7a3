"""Every kind of transport, for bodies that see only a transport: `run(kind, cluster, body, world_size, *args)`.

threads   in-process ranks, message by message
steps     in-process ranks, a ring step at a time
gloo      processes, message by message
staged    processes, each message copied through host memory
batches   processes, a ring step in one batch: the code that drives NCCL, over gloo
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardlite.transport import GroupTransport, Message, NcclTransport, Pending, StagedTransport, Transport
from tests.cluster import GLOO_TIMEOUT, Cluster, run_local

IN_PROCESS = ("threads", "steps")


class Batched:
    """`transport` as one that takes nothing but batches; `steps` keeps their messages."""

    batched = True

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.blocking = transport.blocking
        self.steps: list[list[Message]] = []
        self._transport = transport

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        raise AssertionError("a single message may wait for its peer for good")

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        raise AssertionError("a single message may wait for its peer for good")

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        self.steps.append(list(messages))
        return self._transport.exchange(messages, tag)


def run(kind: str, cluster: Cluster, body: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run `body(transport, *args)` on each rank of a world of that kind, and return the results by rank."""
    if kind == "threads":
        return run_local(body, world_size, *args)
    if kind == "steps":
        return run_local(lambda transport, *given: body(Batched(transport), *given), world_size, *args)
    return cluster.run(_on_process, world_size, kind, body, args)


def _on_process(group: Any, kind: str, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    match kind:
        case "gloo":
            return body(GroupTransport(group, GLOO_TIMEOUT), *args)
        case "staged":
            return body(StagedTransport(group, GLOO_TIMEOUT), *args)
        case "batches":
            return body(NcclTransport(group), *args)
    raise AssertionError(kind)
