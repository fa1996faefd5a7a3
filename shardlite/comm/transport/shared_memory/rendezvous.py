"""Rendezvous: the ranks of one host open each other's memory, through the file descriptors of the other processes.

    each rank    creates a heap, locks it, and publishes its process, descriptor and inode      (in the store)
    each rank    opens /proc/PROCESS/fd/DESCRIPTOR of the other ranks, and compares the inode
    all ranks    publish whether they succeeded: if a rank failed, no rank uses shared memory   (in the store)

Linux lets a process open this path only if it may read the memory of that process (`PTRACE_MODE_READ` in ptrace(2)). So
only processes of the same user and privileged processes can open the path. No rank listens on a socket, so other users
have nothing to connect to. Comparing the inode detects a later process that reuses the ID of an ended process.

A rank holds the lock until its process ends for any reason. Then the peers of the rank detect that the lock is free. A
forked child does not inherit the lock.
"""

import fcntl
import logging
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary, finalize

import torch.distributed as dist

from shardlite.comm.control.store import TIMEOUT, all_gather_json
from shardlite.comm.transport.shared_memory.heap import Heap, Mapping, has_fixed_size
from shardlite.comm.transport.shared_memory.mailbox import control_nbytes, why_unavailable
from shardlite.comm.transport.shared_memory.transport import Neighbours
from shardlite.errors import LayoutError

log = logging.getLogger("shardlite")

_BOOT = "/proc/sys/kernel/random/boot_id"  # an ID of the running kernel
_NAMESPACES = ("/proc/self/ns/pid", "/proc/self/ns/user")

_Address = tuple[int, int, int, int]
"""Address of memory: process, descriptor, and the device and inode of the descriptor."""


@dataclass(frozen=True)
class Rendezvous:
    """Result of a rendezvous."""

    neighbours: Neighbours | None
    why_not: str
    """Why `neighbours` is `None`, or `""` if there are neighbours. The text is equal on every rank."""


_RENDEZVOUS: "WeakKeyDictionary[dist.ProcessGroup, Rendezvous]" = WeakKeyDictionary()
"""Results by group. If ranks are threads, each rank has its own group objects, so threads do not share entries."""


def rendezvous(group: dist.ProcessGroup, timeout: timedelta = TIMEOUT) -> Rendezvous:
    """Open the memory of the ranks of `group`, if all are on one host. Collective; the result is cached.

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
    node = hosts.count(hosts[0])
    if hosts != [host for host in dict.fromkeys(hosts) for _ in range(node)]:
        raise LayoutError(
            "algorithm='hierarchical' requires the same number of ranks on each host, numbered consecutively; "
            f"got {[str(host)[:8] for host in hosts]}"
        )
    return node


def _rendezvous(group: dist.ProcessGroup, timeout: timedelta) -> Rendezvous:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    heap, address, why_not = None, None, why_unavailable()
    if not why_not:
        try:
            heap = Heap(control_nbytes(world_size))
            address = _publish(heap)
        except OSError as error:
            why_not = f"this system provides no shared memory: {error}"
    rows = all_gather_json(group, (why_not, _reach(), address), "shared memory of one host", timeout)
    why_not = next((f"rank {r}: {row[0]}" for r, row in enumerate(rows) if row[0]), "")
    if why_not:  # a warning, because the user did not request `p2p` and might expect shared memory
        log.warning("no shared memory between the ranks of this host: %s", why_not)
    elif len({tuple(row[1]) for row in rows}) > 1:
        apart = len({row[1][0] for row in rows}) > 1
        why_not = f"the ranks are {'on several hosts' if apart else 'in several containers (namespaces) of one host'}"
    if why_not:
        return Rendezvous(None, why_not)
    assert heap is not None, "otherwise there is a reason"
    neighbours, failure = None, ""
    try:
        alive = _Alive()
        mappings = [heap if r == rank else Mapping(alive.open(r, address)) for r, (_, _, address) in enumerate(rows)]
        neighbours = Neighbours(rank, heap, mappings, alive)
    except OSError as error:
        failure = f"rank {rank} cannot open the memory of the others: {error}"
    failures = "; ".join(each for each in all_gather_json(group, failure, "memory of one host", timeout) if each)
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


def _reach() -> list[str]:
    """Return this process's host and namespaces. Processes with equal lists can open each other's descriptors.

    Containers on one host have separate namespaces, unless they share the namespaces of the host.
    """
    try:
        return [host_name(), *map(os.readlink, _NAMESPACES)]
    except OSError:
        return [host_name()]


def _publish(heap: Heap) -> _Address:
    """Lock a heap, so that peers can see that this process is alive, and return the address of the heap."""
    fcntl.lockf(heap.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    process = os.readlink("/proc/self")  # the number of this process in its namespace
    return int(process), heap.descriptor, *_identity(heap.descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


class _Alive:
    """Function that returns whether a peer's process is alive, from the lock on the peer's memory. Thread-safe."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}
        finalize(self, _close, self._descriptors).atexit = False

    def open(self, peer: int, address: _Address) -> int:
        """Open the memory of a rank, and return the descriptor.

        Raises:
            OSError: the memory cannot be opened, is not the memory of `peer`, or may change its size.
        """
        process, number, *identity = address
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        self._descriptors[peer] = descriptor
        if list(_identity(descriptor)) != identity or not has_fixed_size(descriptor):
            raise OSError(f"descriptor {number} of process {process} is not the memory of rank {peer}")
        return descriptor

    def __call__(self, peer: int) -> bool:
        try:
            fcntl.lockf(self._descriptors[peer], fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that several peers can ask
        except BlockingIOError:
            return True
        return False


def _close(descriptors: dict[int, int]) -> None:
    for each in descriptors.values():
        os.close(each)
