"""The process groups of a model, and agreement of the model's ranks before a common action.

A rank belongs to the group of ranks that shard the model and, in hybrid sharding, to the group of ranks that hold the
same shards. Before a common action, ranks exchange facts (as strings) and errors. Then either all ranks continue, or
all ranks raise an error.
"""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlite.comm.control.store import TIMEOUT, Watch, all_gather_json
from shardlite.errors import DesyncError, LayoutError

GroupLike = dist.ProcessGroup | DeviceMesh | None
"""A group or 1-D mesh to shard over, a 2-D mesh (replicate, shard), or `None` for the default group."""


@dataclass
class WeightVersion:
    """Counter of the optimizer steps and loads that have changed a model's weights."""

    number: int = 0

    gathered: int = 0
    """Number of calls of `gathered()`, which may have changed weights without a new `number`."""

    partial: str = ""
    """Why some weights are of one step and others of the next. Empty if all are of one step."""

    def check(self) -> None:
        """Check that all weights are of one step.

        Raises:
            DesyncError: they are not.
        """
        if self.partial:
            raise DesyncError(
                f"some weights are of one step and others of the next, because {self.partial}: restart the run from "
                "its latest checkpoint"
            )


@dataclass(frozen=True)
class Ranks:
    """The process groups of this rank."""

    shard: dist.ProcessGroup | None
    """The group of ranks that shard the model; `None` is the default group."""

    replicas: dist.ProcessGroup | None = None
    """The group of ranks that hold the same shard; `None` if there are no replicas."""

    @property
    def all(self) -> list[dist.ProcessGroup | None]:
        """All groups of this rank. A collective over one group after the other reaches every rank."""
        return [self.shard] if self.replicas is None else [self.shard, self.replicas]

    @property
    def shards(self) -> int:
        """Number of ranks that shard a model."""
        return dist.get_world_size(self.shard)

    @property
    def single_rank(self) -> bool:
        """Whether there is only one rank."""
        return all(dist.get_world_size(group) == 1 for group in self.all)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank whose initial values all other ranks receive."""
        return all(dist.get_rank(group) == 0 for group in self.all)

    def carry(self, device_type: str) -> bool:
        """Return whether the groups have a backend for devices of this type."""
        return all(device_type in dist.get_backend_config(group) for group in self.all)


def ranks_of(ranks: GroupLike) -> Ranks:
    """Return the process groups that `ranks` describes.

    Raises:
        LayoutError: there is no process group, this process is not a member, or a mesh has more than two dimensions.
        TypeError: `ranks` has an invalid type.
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


def collectives_of_program() -> int:
    """Return the number of collectives that were started over the default process group, or 0 if this is unknown."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    try:
        return 0 if group is None else group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except RuntimeError:  # the backend does not count
        return 0


_latest: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()
"""For each default process group: number of the model that this rank wrapped most recently.

A process may have several default process groups.
"""


def agree(
    groups: Ranks,
    facts: Sequence[str],
    problem: Exception | None,
    *,
    what: str,
    timeout: timedelta = TIMEOUT,
    subject: str = "models",
    watch: Watch = lambda _: nullcontext(str),
    version: WeightVersion | None = None,
    loads: bool = False,
) -> None:
    """Check that all ranks have the same facts, and that no rank has a `problem`. Collective.

    A rank with a problem must also call this function, so that other ranks do not wait for this rank. Errors name a
    rank by its number in its group. `watch` is that of a model that the ranks share, as for `all_gather_json`.
    `version` counts the changes of the model's weights. If `loads` is false, the ranks are about to read the weights,
    so their versions must be equal. If `loads` is true, the ranks are about to replace the weights, and all ranks adopt
    the highest version.

    Raises:
        LayoutError: another rank has a problem, or the facts of a rank differ from rank 0's. Raised on every rank that
            has no problem itself.
        DesyncError: the weights of the ranks have different versions. Raised on every rank.
        CommError: a rank did not arrive at `what` within `timeout`.
        Exception: `problem`. Raised only on the rank that passed it.
    """
    if problem is None and version is not None and not loads:
        problem = problem_in(version.check)
    found = None if problem is None else str(problem)
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    newest = 0 if version is None else version.number
    for group in groups.all:
        rows = all_gather_json(group, (found, digest, newest), what, timeout, watch=watch)
        reported = next((f"rank {rank}: {error}" for rank, (error, *_) in enumerate(rows) if error is not None), None)
        if reported is None and len({each for _, each, _ in rows}) > 1:
            reported = _first_difference(all_gather_json(group, list(facts), what, timeout), subject)
        found = found or reported
        versions = [each for *_, each in rows]
        if problem is None and found is None and not loads:
            problem = problem_in(partial(check_versions, what, versions))
            found = None if problem is None else str(problem)
        newest = max(versions)
    if problem is not None:
        raise problem
    if found is not None:
        raise LayoutError(found)
    if version is not None:
        version.number = newest


def check_versions(what: str, versions: Sequence[int]) -> None:
    """Check that the weights of all ranks have the same version before the call `what` reads the weights.

    Raises:
        DesyncError: the versions differ, because a rank has skipped a step.
    """
    rank = next((rank for rank, each in enumerate(versions) if each != versions[0]), 0)
    if rank:
        raise DesyncError(
            f"{what}: rank 0 has taken {versions[0]} steps, but rank {rank} has taken {versions[rank]}: a rank has "
            "skipped a step, or its step has raised an error. So the weights of the ranks are of different steps. "
            "Load weights on every rank, by load() or load_full_state_dict(), or restart the run. Before that, nothing "
            "is saved"
        )


def problem_in(*checks: Callable[[], object]) -> Exception | None:
    """Return the first error that the checks raise, for `agree`, or `None`."""
    try:
        for check in checks:
            check()
    except Exception as error:  # other ranks wait for this rank, whatever it is
        return error
    return None


class Identity(NamedTuple):
    """The identity of a wrapped model, equal on all its ranks."""

    number: int
    """A number that no other model has on any rank of this model."""

    first: int
    """First rank of the model. Number and first rank together are unique in the world."""

    mark: str
    """A random string, needed because the store may outlive the processes of a failed run and serve the next run."""


def identify(groups: Ranks, timeout: timedelta = TIMEOUT) -> Identity:
    """Return a new identity for the model that all ranks of `groups` are wrapping. Collective."""
    world = dist.group.WORLD
    assert world is not None, "models are wrapped over process groups"
    own = Identity(_latest.get(world, 0) + 1, dist.get_rank(), secrets.token_hex(8))
    for group in groups.all:
        everyone = [Identity(*each) for each in all_gather_json(group, own, "the number of a model", timeout)]
        first = min(everyone, key=lambda each: each.first)
        own = first._replace(number=max(each.number for each in everyone))
    _latest[world] = own.number
    return own


def _first_difference(rows: Sequence[Sequence[str]], subject: str) -> str:
    """Describe the first difference between rank 0 and the first rank that differs from rank 0."""
    rank, theirs = next((rank, each) for rank, each in enumerate(rows) if each != rows[0])
    pairs = zip(rows[0], theirs, strict=False)
    lengths = f"{len(rows[0])} entries", f"{len(theirs)} entries"
    verb = {"models": "wrapped", "files": "read", "calls": "made"}.get(subject, "built")
    expected, got = next(((ours, other) for ours, other in pairs if ours != other), lengths)
    return f"ranks {verb} different {subject}: rank 0 has {expected}, rank {rank} has {got}"
