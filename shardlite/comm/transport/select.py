"""Selection of transport and algorithm for a process group and a device. The reason is logged once."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from shardlite.comm.shm.rendezvous import nodes_of, rendezvous
from shardlite.comm.shm.transport import SharedMemoryTransport
from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.gloo import GlooTransport, StagedTransport, joined, reconnect
from shardlite.comm.transport.group_collectives import (
    GlooCollectives,
    GroupCollectives,
    NcclCollectives,
    TwoLevelCollectives,
    WholeCollectives,
)
from shardlite.comm.transport.nccl import NcclTransport, communicator
from shardlite.comm.transport.symmetric import symmetric_memory
from shardlite.config import Route
from shardlite.errors import LayoutError

log = logging.getLogger("shardlite")

_reported: set[str] = set()
"""Messages already logged by this process. Ranks that are threads may log one twice if they race."""


@dataclass(frozen=True)
class Choice:
    """A transport, and the reason for it."""

    transport: Transport
    reason: str

    @property
    def words(self) -> str:
        """The choice in one line."""
        name, ranks = type(self.transport).__name__, self.transport.world_size
        how = f"algorithm {self.transport.algorithm}"
        if isinstance(self.transport, TwoLevelCollectives):
            how = f"sums inside each node of {self.transport.node} first, both in the order of rings"
        elif isinstance(self.transport, WholeCollectives):
            order = "a tree" if self.transport.algorithm == "halving" else "the ring"
            fast = isinstance(self.transport, GroupCollectives) and self.transport.fast
            how = "fast sums" if fast else f"sums in the order of {order}"
        return f"{name} between {ranks} ranks, {how}: {self.reason}"


def connect(
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout: timedelta,
    *,
    route: Route = Route(),  # noqa: B008 (frozen)
    apart: bool = False,
    reduces: bool = False,
) -> Transport:
    """Return the transport for tensors on `device` over `group` (`None`: the default group). Collective.

    `timeout` limits each wait that blocks, and waits in symmetric memory. NCCL's waits do not block: there the timeout
    of the group applies.

    With `apart`, operations of the transport may run beside those of another one in any order. Tags allow that; NCCL
    has none, so the transport gets another communicator of the same ranks. With `reduces` it is for reductions: over
    collectives only those know nodes, and have two more communicators then. Symmetric memory is selected only if the
    route names it; every connection takes 64 MiB of it.

    Raises:
        LayoutError: this process is not a member of `group`, the group has no backend for such tensors, or the route is
            not available.
        CommError: ranks did not arrive, or cannot be connected.
    """
    choice = choose(group, device, timeout, route=route, apart=apart, reduces=reduces)
    if choice.words not in _reported:
        _reported.add(choice.words)
        log.info("%s tensors go over %s", device.type, choice.words)
    return choice.transport


def connect_hosts(
    group: dist.ProcessGroup | None,
    timeout: timedelta,
    *,
    route: Route = Route(),  # noqa: B008 (frozen)
) -> Transport:
    """Return a transport for CPU tensors between the ranks of `group`, whatever its backends. Collective.

    A route for CUDA tensors only is ignored, and so is one without tags: hosts exchange messages on several threads.
    """
    if route.transport in ("symmetric_memory", "collectives"):
        route = replace(route, transport="auto")
    route = replace(route.without_nccl(), reduce="exact", order="ring")
    if "cpu" in _backends(joined(group)):
        return connect(group, torch.device("cpu"), timeout, route=route)
    return GlooTransport(reconnect(joined(group), timeout), timeout)


def choose(
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout: timedelta,
    *,
    route: Route,
    apart: bool = False,
    reduces: bool = False,
) -> Choice:
    """Select transport and algorithm; return both with the reason. Arguments and errors are those of `connect`."""
    everyone = joined(group)
    backends = _backends(everyone)
    match device.type, backends.get(device.type):
        case "cpu", str():
            choice = _for_host(group, timeout, route)
        case "cuda", "nccl" | "gloo":
            choice = _for_gpu(group, device, timeout, route, apart=apart)
        case _:
            raise LayoutError(
                f"no transport for tensors on {device} over a process group with the backends {backends}: start it "
                "with 'gloo' or 'cpu:gloo,cuda:nccl', as in "
                "torch.distributed.init_process_group('cpu:gloo,cuda:nccl'), and use CPU or CUDA tensors"
            )
    choice = _by(choice, route, everyone, timeout)
    return _across_nodes(choice, device, route, everyone, timeout) if reduces else choice


def _for_host(group: dist.ProcessGroup | None, timeout: timedelta, route: Route) -> Choice:
    """Select the transport for CPU tensors."""
    everyone, wanted = joined(group), route.transport
    if wanted == "symmetric_memory":
        raise LayoutError("transport='symmetric_memory' is for CUDA tensors, these are on the CPU: use 'p2p' or 'auto'")
    if wanted == "p2p":
        return Choice(GlooTransport(group, timeout), "it was asked for")
    if wanted == "collectives" and dist.get_world_size(group) > 1:
        return Choice(GlooCollectives(reconnect(joined(group), timeout), timeout), "it was asked for")
    if dist.get_world_size(group) == 1:
        return Choice(GlooTransport(group, timeout), "one rank sends nothing")
    found = rendezvous(everyone, timeout)
    if found.neighbours is not None:
        return Choice(SharedMemoryTransport(found.neighbours, timeout), "all ranks are processes of this host")
    if wanted == "shared_memory":
        raise LayoutError(f"transport='shared_memory' cannot be had: {found.why_not}. Use 'p2p', or 'auto'")
    return Choice(GlooTransport(group, timeout), f"no shared memory, for {found.why_not}")


def _for_gpu(
    group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta, route: Route, *, apart: bool
) -> Choice:
    """Select the transport for CUDA tensors. `apart` always holds over symmetric memory: each transport has its own."""
    everyone, wanted = joined(group), route.transport
    if wanted == "shared_memory":
        raise LayoutError(f"transport='shared_memory' is for CPU tensors, these are on {device}: use 'p2p' or 'auto'")
    if wanted == "symmetric_memory" and dist.get_world_size(group) > 1:  # one rank sends nothing
        return Choice(symmetric_memory(everyone, device, timeout), "it was asked for, and is experimental")
    if _backends(everyone)["cuda"] == "nccl":
        own = communicator(everyone, device, timeout, route) if apart else everyone
        if wanted == "collectives":
            return Choice(NcclCollectives(own), "it was asked for")
        if wanted == "auto" and route.algorithm in ("auto", "hierarchical"):
            return Choice(NcclCollectives(own), "the group's backend for CUDA tensors is NCCL")
        return Choice(NcclTransport(own), "it was asked for, or the algorithm was")
    if wanted == "collectives":
        raise LayoutError("transport='collectives' takes NCCL for CUDA tensors, which this process group does not have")
    staged = StagedTransport(group, timeout)
    return Choice(staged, "the group has gloo alone, which sends from host memory")


def _by(choice: Choice, route: Route, group: dist.ProcessGroup, timeout: timedelta) -> Choice:
    """Set the algorithm that the route names; without one, the transport keeps that of its class."""
    transport = choice.transport
    if isinstance(transport, GroupCollectives):
        transport.fast = route.reduce == "fast"
    elif route.reduce == "fast" and transport.world_size > 1:
        raise LayoutError(
            f"reduce='fast' is for collectives of the process group, and these tensors go over "
            f"{type(transport).__name__}, for {choice.reason}: give transport='collectives' too"
        )
    asked = route.of_nccl()
    if asked and not isinstance(transport, NcclTransport):
        raise LayoutError(
            f"Route({asked}) is for communicators of NCCL, and these tensors go over {type(transport).__name__}, for "
            f"{choice.reason}: leave it out"
        )
    if route.algorithm == "halving" and transport.world_size.bit_count() != 1:
        raise LayoutError(f"algorithm='halving' takes a power of two of ranks, got {transport.world_size}")
    if route.order == "tree":
        transport.algorithm = "halving"
    elif route.algorithm != "auto" and not isinstance(transport, WholeCollectives):  # those: `_across_nodes`
        transport.algorithm = route.algorithm
        if route.algorithm == "hierarchical":
            transport.node = nodes_of(group, timeout)
    return choice


def _across_nodes(
    choice: Choice, device: torch.device, route: Route, group: dist.ProcessGroup, timeout: timedelta
) -> Choice:
    """Make reductions over collectives two-level ones if the route says so; where they could be, log that once."""
    flat = choice.transport
    if not isinstance(flat, GroupCollectives) or flat.fast or flat.algorithm == "halving":
        return choice
    if route.algorithm == "hierarchical":
        return replace(choice, transport=_in_two_levels(flat, device, route, group, timeout))
    hint = _hint(flat, group, timeout)
    if hint and flat.rank == 0 and hint not in _reported:
        _reported.add(hint)
        log.warning("%s", hint)
    return choice


def _in_two_levels(
    flat: GroupCollectives, device: torch.device, route: Route, group: dist.ProcessGroup, timeout: timedelta
) -> WholeCollectives:
    """Return `flat` with reductions in two levels, or `flat` if all ranks are on one node, or each is on its own."""
    node, ranks = nodes_of(group, timeout), range(flat.world_size)
    if node in (1, len(ranks)):
        return flat  # the order of additions is the same

    def among(some: Sequence[int]) -> GroupCollectives:
        if isinstance(flat, NcclCollectives):
            return NcclCollectives(communicator(group, device, timeout, route, some))
        return GlooCollectives(reconnect(group, timeout, some), timeout)

    place = flat.rank % node
    first = flat.rank - place
    return TwoLevelCollectives(flat, among(ranks[first : first + node]), among(ranks[place::node]))


def _hint(flat: GroupCollectives, group: dist.ProcessGroup, timeout: timedelta) -> str:
    """Return what to take instead of one exchange among all ranks, or nothing where two levels would save nothing."""
    ranks = flat.world_size
    try:
        node = nodes_of(group, timeout)
    except LayoutError:
        return ""
    if node in (1, ranks):
        return ""
    return (
        f"gradients are reduced by one exchange among {ranks} ranks on {ranks // node} nodes, in which each sends "
        f"{ranks - node}/{ranks} of them to other nodes. With Route(algorithm='hierarchical') that is "
        f"{ranks // node - 1}/{ranks}, with other last bits (docs/rings.md, 'Several nodes')"
    )


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of the group's backend by device type. PyTorch formats it as `cpu:gloo,cuda:nccl`."""
    pairs = (pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))
    return dict(pairs)
