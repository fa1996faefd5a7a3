"""The process groups of a model: ranks that shard it and, in hybrid sharding, ranks that hold the same shards."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlite.errors import LayoutError

GroupLike = dist.ProcessGroup | DeviceMesh | None
"""A group or a 1-D mesh to shard over, a 2-D mesh (replicate, shard), or `None` for the default group."""


@dataclass(frozen=True)
class Ranks:
    """The process groups of this rank."""

    shard: dist.ProcessGroup | None
    """The group whose ranks each keep a shard; `None` is the default group."""

    replicas: dist.ProcessGroup | None = None
    """The group whose ranks keep the same shard; `None` if there are no replicas."""

    @property
    def all(self) -> list[dist.ProcessGroup | None]:
        """Both groups, if there are two. Used one after the other, they reach every rank."""
        return [self.shard] if self.replicas is None else [self.shard, self.replicas]

    @property
    def shards(self) -> int:
        """Number of ranks that shard a model."""
        return dist.get_world_size(self.shard)

    @property
    def single_rank(self) -> bool:
        """Whether there is one rank only."""
        return all(dist.get_world_size(group) == 1 for group in self.all)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank whose initial values all others receive."""
        return all(dist.get_rank(group) == 0 for group in self.all)

    def carry(self, device_type: str) -> bool:
        """Return whether the groups have a backend for devices of this type."""
        return all(device_type in dist.get_backend_config(group) for group in self.all)


def ranks_of(ranks: GroupLike) -> Ranks:
    """Return the groups that `ranks` describes.

    Raises:
        LayoutError: there is no process group, this process is not a member, or a mesh has more than two dimensions.
        TypeError: `ranks` is of another type.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise LayoutError(
            "there is no process group: call torch.distributed.init_process_group() first, and start the ranks with "
            "`torchrun --nproc-per-node N script.py`"
        )
    if isinstance(ranks, DeviceMesh):
        if ranks.get_coordinate() is None:
            raise LayoutError(f"this process is not a member of {ranks}")
        if ranks.ndim == 1:
            return Ranks(ranks.get_group(0))
        if ranks.ndim == 2:
            return Ranks(ranks.get_group(1), ranks.get_group(0))
        raise LayoutError(f"a mesh must have one dimension (shard) or two (replicate, shard), got {ranks.ndim}")
    if not isinstance(ranks, dist.ProcessGroup | None) and ranks is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(f"group takes a ProcessGroup or a DeviceMesh, got {ranks!r}")
    if dist.get_rank(ranks) < 0:
        raise LayoutError("this process is not a member of the process group that it was given")
    return Ranks(ranks)
