"""More connections over gloo between the ranks of a process group.

Operations that run beside each other over a backend without tags each need their own. `dist.new_group` makes them for
programs, but not for a library: its groups are never freed before the program ends, it deadlocks if ranks are in
different numbers of groups (it names a group by that number), and where the default group is bound to a device, all
ranks of the program have to call it. A backend that is made directly has none of this. `communicators.py` does the same
over NCCL.
"""

import secrets
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from shardlite.comm.control.store import all_gather_json
from shardlite.errors import CommError


def reconnect(group: dist.ProcessGroup, timeout: timedelta, some: Sequence[int] | None = None) -> Backend:
    """Return a new backend between the ranks of `group`, in their order. Collective.

    It is between `some` of them, this one included, if given. Ranks give the same or have none in common. Its
    connections are closed when it is freed.

    Raises:
        CommError: ranks did not arrive, or cannot be connected.
    """
    members = range(group.size()) if some is None else some
    # The token is new, so that nothing is found under this name that others have left in the store.
    tokens = all_gather_json(group, secrets.token_hex(8), "another connection over gloo", timeout)
    try:
        return over_gloo(tokens[members[0]], members.index(group.rank()), len(members), timeout)
    except RuntimeError as error:
        raise refused(group, members, "gloo", error) from error


def refused(group: dist.ProcessGroup, members: Sequence[int], backend: str, error: RuntimeError) -> CommError:
    """Return an error that says who cannot be connected over a backend, and what that says."""
    return CommError(
        f"rank {group.rank()} cannot connect to ranks {ranks_of(group, members)} over {backend} once more, "
        f"for messages beside those of the process group. The backend says: {error}"
    )


def ranks_of(group: dist.ProcessGroup, members: Sequence[int]) -> list[int]:
    """Return the numbers that some ranks of a group have in the default one."""
    ranks = dist.get_process_group_ranks(group)
    return [ranks[each] for each in members]


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
