"""What ranks tell each other before they do something together: control messages, by `torch.distributed`."""

import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardlite.errors import LayoutError
from shardlite.transport import Groups

_latest: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()
"""The number of the model that this rank has wrapped last, by its default process group: a process may have several."""


def agree(groups: Groups, facts: Sequence[str], problem: Exception | None) -> None:
    """Make sure that what all ranks are about to do is the same, and that none has a `problem`.

    A rank with a problem takes part, so that no other rank waits for it in vain. Ranks are numbered within their group.

    Raises:
        LayoutError: some other rank has a problem, or a rank differs from rank 0; on every rank.
        Exception: `problem` itself, on the rank that has it.
    """
    trouble = None if problem is None else str(problem)
    for group in groups.all:
        everyone: list[tuple[list[str], str | None]] = [([], None)] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (list(facts), trouble), group=group)
        trouble = trouble or _trouble(everyone)
    if problem is not None:
        raise problem
    if trouble is not None:
        raise LayoutError(trouble)


def lend(groups: Groups, mine: Any) -> Any:
    """Return what the first rank that has something lends to all others; `None` on a rank that has nothing.

    Raises:
        LayoutError: nobody has anything that can be pickled; on every rank.
    """
    found: Any = None
    with suppress(Exception):  # what cannot be pickled cannot be lent
        found = None if mine is None else pickle.dumps(mine)
    for group in groups.all:
        told: list[bytes | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, found, group=group)
        found = next((each for each in told if each is not None), None)
    if found is None:
        raise LayoutError("a rank has no batch at all, and those of the others cannot be pickled to lend it one")
    return pickle.loads(found)


def _trouble(everyone: Sequence[tuple[list[str], str | None]]) -> str | None:
    """Return what is wrong with some rank of a group."""
    for rank, (theirs, trouble) in enumerate(everyone):
        if trouble is not None:
            return f"rank {rank}: {trouble}"
        if theirs != everyone[0][0]:
            return f"ranks wrapped different models: {_first_difference(everyone[0][0], theirs, rank)}"
    return None


def number(groups: Groups) -> tuple[int, int]:
    """Return a number for a wrapped model that is the same on all ranks and new on each of them, and its first rank.

    The two together are a name in the whole world.
    """
    world = dist.group.WORLD
    assert world is not None, "models are wrapped over process groups"
    highest, first = _latest.get(world, 0) + 1, dist.get_rank()
    for group in groups.all:
        told = [(highest, first)] * dist.get_world_size(group)
        dist.all_gather_object(told, (highest, first), group=group)
        highest, first = max(n for n, _ in told), min(rank for _, rank in told)
    _latest[world] = highest
    return highest, first


def _first_difference(expected: Sequence[str], got: Sequence[str], rank: int) -> str:
    for ours, theirs in zip(expected, got, strict=False):
        if ours != theirs:
            return f"rank 0 has {ours}, rank {rank} has {theirs}"
    return f"rank 0 has {len(expected)} entries, rank {rank} has {len(got)}"
