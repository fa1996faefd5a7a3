"""Which transport serves which tensors."""

from datetime import timedelta

import torch
import torch.distributed as dist

from shardlite.errors import LayoutError
from shardlite.transport.base import Transport
from shardlite.transport.group import GroupTransport
from shardlite.transport.nccl import NcclTransport
from shardlite.transport.staged import StagedTransport
from shardlite.transport.works import joined


def connect(
    group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta, *, apart: bool = False
) -> Transport:
    """Return the transport for tensors on `device` over `group` (`None`: the default group). All its ranks call this.

    `timeout` bounds each wait that blocks. NCCL's waits do not: over NCCL the timeout of the group itself counts.
    `apart` asks for a transport whose operations may run beside those of another one in any order. Tags allow that by
    themselves; NCCL knows none, so there it takes another process group of the same ranks.

    Raises:
        LayoutError: this process is not a member of `group`, or `group` has no backend that can carry such tensors.
    """
    backends = _backends(joined(group))
    match device.type, backends.get(device.type):
        case "cpu", str():
            return GroupTransport(group, timeout)
        case "cuda", "nccl":
            return NcclTransport(_again(group, timeout, "nccl") if apart else group)
        case "cuda", "gloo":
            return StagedTransport(group, timeout)
    raise LayoutError(
        f"no transport for tensors on {device} over a process group with the backends {backends}: start it with "
        "'gloo' or 'cpu:gloo,cuda:nccl', as in torch.distributed.init_process_group('cpu:gloo,cuda:nccl'), "
        "and use CPU or CUDA tensors"
    )


def connect_hosts(group: dist.ProcessGroup | None, timeout: timedelta) -> Transport:
    """Return a transport for CPU tensors between the ranks of `group`, whatever it carries. All its ranks call this."""
    if "cpu" in _backends(joined(group)):
        return GroupTransport(group, timeout)
    return GroupTransport(_again(group, timeout, "gloo"), timeout)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of the group's backend by device type; PyTorch writes it as `cpu:gloo,cuda:nccl`."""
    pairs = (pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))
    return dict(pairs)


def _again(group: dist.ProcessGroup | None, timeout: timedelta, backend: str) -> dist.ProcessGroup:
    """Return another group of the same ranks, which lives as long as the process group of all."""
    ranks = dist.get_process_group_ranks(group)
    again: dist.ProcessGroup = dist.new_group(ranks, timeout, backend=backend, use_local_synchronization=True)
    return again
