"""Rendezvous: the ranks of one host exchange descriptors of their memory over sockets without a file.

    each rank    makes a heap and a listening socket, and publishes its address            (by the store)
                 and a part of the group's key
    each pair    connects, proves that it has the key, and exchanges the heaps' descriptors
    all ranks    publish whether that worked: if it failed on one, no rank uses it         (by the store)

The sockets stay open: when a process ends in any way, the system closes its sockets, which its peers detect. (A forked
child, for example of a data loader, would keep them open, so it closes them at once.)
"""

import hashlib
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch.distributed as dist

from shardlite.comm.control.store import TIMEOUT, all_gather_json
from shardlite.comm.shm import futex, handshake
from shardlite.comm.shm.heap import Heap, Mapping
from shardlite.comm.shm.mailbox import control_nbytes
from shardlite.comm.shm.transport import Neighbours
from shardlite.errors import LayoutError

log = logging.getLogger("shardlite")

_BOOT = "/proc/sys/kernel/random/boot_id"  # one per running kernel
_NETWORK = "/proc/self/ns/net"

_STRANGERS = 64
"""Number of foreign connections that may queue before a rank's connection has to wait."""

_PATIENCE = 20.0
"""Seconds for connecting two processes of one host."""


@dataclass(frozen=True)
class Rendezvous:
    """Result of a rendezvous."""

    neighbours: Neighbours | None
    why_not: str
    """Why `neighbours` is `None`, equal on every rank."""


_RENDEZVOUS: "WeakKeyDictionary[dist.ProcessGroup, Rendezvous]" = WeakKeyDictionary()
"""By group. A rank that is a thread has its own group objects, so no two threads use one entry."""


def rendezvous(group: dist.ProcessGroup, timeout: timedelta = TIMEOUT) -> Rendezvous:
    """Return the ranks of `group` as neighbours, if all are on one host. Collective; the result is cached.

    Raises:
        CommError: a rank did not arrive.
    """
    if group not in _RENDEZVOUS:
        _RENDEZVOUS[group] = _rendezvous(group, timeout)
    return _RENDEZVOUS[group]


def nodes_of(group: dist.ProcessGroup, timeout: timedelta = TIMEOUT) -> int:
    """Return the number of consecutive ranks on each host. Collective over `group`.

    Raises:
        LayoutError: hosts have different numbers of ranks, or the ranks of a host are not consecutive.
    """
    hosts = all_gather_json(group, host_name(), "which host each rank is on", timeout)
    node = next((i for i, host in enumerate(hosts) if host != hosts[0]), len(hosts))
    starts = hosts[::node]
    if (
        len(hosts) % node
        or hosts != [host for host in starts for _ in range(node)]
        or len(set(map(str, starts))) < len(starts)
    ):
        raise LayoutError(
            "algorithm='hierarchical' takes the same number of ranks on each host, in consecutive order; "
            f"got {[str(host)[:8] for host in hosts]}"
        )
    return node


def _rendezvous(group: dist.ProcessGroup, timeout: timedelta) -> Rendezvous:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    heap, listener, address, why_not = None, None, "", futex.why_not()
    if not why_not:
        try:
            heap = Heap(control_nbytes(world_size))
            listener = _listen(world_size)
            address = listener.getsockname().hex()
        except OSError as error:
            why_not = f"this system gives no shared memory: {error}"
    part = secrets.token_hex(handshake.NUMBER)
    rows = all_gather_json(group, (why_not, _reach(), address, part), "shared memory of one host", timeout)
    why_not = next((f"rank {r}: {row[0]}" for r, row in enumerate(rows) if row[0]), "")
    if why_not:  # `p2p` was not requested
        log.warning("no shared memory between the ranks of this host: %s", why_not)
    elif len({tuple(row[1]) for row in rows}) > 1:
        apart = len({row[1][0] for row in rows}) > 1
        why_not = f"the ranks are {'on several hosts' if apart else 'in several network namespaces of one host'}"
    if why_not:
        _close([] if listener is None else [listener])
        return Rendezvous(None, why_not)
    assert heap is not None, "or there was a reason"
    assert listener is not None, "or there was a reason"
    neighbours, failure = None, ""
    key = hashlib.sha256("".join(row[3] for row in rows).encode()).digest()
    deadline = time.monotonic() + min(_PATIENCE, timeout.total_seconds())
    try:
        neighbours = _connect(rank, heap, listener, [bytes.fromhex(row[2]) for row in rows], key, deadline)
    except OSError as error:
        failure = f"rank {rank} cannot connect to the others: {error}"
    failures = "; ".join(
        said for said in all_gather_json(group, failure, "connections within the host", timeout) if said
    )
    if failures:
        log.warning("no shared memory between the ranks of this host: %s", failures)
        return Rendezvous(None, failures)
    return Rendezvous(neighbours, "")


def host_name() -> str:
    """Return an identifier that is equal for all processes of this host."""
    try:
        with open(_BOOT) as boot:
            return boot.read().strip()
    except OSError:
        return socket.gethostname()


def _reach() -> tuple[str, str]:
    """Return a value that is equal for processes whose abstract sockets reach each other: host, network namespace.

    Containers of one host have namespaces of their own, unless they share the network of the host.
    """
    try:
        return host_name(), os.readlink(_NETWORK)
    except OSError:
        return host_name(), ""


def _listen(world_size: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0shardlite-" + secrets.token_hex(16).encode())  # abstract: it has no file
    listener.listen(world_size + _STRANGERS)
    return listener


def _connect(
    rank: int, heap: Heap, listener: socket.socket, addresses: Sequence[bytes], key: bytes, deadline: float
) -> Neighbours:
    """Exchange heaps with every other rank: connect to lower ranks, accept connections of higher ranks."""
    ends: dict[int, tuple[socket.socket, Mapping]] = {}
    with listener:
        try:
            for peer in range(rank):
                ends[peer] = handshake.connect(addresses[peer], rank, peer, key, heap, deadline)
            reception = handshake.Reception(listener, rank, set(range(rank + 1, len(addresses))), key, heap)
            ends |= reception.run(deadline)
        except BaseException:
            _close(end for end, _ in ends.values())
            raise
    if reception.refused:
        log.warning("rank %d closed %d connections from outside its group", rank, reception.refused)
    mappings = {rank: heap, **{peer: mapping for peer, (_, mapping) in ends.items()}}
    sockets = {peer: end for peer, (end, _) in ends.items()}
    return Neighbours(rank, heap, [mappings[r] for r in range(len(addresses))], _Watch(sockets))


class _Watch:
    """Detects the end of a peer's process by the socket that it holds open. Thread-safe."""

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._sockets = sockets
        finalize(self, _close, sockets.values())
        _watches.add(self)

    def forget(self) -> None:
        """Close this process's ends."""
        _close(self._sockets.values())

    def __call__(self, peer: int) -> bool:
        poll = select.poll()
        poll.register(self._sockets[peer], select.POLLHUP | select.POLLRDHUP)
        return not poll.poll(0)


_watches: "WeakSet[_Watch]" = WeakSet()


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _forget_all() -> None:
    for watch in list(_watches):
        watch.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
