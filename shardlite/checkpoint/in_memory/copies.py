"""`save_in_memory`: each rank copies its state into memory that outlives the rank, and sends it to the next host.

    rank 0, host A    snapshot, held on A  ----->  replica, held on B, received by rank 2
    rank 1, host A    snapshot, held on A  ----->  replica, held on B, received by rank 3
    rank 2, host B    snapshot, held on B  ----->  replica, held on A, received by rank 0
    rank 3, host B    snapshot, held on B  ----->  replica, held on A, received by rank 1

A snapshot is one rank's copy of its state. Processes that outlive the ranks hold the memory of snapshots
(`holder.py`), so a run on a single host sends no replicas. Restarted ranks compare the snapshots on their
hosts, and load the newest step that is complete on every rank. A host that has lost its snapshots receives them from
the next host.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from shardlite.checkpoint.contents import Run, check_run
from shardlite.checkpoint.in_memory.holder import Agent, Holder
from shardlite.checkpoint.in_memory.snapshot import Header, SavedSnapshot, Snapshot, SnapshotMemory
from shardlite.checkpoint.peers import Peers
from shardlite.comm.transport.gloo import GlooTransport, over_gloo
from shardlite.comm.transport.shared_memory.rendezvous import host_name
from shardlite.errors import CheckpointError, CommError, check_int, check_path
from shardlite.model import ShardLite

T = TypeVar("T")

log = logging.getLogger("shardlite")

SOURCE = "copies in memory"
"""The value of `Restored.source` if a snapshot was loaded."""

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
    """Copy a run into memory that outlives its ranks, so that no step is lost if a rank dies.

    This function is for programs that `torchrun` restarts. After the restart, `load` takes the newest of the copies in
    memory and the checkpoints in `path`. A copy has the same contents as a checkpoint, in the formats in which each
    rank keeps them. For each rank, a process on the rank's host holds the newest two copies. When `torchrun` ends, this
    process ends and its memory is freed. With several hosts, each rank also sends its copy to a rank of the next host.
    Ranks, stage, units and formats must be the same after the restart; otherwise `load` takes a checkpoint.

    The first call is collective. With several hosts, all calls are collective. On a single host, later calls wait for
    no other rank.

    Args:
        path: folder of the run's checkpoints, which identifies the run. It need not exist.
        model: the wrapped model.
        optimizer: the model's optimizer.
        extra: further values of this rank, as for `save`.
        step: number of the copy. It must be higher than that of the previous copy.

    Returns:
        Whether there is a copy. A warning is logged once if no copy can be made, because `torchrun` did not start the
        ranks, there is not enough memory, or the process that holds copies has ended.

    Raises:
        CheckpointError: `extra` has a value whose loading could execute code, or the optimizer belongs to a different
            model. The first call raises on every rank.
        DesyncError: a rank has skipped a step. Raised on every rank by the first call. `load` does not use copies of
            different steps.
        CommError: a rank did not call `save_in_memory`.
        TypeError, ValueError: an argument is invalid, for example a `step` that is not higher than that of the previous
            copy. In the first call, other ranks raise `CheckpointError`.

    Example:
        >>> save_in_memory("runs/first", model, optimizer, step=100)
        True
    """
    peers, run = Peers(model), Run(model, optimizer, extra)

    def check() -> None:
        check_int(f"{_WHAT}: step", step)
        check_path(_WHAT, path)
        check_run(_WHAT, run)

    known_key, copies = _copies.get(model, (None, None))
    if known_key is not None:
        check()
        if known_key == key_of(path):
            return copies is not None and copies.save(Snapshot(run, copies.peers.rank), step)
    snapshot, _ = peers.share(lambda: Snapshot(run, peers.rank), _WHAT, lambda _: None, check=check)
    key = key_of(path)
    try:
        copies = Copies(key, peers, _look(key, peers))
        copies.reset(None, snapshot.nbytes)
    except CheckpointError as error:
        copies = None
        if peers.rank == 0:
            log.warning("there are no copies in memory: %s", error)
    _copies[model] = key, copies
    return copies is not None and copies.save(snapshot, step)


_copies: WeakKeyDictionary[ShardLite, tuple[str, Copies | None]] = WeakKeyDictionary()
"""For each model the key of its run, and the copies of the run. The copies are `None` if no copies can be made."""


def key_of(path: str | os.PathLike[str]) -> str:
    """Return the key that identifies a run by its folder."""
    return hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]


# ---- snapshots on each host -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """The hosts of all ranks. Here a host is one agent of `torchrun` together with the ranks that it has started."""

    names: Sequence[str]
    """The name of the host of each rank."""

    @property
    def several(self) -> bool:
        """Whether there are several hosts."""
        return len(set(self.names)) > 1

    def members(self, name: str) -> list[int]:
        """Return the ranks of a host."""
        return [rank for rank, each in enumerate(self.names) if each == name]

    def replica_of(self, rank: int) -> int:
        """Return the rank that receives a replica of `rank`'s snapshot: the rank in the same position on the next host.

        Return `rank` itself if there is a single host.
        """
        if not self.several:
            return rank
        order = list(dict.fromkeys(self.names))
        name = self.names[rank]
        receivers = self.members(order[(order.index(name) + 1) % len(order)])
        return receivers[self.members(name).index(rank) % len(receivers)]

    def replicas_on(self, rank: int) -> list[int]:
        """Return the ranks whose replicas `rank` receives."""
        return [each for each in range(len(self.names)) if each != rank and self.replica_of(each) == rank]


Held = Mapping[str, Sequence[tuple[int, int, int]]]
"""The complete snapshots on a host, by rank. For each snapshot, its step, the number of ranks of its run, and the
version of its weights.
"""


def newest(held: Sequence[Held]) -> tuple[int, str]:
    """Return the newest step with complete snapshots of all ranks. If there is none, return -1 and the reason.

    Args:
        held: the snapshots on the host of each rank.
    """
    size = len(held)
    by_rank = [{(s, v) for each in held for s, ranks, v in each.get(str(r), ()) if ranks == size} for r in range(size)]
    sizes = {ranks for each in held for snapshots in each.values() for _, ranks, _ in snapshots}
    if common := set.intersection(*by_rank):
        return max(common)[0], ""
    if not sizes:
        return -1, ""
    if others := sizes - {size}:
        return -1, f"they are of {max(others)} ranks, but now there are {size}"
    lost = [rank for rank, steps in enumerate(by_rank) if not steps]
    if lost:
        return -1, f"there is no copy of rank {', '.join(map(str, lost))}"
    each = (", ".join(f"{step} (after {version} steps)" for step, version in sorted(steps)) for steps in by_rank)
    found = "; ".join(f"rank {rank} has {steps}" for rank, steps in enumerate(each))
    return -1, f"no step is complete on all ranks: {found}"


class _Seen(NamedTuple):
    """Facts about the host of one rank."""

    host: str
    held: Held
    why_not: str
    """The reason why the host cannot hold snapshots. Empty if it can."""


def _look(key: str, peers: Peers) -> list[_Seen]:
    """Return facts about the host of each rank. Collective."""

    def look() -> _Seen:
        try:
            agent = Agent.of_this_process()
        except OSError as error:
            return _Seen("", {}, str(error))
        return _Seen(f"{host_name()}/{agent.pid}/{agent.start}", held_by(agent, key), "")

    _, facts = peers.share(look, "copies in memory", list)
    return [_Seen(*each) for each in facts]


def held_by(agent: Agent, key: str) -> dict[str, list[tuple[int, int, int]]]:
    """Return the complete snapshots of a run on an agent's host."""
    held: dict[str, list[tuple[int, int, int]]] = {}
    for name, holder in agent.holders(key).items():
        with suppress(OSError):  # the holder has just ended
            headers = SnapshotMemory(holder.open()).complete().values()
            held[name.removeprefix(f"{key}/")] = [(each.step, each.ranks, each.version) for each in headers]
    return held


# ---- copies ---------------------------------------------------------------------------------------------------------


class Copies:
    """The copies of one run that this rank makes, receives and loads. Making this object is collective.

    Raises:
        CheckpointError: memory cannot be opened or allocated on a rank. Raised on every rank.
    """

    def __init__(self, key: str, peers: Peers, seen: Sequence[_Seen]) -> None:
        if why_not := next((each.why_not for each in seen if each.why_not), ""):
            raise CheckpointError(why_not)
        self.key, self.peers = key, peers
        self._seen = seen
        self._hosts = Hosts([each.host for each in seen])
        self._transport: GlooTransport | None = None
        self._warned = False
        self._latest = -1
        peers.agree(self._open, _WHAT)
        if self._hosts.several:
            _, names = peers.share(lambda: secrets.token_hex(8), _WHAT, str)
            connect = partial(over_gloo, names[0], peers.rank, peers.size, peers.timeout)
            backend = peers.agree(connect, f"{_WHAT}: connect to the ranks of other hosts")
            self._transport = GlooTransport(backend, peers.timeout)

    def _open(self) -> None:
        """Open or allocate the memory for this rank's snapshots, and for the replicas that this rank receives."""
        self._agent = Agent.of_this_process()
        self._holder, self.own = self._held(self.peers.rank)
        self._replicas = {rank: self._held(rank)[1] for rank in self._hosts.replicas_on(self.peers.rank)}

    def _held(self, rank: int) -> tuple[Holder, SnapshotMemory]:
        """Return the process that holds a rank's snapshots on this host, and the memory of these snapshots."""
        name = f"{self.key}/{rank}"
        if (holder := self._agent.holders(name).get(name)) is not None:
            return holder, SnapshotMemory(holder.open())
        memory = SnapshotMemory.allocate()
        return self._agent.hold(name, memory.descriptor), memory

    def reset(self, step: int | None, nbytes: int = 0) -> None:
        """Drop all snapshots except those of `step`, and allocate memory for new snapshots of `nbytes`. Collective.

        No rank starts a new snapshot before all ranks have dropped the others. So on all ranks, snapshots of the same
        step are of the same run.

        Raises:
            CheckpointError: a rank does not have enough memory. Raised on every rank; all snapshots were dropped.
        """
        members = self._hosts.members(self._hosts.names[self.peers.rank])
        held = {*members, *(each for member in members for each in self._hosts.replicas_on(member))}

        def drop() -> None:
            self.drop(held)
            for memory in (self.own, *self._replicas.values()):
                memory.drop_all_but(step)
            self.own.reserve(nbytes)

        try:
            self.peers.agree(drop, _WHAT)
        except CheckpointError:
            self.drop()
            raise
        self._latest = -1 if step is None else step

    def drop(self, remaining: Collection[int] = ()) -> None:
        """Free the memory of the run on this host, except the memory for the ranks in `remaining`."""
        kept = {f"{self.key}/{rank}" for rank in remaining}
        for name, holder in self._agent.holders(f"{self.key}/").items():
            if name not in kept:
                holder.end()

    def save(self, snapshot: Snapshot, step: int) -> bool:
        """Copy this rank's state. Return whether the copy outlives this process.

        Raises:
            CommError: a replica could not be sent or received.
            ValueError: the step is not higher than that of the previous copy.
        """
        if step <= self._latest:
            raise ValueError(f"{_WHAT}: step must be higher than that of the previous copy, {self._latest}, got {step}")
        if not self._is_held():
            return False
        snapshot.copy_into(self.own.overwrite_older(snapshot.nbytes))
        self.own.mark_complete(snapshot.header(step, self.peers.size))
        self._latest = step
        if self._hosts.several:
            self._exchange(step)
        return True

    def _is_held(self) -> bool:
        """Return whether copies outlive the ranks on this host. Warn once if their holder has ended."""
        alive = self._holder.is_alive
        if not alive and not self._warned:
            self._warned = True
            log.warning("rank %d: the process that holds copies in memory has ended", self.peers.rank)
        return alive or self._hosts.several

    # ---- between hosts ----------------------------------------------------------------------------------------------

    def _exchange(self, step: int) -> None:
        """Send a replica of this rank's snapshot, and receive the replicas of other ranks' snapshots.

        Raises:
            CommError: an exchange failed, now or earlier. The connections are closed, so that no other rank waits for
                this rank.
        """
        if (transport := self._transport) is None:
            raise CommError(
                f"{_WHAT}: the connections to ranks of other hosts were closed by an error: restart the run"
            )
        self._transport = None
        sent = _send(transport, self.own, step, self._hosts.replica_of(self.peers.rank))
        for rank, memory in self._replicas.items():
            self._receive(transport, memory, step, rank)
        for each in sent:
            each.wait()
        self._transport = transport

    def _receive(self, transport: GlooTransport, memory: SnapshotMemory, step: int, rank: int) -> None:
        """Receive the snapshot of `step` from `rank` into `memory`."""
        fields = torch.empty(len(Header._fields), dtype=torch.int64)
        transport.irecv(fields, rank, 0).wait()
        header = Header(*map(int, fields))
        if header.step != step:
            raise CommError(
                f"{_WHAT}: rank {self.peers.rank} copies step {step}, but rank {rank} copies step {header.step}"
            )
        transport.irecv(memory.overwrite_older(header.nbytes), rank, 0).wait()
        memory.mark_complete(header)

    # ---- after a restart --------------------------------------------------------------------------------------------

    def fetch(self, step: int) -> None:
        """Receive this rank's snapshot of `step` from another host, unless this rank's host holds it. Collective."""
        here, ranks, transport = self.peers.rank, range(self.peers.size), self._transport
        for rank in ranks:
            holders = (r for r in (rank, *ranks) if any(s == step for s, *_ in self._seen[r].held.get(str(rank), ())))
            holder = next(holders)
            if transport is None or holder == rank:
                continue
            if here == holder:
                for each in _send(transport, self._held(rank)[1], step, rank):
                    each.wait()
            elif here == rank:
                self._receive(transport, self.own, step, holder)


def _send(transport: GlooTransport, memory: SnapshotMemory, step: int, rank: int) -> list[Any]:
    """Start to send a snapshot: its header and its bytes. Return the sends, for which the caller must wait."""
    header = torch.tensor(memory.complete()[step])
    return [transport.isend(each, rank, 0) for each in (header, memory.content(step))]


def load_newest(key: str, run: Run, peers: Peers, least: int, restore: Callable[..., T]) -> T | None:
    """Load the newest step of which all ranks have copies, if the step is at least `least`. Collective.

    If the load succeeds, `save_in_memory` writes the next copies into the same memory.

    Args:
        key: key of the run.
        run: the model, optimizer and `extra` to load the copies into.
        peers: the model's ranks.
        least: lowest step to load.
        restore: function that loads a snapshot. Its arguments are a function that returns the snapshot, the snapshot's
            source, `run` and `peers`.

    Returns:
        The result of `restore`; `None` if there are no such copies. Rank 0 warns if other copies are found.
    """
    _copies.pop(run.model, None)
    seen = _look(key, peers)
    step, why_not = newest([each.held for each in seen])
    try:
        if why_not:
            raise CheckpointError(why_not)
        if step < least:
            return None
        copies = Copies(key, peers, seen)
        copies.fetch(step)
        copies.reset(step)
        restored = restore(lambda: SavedSnapshot(copies.own, step, run), SOURCE, run, peers)
    except CheckpointError as error:
        if peers.rank == 0:
            log.warning("load: the copies in memory are not used: %s", error)
        return None
    _copies[run.model] = key, copies
    return restored
