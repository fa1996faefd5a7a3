"""More connections between the ranks of a process group.

Operations that run beside each other over a backend without tags each need their own. `dist.new_group` makes them for
programs, but not for a library: its groups are never freed before the program ends, it deadlocks if ranks are in
different numbers of groups (it names a group by that number), and where the default group is bound to a device, all
ranks of the program have to call it. A backend that is made directly has none of this.
"""

import atexit
import secrets
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from shardlite.comm.control.store import all_gather_json
from shardlite.errors import CommError

_kept: list[Backend] = []
"""NCCL's connections: to close one while its kernels are queued is an error, and nothing says when they have ended."""


def reconnect(group: dist.ProcessGroup, backend: str, timeout: timedelta) -> Backend:
    """Return a new backend, `"gloo"` or `"nccl"`, between the ranks of `group`, in their order. Collective.

    Connections over gloo are closed when the result is freed, those over NCCL when the program ends.

    Raises:
        CommError: ranks did not arrive, or cannot be connected.
    """
    rank = group.rank()
    # The token is new, so that nothing is found under this name that others have left in the store.
    name = all_gather_json(group, secrets.token_hex(8), f"another connection over {backend}", timeout)[0]
    try:
        if backend == "gloo":
            return over_gloo(name, rank, group.size(), timeout)
        store = PrefixStore(f"shardlite/{backend}/{name}", _get_default_store())
        made = dist.ProcessGroupNCCL(store, rank, group.size(), _options(group, name, timeout))
    except RuntimeError as error:
        raise CommError(
            f"rank {rank} cannot connect to ranks {dist.get_process_group_ranks(group)} over {backend} once more, for "
            f"messages beside those of the process group. The backend says: {error}"
        ) from error
    if not _kept:
        atexit.register(_close)
    _kept.append(made)
    return made


def over_gloo(name: str, rank: int, size: int, timeout: timedelta) -> Backend:
    """Return a new backend between `size` ranks, which call this with one new name. Collective.

    Raises:
        RuntimeError: ranks cannot be connected.
    """
    store = PrefixStore(f"shardlite/gloo/{name}", _get_default_store())
    made = dist.ProcessGroupGloo(store, rank, size, timeout)
    # A rank may be connected while its peers still wait to hear of it, and closes the connection when it drops `made`.
    made.barrier().wait()  # type: ignore[attr-defined]  # it is not in the stubs
    return made


def _options(group: dist.ProcessGroup, name: str, timeout: timedelta) -> Any:
    """Return the options of the group's own connections, under another name and with a high priority."""
    theirs: Any = group._get_backend(torch.device("cuda")).options
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True  # slices of reductions run on its stream, beside the backward
    options.config = theirs.config
    options.global_ranks_in_group = dist.get_process_group_ranks(group)
    options.group_name = f"shardlite {name}"
    options._timeout = timeout
    return options


def _close() -> None:
    while _kept:
        _kept.pop().shutdown()
