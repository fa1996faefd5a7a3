"""Agreement of ranks before a common action: that all do the same, and that none has an error.

In: facts as strings, and this rank's error. Out: the same result on every rank, or an error on every rank.
"""

import hashlib
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardlite.comm.control.store import TIMEOUT, all_gather_json
from shardlite.comm.transport.groups import Ranks
from shardlite.errors import LayoutError

_latest: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()
"""The number of the model wrapped last on this rank, by default process group: a process may have several."""


def agree(
    groups: Ranks, facts: Sequence[str], problem: Exception | None, *, what: str, timeout: timedelta = TIMEOUT
) -> None:
    """Check that all ranks are about to do the same, and that none has a `problem`.

    A rank with a problem takes part, so that no other rank waits for it. Ranks are numbered within their group.

    Raises:
        LayoutError: another rank has a problem, or a rank differs from rank 0; on every rank.
        CommError: a rank did not arrive at `what` within `timeout`.
        Exception: `problem` itself, on its own rank.
    """
    trouble = None if problem is None else str(problem)
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    for group in groups.all:
        rows = all_gather_json(group, (trouble, digest), what, timeout)
        troubled = next((f"rank {rank}: {said}" for rank, (said, _) in enumerate(rows) if said is not None), None)
        if troubled is None and len({each for _, each in rows}) > 1:
            troubled = _first_difference(all_gather_json(group, list(facts), what, timeout))
        trouble = trouble or troubled
    if problem is not None:
        raise problem
    if trouble is not None:
        raise LayoutError(trouble)


class Identity(NamedTuple):
    """The identity of a wrapped model, equal on all its ranks."""

    number: int
    """A number that is new on each of its ranks."""

    first: int
    """Its first rank. Together with the number it is unique in the whole world."""

    mark: str
    """A random string: the store may outlive the processes of a failed run, and serve the next run."""


def identify(groups: Ranks, timeout: timedelta = TIMEOUT) -> Identity:
    """Return the identity of a model that all its ranks wrap now."""
    world = dist.group.WORLD
    assert world is not None, "models are wrapped over process groups"
    own = Identity(_latest.get(world, 0) + 1, dist.get_rank(), secrets.token_hex(8))
    for group in groups.all:
        told = [Identity(*each) for each in all_gather_json(group, own, "the number of a model", timeout)]
        first = min(told, key=lambda each: each.first)
        own = first._replace(number=max(each.number for each in told))
    _latest[world] = own.number
    return own


def _first_difference(rows: Sequence[Sequence[str]]) -> str:
    """Name the first rank that differs from rank 0, and its first difference."""
    rank, theirs = next((rank, each) for rank, each in enumerate(rows) if each != rows[0])
    pairs = zip(rows[0], theirs, strict=False)
    lengths = f"{len(rows[0])} entries", f"{len(theirs)} entries"
    expected, got = next(((ours, other) for ours, other in pairs if ours != other), lengths)
    return f"ranks wrapped different models: rank 0 has {expected}, rank {rank} has {got}"
