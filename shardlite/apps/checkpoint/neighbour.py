"""`save_in_memory`: each rank copies what it keeps into memory that outlives it, and to a rank of the next host.

    rank 0, host A    its memory, in the keeper of A  ----->  rank 2's keeper
    rank 1, host A    its memory, in the keeper of A  ----->  rank 3's keeper
    rank 2, host B    its memory, in the keeper of B  ----->  rank 0's keeper
    rank 3, host B    its memory, in the keeper of B  ----->  rank 1's keeper

On one host nothing is sent: the keeper outlives all ranks. Ranks that are started again look what their keepers hold,
and agree on the newest step that is there of every rank. What a host has lost comes back from the next one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import index
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from shardlite.apps.checkpoint.keeper import Agent, Keeper, KeeperError
from shardlite.apps.checkpoint.kept import Found, Kept, kept
from shardlite.apps.checkpoint.saving import Talk
from shardlite.apps.checkpoint.versions import Version, Versions
from shardlite.comm import host_name, over_gloo
from shardlite.errors import CheckpointError, CommError
from shardlite.model import ShardLite

log = logging.getLogger("shardlite")

SOURCE = "copies in memory"
"""What `load` says if it has taken them."""

_WHAT = "save_in_memory"


@torch.no_grad()
def save_in_memory(
    path: str | os.PathLike[str],
    model: ShardLite,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int,
) -> bool:
    """Copy a run into memory that outlives its ranks, so that a rank that dies costs no step.

    For ranks that `torchrun` starts again: `load` then takes the newest of these copies and the checkpoints in `path`.
    A copy has what `save` saves, in the form in which each rank keeps it. A process beside the ranks holds the newest
    two; it ends with `torchrun`, and the memory with it. With several hosts each rank also sends its copy to a rank of
    the next host. Ranks, stage, units and formats must be the same afterwards, or `load` takes a checkpoint.

    The first call is collective, and so is each call of ranks on several hosts. Other calls wait for no rank.

    Args:
        path: folder of the run's checkpoints, to which the copies belong. It need not exist.
        model: the wrapped model.
        optimizer: the model's optimizer.
        extra: as for `save`, of this rank.
        step: number of the copy, higher than that of the one before.

    Returns:
        Whether there is a copy. If none can be made (`torchrun` has not started the ranks, the memory does not
        suffice, the process that holds it is gone), a warning is logged once, and the training goes on without.

    Raises:
        CheckpointError: `extra` has something that loading could execute code for, or the optimizer is of another
            model; on every rank at the first call.
        CommError: a rank did not come to the call.
    """
    if (step := index(step)) < 0:
        raise ValueError(f"{_WHAT}: step must be at least 0, got {step}")
    key = key_of(path)
    known = _copies.get(model)
    if known is not None and known[0] == key:
        copies = known[1]
        return copies is not None and copies.save(kept(model, optimizer, extra, copies.talk.rank), step)
    talk = Talk(model)
    ours, _ = talk.agree(lambda: kept(model, optimizer, extra, talk.rank), _WHAT, tell=lambda _: None)
    copies = _begin(key, talk, ours)
    _copies[model] = key, copies
    return copies is not None and copies.save(ours, step)


_copies: WeakKeyDictionary[ShardLite, tuple[str, Copies | None]] = WeakKeyDictionary()
"""The copies of each model, and of which run they are. `None`: there are none, and a warning has said why."""


def key_of(path: str | os.PathLike[str]) -> str:
    """Return the name of a run in the keepers."""
    return hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]


def _begin(key: str, talk: Talk, ours: Kept) -> Copies | None:
    """Prepare for copies of this size. Collective."""
    copies = None
    try:
        copies = Copies.open(key, talk, _look(key, talk))
        copies.settle(None, ours.nbytes)
    except CheckpointError as error:
        if copies is not None:
            copies.drop()
        if talk.rank == 0:
            log.warning("there are no copies in memory: %s", error)
        return None
    return copies


# ---- who keeps what -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nodes:
    """Which ranks share a keeper."""

    names: Sequence[str]
    """Of the keeper of each rank."""

    @property
    def several(self) -> bool:
        """Whether there are several."""
        return len(set(self.names)) > 1

    def members(self, name: str) -> list[int]:
        """Return the ranks of a node."""
        return [rank for rank, each in enumerate(self.names) if each == name]

    def is_first(self, rank: int) -> bool:
        """Return whether a rank speaks for its node."""
        return self.names.index(self.names[rank]) == rank

    def guard_of(self, rank: int) -> int:
        """Return the rank that has a second copy: on the next node, at the same place; the rank itself if alone."""
        order = list(dict.fromkeys(self.names))
        name = self.names[rank]
        guards = self.members(order[(order.index(name) + 1) % len(order)])
        return guards[self.members(name).index(rank) % len(guards)] if self.several else rank

    def guests_of(self, rank: int) -> list[int]:
        """Return the ranks whose second copy a rank has."""
        return [each for each in range(len(self.names)) if each != rank and self.guard_of(each) == rank]


Held = Mapping[str, Sequence[tuple[int, int]]]
"""Steps of the versions in a keeper, and of how many ranks the run was, by rank."""


def newest(held: Sequence[Held]) -> tuple[int | None, str]:
    """Return the newest step that is there of every rank, or `None` and why there is none.

    Args:
        held: what the keeper of each rank holds.
    """
    size = len(held)
    of_ranks = [{step for each in held for step, ranks in each.get(str(r), ()) if ranks == size} for r in range(size)]
    sizes = {ranks for each in held for versions in each.values() for _, ranks in versions}
    if common := set.intersection(*of_ranks):
        return max(common), ""
    if not sizes:
        return None, ""
    if others := sizes - {size}:
        return None, f"they are of {max(others)} ranks, and now there are {size}"
    lost = [rank for rank, steps in enumerate(of_ranks) if not steps]
    if lost:
        return None, f"there is none of rank {', '.join(map(str, lost))}"
    told = "; ".join(f"rank {rank} has {sorted(steps)}" for rank, steps in enumerate(of_ranks))
    return None, f"no step is whole on all ranks: {told}"


@dataclass(frozen=True)
class _Seen:
    """What one rank has found."""

    node: str
    held: Held
    why_not: str


def _look(key: str, talk: Talk) -> list[_Seen]:
    """Return what each rank's keeper holds. Collective. Starts no keeper."""

    def look() -> _Seen:
        try:
            agent = Agent.of_this_process()
        except OSError as error:
            return _Seen("", {}, str(error))
        return _Seen(f"{host_name()}/{agent.pid}/{agent.start}", _held(agent, key), "")

    _, told = talk.agree(look, "copies in memory", tell=lambda seen: list(vars(seen).values()))
    return [_Seen(*each) for each in told]


def _held(agent: Agent, key: str) -> dict[str, list[tuple[int, int]]]:
    """Return the versions of a run in the keeper of this rank, if there is one."""
    try:
        keeper = Keeper(agent)
    except KeeperError:
        return {}
    held: dict[str, list[tuple[int, int]]] = {}
    for name in keeper.names():
        descriptor = keeper.give(name) if name.startswith(key) else None
        if descriptor is not None:
            whole = Versions(descriptor).whole().values()
            held[name.removeprefix(f"{key}/")] = [(each.step, each.ranks) for each in whole]
    keeper.close()
    return held


# ---- copies ---------------------------------------------------------------------------------------------------------


class Copies:
    """The copies of one run in memory, as one of its ranks has them."""

    def __init__(self, key: str, talk: Talk, seen: Sequence[_Seen]) -> None:
        self.key, self.talk = key, talk
        self._seen = seen
        self._nodes = Nodes([each.node for each in seen])
        self._keeper = Keeper(Agent.of_this_process())
        self._own = self._versions_of(talk.rank)
        self._guests = {rank: self._versions_of(rank) for rank in self._nodes.guests_of(talk.rank)}
        self._wire: Any = None
        self._warned = False
        self._latest = -1

    @classmethod
    def open(cls, key: str, talk: Talk, seen: Sequence[_Seen]) -> Copies:
        """Start keepers where there are none, and take or make the memory that they hold. Collective.

        Raises:
            CheckpointError: on every rank, if it is not possible on one of them.
        """
        if why_not := next((each.why_not for each in seen if each.why_not), ""):
            raise CheckpointError(why_not)
        first = Nodes([each.node for each in seen]).is_first(talk.rank)
        start = (lambda: Keeper.start(Agent.of_this_process()).close()) if first else (lambda: None)
        talk.agree(start, _WHAT, tell=lambda _: None)
        copies, _ = talk.agree(lambda: cls(key, talk, seen), _WHAT, tell=lambda _: None)
        if copies._nodes.several:
            _, names = talk.agree(lambda: secrets.token_hex(8), _WHAT, tell=str)
            with _named("connect to the ranks of other hosts"):
                copies._wire = over_gloo(names[0], talk.rank, talk.size, talk.timeout)
        return copies

    def _name_of(self, rank: int) -> str:
        return f"{self.key}/{rank}"

    def _versions_of(self, rank: int) -> Versions:
        """Return the memory of a rank's copies, which the keeper of this rank holds."""
        descriptor = self._keeper.give(self._name_of(rank))
        if descriptor is not None:
            return Versions(descriptor)
        made = Versions.make()
        self._keeper.keep(self._name_of(rank), made.descriptor)
        return made

    def settle(self, step: int | None, nbytes: int = 0) -> None:
        """Drop all versions except those of `step`, and take memory for new ones of `nbytes`. Collective.

        No rank begins a new version before: versions of one step are of one attempt on all ranks.

        Raises:
            CheckpointError: on every rank, if there is not enough memory on one of them.
        """
        rank = self.talk.rank

        def drop() -> None:
            if self._nodes.is_first(rank):
                members = self._nodes.members(self._nodes.names[rank])
                held = {*members, *(guest for member in members for guest in self._nodes.guests_of(member))}
                self._keeper.keep_only([self._name_of(each) for each in held], f"{self.key}/")
            for versions in (self._own, *self._guests.values()):
                versions.keep(step)
            self._own.reserve(nbytes)

        self.talk.agree(drop, _WHAT, tell=lambda _: None)
        self._latest = -1 if step is None else step

    def drop(self) -> None:
        """Let the keeper give the memory back."""
        with suppress(KeeperError):
            self._keeper.keep_only([], f"{self.key}/")

    def save(self, ours: Kept, step: int) -> bool:
        """Copy what this rank keeps. Return whether there is a copy that outlives this process."""
        if step <= self._latest:
            raise ValueError(f"{_WHAT}: step must be higher than that of the copy before, {self._latest}, got {step}")
        if not self._is_held():
            return False
        ours.copy_into(self._own.begin(ours.nbytes))
        self._own.end(Version(step, self.talk.size, ours.nbytes, ours.begin))
        self._latest = step
        if self._nodes.several:
            self._exchange(step)
        return True

    def _is_held(self) -> bool:
        """Whether copies outlive this host's ranks, or this host."""
        alive = self._keeper.is_alive
        if not alive and not self._warned:
            self._warned = True
            log.warning("rank %d: the process that holds copies in memory is gone", self.talk.rank)
        return alive or self._nodes.several

    # ---- between hosts ----------------------------------------------------------------------------------------------

    def _exchange(self, step: int) -> None:
        """Send this rank's copy to the rank that guards it, and receive those of its guests.

        Raises:
            CommError: it has failed. The connections are closed, so that the other ranks do not wait for this one.
        """
        if self._wire is None:
            raise CommError(
                f"{_WHAT}: the connections to ranks of other hosts were closed by an error: restart the run"
            )
        try:
            sent = self._send(self._own, step, self._nodes.guard_of(self.talk.rank))
            for rank, versions in self._guests.items():
                self._receive(versions, step, rank)
            self._wait(sent)
        except BaseException:
            self._wire = None
            raise

    def _send(self, versions: Versions, step: int, rank: int) -> list[Any]:
        """Begin to send a version: four numbers, and the bytes as they lie."""
        version = versions.whole()[step]
        head = torch.tensor([version.step, version.ranks, version.nbytes, version.objects])
        with _named(f"send a copy to rank {rank}"):
            return [head, *(self._wire.send([each], rank, 0) for each in (head, versions.content(step)))]

    def _receive(self, versions: Versions, step: int, rank: int) -> None:
        """Receive the version of a step into its place."""
        head = torch.empty(4, dtype=torch.int64)
        with _named(f"receive a copy from rank {rank}"):
            self._wire.recv([head], rank, 0).wait()
            version = Version(*map(int, head))
            if version.step != step:
                raise CommError(f"{_WHAT}: rank {self.talk.rank} copies step {step}, and rank {rank} {version.step}")
            self._wire.recv([versions.begin(version.nbytes)], rank, 0).wait()
        versions.end(version)

    def _wait(self, sent: Sequence[Any]) -> None:
        with _named("send a copy"):
            for work in sent[1:]:
                work.wait()

    # ---- after a restart --------------------------------------------------------------------------------------------

    def fetch(self, step: int) -> None:
        """Let each rank have its own version of `step`: from its keeper, or from a node that holds it. Collective."""
        here = self.talk.rank
        for rank in range(self.talk.size):
            holder = next(r for r in (rank, *range(self.talk.size)) if _has(self._seen[r].held, rank, step))
            if holder != rank and here == holder:
                self._wait(self._send(self._versions_of(rank), step, rank))
            elif holder != rank and here == rank:
                self._receive(self._own, step, holder)

    def found(self, step: int) -> Found:
        """Return this rank's own version of `step`."""
        return Found(self._own.content(step), self._own.whole()[step].objects)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Name what has failed.

    Raises:
        CommError: the process group has raised.
    """
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        raise CommError(f"{_WHAT}: cannot {what}: {error}") from error


@dataclass(frozen=True)
class Memory:
    """Copies that are whole on all ranks."""

    step: int
    key: str
    talk: Talk
    seen: Sequence[_Seen]

    def fetched(self) -> Copies:
        """Let every rank have its own. Collective.

        Raises:
            CheckpointError: on every rank, if one of them cannot take it.
        """
        copies = Copies.open(self.key, self.talk, self.seen)
        copies.fetch(self.step)
        copies.settle(self.step)
        return copies

    def leave(self, why: str) -> None:
        """Log why they are not taken."""
        _leave(self.talk, why)


def find(path: str | os.PathLike[str], model: ShardLite, talk: Talk) -> Memory | None:
    """Return the newest copies of a run, if all ranks have them. Otherwise log why, if there are any. Collective."""
    _copies.pop(model, None)  # they begin anew unless `load` takes them
    key = key_of(path)
    seen = _look(key, talk)
    step, why = newest([each.held for each in seen])
    if why:
        _leave(talk, why)
    return None if step is None else Memory(step, key, talk, seen)


def continue_with(model: ShardLite, copies: Copies) -> None:
    """Let a model that has taken up copies make the next ones in their memory."""
    _copies[model] = copies.key, copies


def _leave(talk: Talk, why: str) -> None:
    if talk.rank == 0:
        log.warning("load: the copies in memory are not taken: %s", why)


def _has(held: Held, rank: int, step: int) -> bool:
    return any(each == step for each, _ in held.get(str(rank), ()))
