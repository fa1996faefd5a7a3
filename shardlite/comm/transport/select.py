"""Selection of transport and algorithm for a process group and a device. Each selection is logged once."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.gloo import GlooTransport, StagedTransport, member_group, reconnect
from shardlite.comm.transport.group_collectives import (
    GlooCollectives,
    GroupCollectives,
    NcclCollectives,
    WholeCollectives,
)
from shardlite.comm.transport.nccl import NcclTransport, communicator
from shardlite.comm.transport.shared_memory.rendezvous import nodes_of, rendezvous
from shardlite.comm.transport.shared_memory.transport import SharedMemoryTransport
from shardlite.comm.transport.symmetric import symmetric_memory
from shardlite.comm.transport.two_level import TwoLevelCollectives
from shardlite.config import Route
from shardlite.errors import LayoutError

log = logging.getLogger("shardlite")

_reported: set[str] = set()
"""Messages that this process has already logged. If ranks are threads, they may race and log a message twice."""

_ON_REQUEST = "it was requested"


@dataclass(frozen=True)
class Choice:
    """A selected transport, and the reason for the selection."""

    transport: Transport
    reason: str

    @property
    def words(self) -> str:
        """Return a description of the choice in one line."""
        transport = self.transport
        return f"{type(transport).__name__} between {transport.world_size} ranks, {transport.words}: {self.reason}"


def connect(
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout: timedelta,
    *,
    route: Route = Route(),  # noqa: B008 (frozen)
    apart: bool = False,
    reduces: bool = False,
) -> Transport:
    """Connect the ranks of a process group by the transport that a route selects. Collective.

    Args:
        group: the process group; `None` is the default group.
        device: the device of the tensors.
        timeout: maximum time of each blocking wait, and of waits in symmetric memory. NCCL's waits do not block, so
            the timeout of the group applies to them.
        route: the requested transport, algorithm and options. Symmetric memory is selected only if the route names it.
            Each connection takes 64 MiB of symmetric memory.
        apart: whether operations may overlap with operations of another transport in any order. Since NCCL has no tags,
            the transport then gets a separate communicator.
        reduces: whether the transport is for reductions. Over collectives, only reductions use two levels, which need
            two more communicators.

    Returns:
        The transport. The selection and its reason are logged once.

    Raises:
        LayoutError: this process is not a member of `group`, the group has no backend for such tensors, or the route is
            not available.
        CommError: a rank did not arrive or cannot be connected.
    """
    choice = choose(group, device, timeout, route=route, apart=apart, reduces=reduces)
    _report(logging.INFO, f"{device.type} tensors go over {choice.words}")
    return choice.transport


def connect_hosts(group: dist.ProcessGroup | None, timeout: timedelta, *, route: Route) -> Transport:
    """Return a transport for CPU tensors between the ranks of `group`. Collective.

    The group needs no backend for CPU tensors. Routes for CUDA tensors are ignored. Routes without tags are ignored
    too, because hosts exchange messages on several threads.
    """
    if route.transport in ("symmetric_memory", "collectives"):
        route = replace(route, transport="auto")
    route = replace(route.without_nccl(), reduce="exact", order="ring", parts=None)
    if "cpu" in _backends(member_group(group)):
        return connect(group, torch.device("cpu"), timeout, route=route)
    return GlooTransport(reconnect(member_group(group), timeout), timeout)


def choose(
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout: timedelta,
    *,
    route: Route,
    apart: bool = False,
    reduces: bool = False,
) -> Choice:
    """Return the selected transport, on which the algorithm is set, with the reason. Takes the arguments of `connect`.

    Raises:
        LayoutError: as for `connect`.
        CommError: as for `connect`.
    """
    group = member_group(group)
    backends = _backends(group)
    match device.type, backends.get(device.type):
        case "cpu", str():
            choice = _for_host(group, timeout, route)
        case "cuda", "nccl" | "gloo":
            choice = _for_gpu(group, device, timeout, route, apart=apart)
        case _:
            raise LayoutError(
                f"no transport for tensors on {device} over a process group with the backends {backends}: initialize "
                "it with 'gloo' or 'cpu:gloo,cuda:nccl', as in "
                "torch.distributed.init_process_group('cpu:gloo,cuda:nccl'), and use CPU or CUDA tensors"
            )
    _check(choice, route)
    _set_algorithm(choice.transport, route, group, timeout)
    flat = choice.transport
    if not reduces or not isinstance(flat, GroupCollectives) or flat.fast or flat.algorithm == "halving":
        return choice
    if route.algorithm == "hierarchical":
        return replace(choice, transport=_in_two_levels(flat, device, route, group, timeout))
    _recommend_levels(flat, group, timeout)
    return choice


def _for_host(group: dist.ProcessGroup, timeout: timedelta, route: Route) -> Choice:
    """Select the transport for CPU tensors."""
    wanted, world_size = route.transport, group.size()
    if wanted == "symmetric_memory":
        raise LayoutError(
            "transport='symmetric_memory' is for CUDA tensors, but these are on the CPU: use 'p2p' or 'auto'"
        )
    if wanted == "collectives" and world_size > 1:
        return Choice(GlooCollectives(reconnect(group, timeout), timeout), _ON_REQUEST)
    if wanted == "p2p" or world_size == 1:
        reason = _ON_REQUEST if wanted == "p2p" else "a single rank sends no messages"
        return Choice(GlooTransport(group, timeout), reason)
    found = rendezvous(group, timeout)
    if found.neighbours is not None:
        return Choice(SharedMemoryTransport(found.neighbours, timeout), "all ranks are processes of this host")
    if wanted == "shared_memory":
        raise LayoutError(f"transport='shared_memory' is not available: {found.why_not}. Use 'p2p' or 'auto'")
    return Choice(GlooTransport(group, timeout), f"shared memory is not available: {found.why_not}")


def _for_gpu(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, route: Route, *, apart: bool
) -> Choice:
    """Select the transport for CUDA tensors. Transports over symmetric memory are always `apart`."""
    wanted = route.transport
    if wanted == "shared_memory":
        raise LayoutError(
            f"transport='shared_memory' is for CPU tensors, but these are on {device}: use 'p2p' or 'auto'"
        )
    if wanted == "symmetric_memory" and group.size() > 1:
        return Choice(symmetric_memory(group, device, timeout), f"{_ON_REQUEST}, and is experimental")
    if _backends(group)["cuda"] == "nccl":
        own = communicator(group, device, timeout, route) if apart else group
        if wanted == "collectives":
            return Choice(NcclCollectives(own), _ON_REQUEST)
        if wanted == "auto" and route.algorithm in ("auto", "hierarchical"):
            return Choice(NcclCollectives(own), "the group's backend for CUDA tensors is NCCL")
        return Choice(NcclTransport(own), "the transport or the algorithm was requested")
    if wanted == "collectives":
        raise LayoutError("transport='collectives' requires NCCL for CUDA tensors, which this process group lacks")
    return Choice(StagedTransport(group, timeout), "the group has only gloo, which sends from host memory")


def _check(choice: Choice, route: Route) -> None:
    """Check that the transport supports the options of the route.

    Raises:
        LayoutError: the transport does not support an option.
    """
    transport, name = choice.transport, type(choice.transport).__name__
    if route.reduce == "fast" and transport.world_size > 1 and not isinstance(transport, GroupCollectives):
        raise LayoutError(
            f"reduce='fast' requires collectives of the process group, but these tensors go over {name}, because "
            f"{choice.reason}: also pass transport='collectives'"
        )
    options = route.of_nccl()
    if options and not isinstance(transport, NcclTransport):
        raise LayoutError(
            f"Route({options}) configures communicators of NCCL, but these tensors go over {name}, because "
            f"{choice.reason}: remove it"
        )
    if route.algorithm == "halving" and transport.world_size.bit_count() != 1:
        raise LayoutError(f"algorithm='halving' requires a power of two of ranks, got {transport.world_size}")


def _set_algorithm(transport: Transport, route: Route, group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the algorithm that the route names. By default, keep the algorithm of the transport's class."""
    if isinstance(transport, GroupCollectives):
        transport.fast = route.reduce == "fast"
    if route.order == "tree":
        transport.algorithm = "halving"
    elif route.algorithm != "auto" and not isinstance(transport, WholeCollectives):  # two levels: see `choose`
        transport.algorithm = route.algorithm
        if route.algorithm == "hierarchical":
            transport.node = nodes_of(group, timeout)


def _in_two_levels(
    flat: GroupCollectives, device: torch.device, route: Route, group: dist.ProcessGroup, timeout: timedelta
) -> WholeCollectives:
    """Return a transport that reduces in two levels, or `flat` itself if there is one node or one rank per node."""
    node, ranks = nodes_of(group, timeout), range(flat.world_size)
    if node in (1, len(ranks)):
        return flat  # `flat` adds in the same order

    def among(some: Sequence[int]) -> GroupCollectives:
        if isinstance(flat, NcclCollectives):
            return NcclCollectives(communicator(group, device, timeout, route, some))
        return GlooCollectives(reconnect(group, timeout, some), timeout)

    place = flat.rank % node
    first = flat.rank - place
    return TwoLevelCollectives(flat, among(ranks[first : first + node]), among(ranks[place::node]))


def _recommend_levels(flat: GroupCollectives, group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Warn once on rank 0 if two levels would save traffic between nodes. Collective."""
    ranks = flat.world_size
    try:
        node = nodes_of(group, timeout)
    except LayoutError:
        return
    if node not in (1, ranks) and flat.rank == 0:
        _report(
            logging.WARNING,
            f"gradients are reduced by one exchange among {ranks} ranks on {ranks // node} nodes, in which each rank "
            f"sends {ranks - node}/{ranks} of its gradients to other nodes. Route(algorithm='hierarchical') sends only "
            f"{ranks // node - 1}/{ranks}, but rounds differently (docs/rings.md, 'Several nodes')",
        )


def _report(level: int, message: str) -> None:
    """Log a message, unless this process has logged it before."""
    if message not in _reported:
        _reported.add(message)
        log.log(level, "%s", message)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of the group's backend by device type. PyTorch formats it as `cpu:gloo,cuda:nccl`."""
    pairs = (pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))
    return dict(pairs)
