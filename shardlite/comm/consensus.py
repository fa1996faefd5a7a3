"""What ranks tell each other before they do something together: whether it is the same, and has no problem."""

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
"""The number of the model that this rank has wrapped last, by its default process group: a process may have several."""


def agree(
    groups: Ranks, facts: Sequence[str], problem: Exception | None, *, what: str, timeout: timedelta = TIMEOUT
) -> None:
    """Make sure that what all ranks are about to do is the same, and that none has a `problem`.

    A rank with a problem takes part, so that no other rank waits for it in vain. Ranks are numbered within their group.

    Raises:
        LayoutError: some other rank has a problem, or a rank differs from rank 0; on every rank.
        CommError: a rank has not come to `what` within `timeout`.
        Exception: `problem` itself, on the rank that has it.
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
    """What tells a wrapped model from all others, the same on all of its ranks."""

    number: int
    """New on each of its ranks."""

    first: int
    """Its first rank. Together with the number it is a name in the whole world."""

    mark: str
    """Drawn at random: the store may outlive the processes of a run that has failed, and be that of the next one."""


def identify(groups: Ranks, timeout: timedelta = TIMEOUT) -> Identity:
    """Return what all ranks of a model that is wrapped now know it by."""
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
    """Say which rank is the first that differs from rank 0, and in what."""
    rank, theirs = next((rank, each) for rank, each in enumerate(rows) if each != rows[0])
    pairs = zip(rows[0], theirs, strict=False)
    lengths = f"{len(rows[0])} entries", f"{len(theirs)} entries"
    expected, got = next(((ours, other) for ours, other in pairs if ours != other), lengths)
    return f"ranks wrapped different models: rank 0 has {expected}, rank {rank} has {got}"
