"""Only the ranks of a group can map a rank's memory, and no process of another user."""

import ctypes
import fcntl
import os
import subprocess
import sys
from datetime import timedelta

import pytest

from shardlite.comm.transport.shared_memory import rendezvous
from shardlite.comm.transport.shared_memory.heap import Heap, Mapping
from shardlite.comm.transport.shared_memory.rendezvous import _Alive, _publish
from tests.support.logs import logged
from tests.support.patience import seconds, until
from tests.support.ranks.scripts import IMPORTED_FROM

NEWNS, NEWPID = 0x00020000, 0x20000000
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change its user")


def meet(group):
    """Make the ranks of a group share memory, as for the first time."""
    return rendezvous._rendezvous(group, timedelta(seconds=seconds(30)))


# Another user.


def as_another_process(act, *, user=0, namespaces=0):
    """Run `act` in a child, as another user or in namespaces of its own; return what it returned, up to 64 bytes."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if namespaces and ctypes.CDLL(None, use_errno=True).unshare(namespaces) != 0:
                os.write(theirs, b"not allowed")
                os._exit(0)
            if user:
                os.setgid(user)
                os.setuid(user)
            if os.fork() != 0:  # who makes a namespace of processes is not in it, its children are
                os.wait()
                os._exit(0)
            os.write(theirs, act())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(child, 0)
    said = os.read(ours, 64)
    os.close(ours)
    return said


def opened(address):
    """Return `b"yes"` if this process can open memory, else what prevents it."""
    try:
        _Alive().open(0, address)
    except OSError as error:
        return type(error).__name__.encode()
    return b"yes"


@as_root
def test_another_user_cannot_open_memory():
    heap = Heap(4096)
    address = _publish(heap)
    assert as_another_process(lambda: opened(address)) == b"yes"
    assert as_another_process(lambda: opened(address), user=NOBODY) == b"PermissionError"


@as_root
def test_a_container_has_another_reach():
    there = as_another_process(lambda: rendezvous._reach()[1].encode(), namespaces=NEWNS | NEWPID)
    if there == b"not allowed":
        pytest.skip("this system makes no namespaces")
    assert there != rendezvous._reach()[1].encode()


# Memory.


def test_memory_is_opened_by_its_address():
    heap, watch = Heap(4096), _Alive()
    mapping = Mapping(watch.open(1, _publish(heap)))
    heap.words(0, 1)[0] = 7
    assert mapping.words(0, 1)[0] == 7
    assert mapping.nbytes == heap.nbytes


def test_other_memory_under_the_same_numbers_is_refused():
    """As if a rank had ended, and a later process had its number."""
    heap, other = Heap(4096), Heap(4096)
    process, number, *_ = _publish(heap)
    with pytest.raises(OSError, match=f"descriptor {number} of process {process} is not the memory of rank 1"):
        _Alive().open(1, (process, number, *rendezvous._identity(other.descriptor)))


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_memory_whose_size_may_change_is_refused(seals):
    loose = Heap(4096)
    descriptor = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 8192)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    loose.descriptor = descriptor
    with pytest.raises(OSError, match=f"descriptor {descriptor} of process .* is not the memory of rank 1"):
        _Alive().open(1, _publish(loose))
    os.close(descriptor)


def test_a_heap_keeps_its_size():
    heap = Heap(4096)
    for size in (0, heap.nbytes - 4096, heap.nbytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(heap.descriptor, size)


# The end of a process.

_RANK = """
import os, sys
from shardlite.comm.transport.shared_memory.heap import Heap
from shardlite.comm.transport.shared_memory.rendezvous import _publish
heap = Heap(4096)
print(*_publish(heap), flush=True)
child = os.fork()  # as of a data loader: it has the descriptor, too
sys.stdin.read()
"""


def test_a_process_that_is_killed_is_noticed_though_its_child_lives():
    paths = {"PYTHONPATH": os.pathsep.join(map(str, IMPORTED_FROM))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ | paths}
    with subprocess.Popen([sys.executable, "-c", _RANK], **pipes) as rank:
        assert rank.stdout is not None
        alive = _Alive()
        alive.open(1, tuple(map(int, rank.stdout.readline().split())))
        assert alive(1)
        rank.kill()
        until(lambda: not alive(1), "the end of a process")


def test_a_forked_child_ends_nothing():
    """The child closes the descriptors of its parent when it ends."""
    heap = Heap(4096)
    address = _publish(heap)
    as_another_process(lambda: b"")

    def look():
        watch = _Alive()
        watch.open(0, address)
        return b"alive" if watch(0) else b"gone"

    assert as_another_process(look) == b"alive"


# What is said of it.


def test_less_than_was_asked_for_is_a_warning(group):
    """Rank 1 gets no memory."""

    def refuse(heap: Heap) -> None:
        raise OSError("too many open files")

    with logged() as messages, pytest.MonkeyPatch.context() as patch:
        if group.rank() == 1:
            patch.setattr(rendezvous, "_publish", refuse)
        why_not = meet(group).why_not
    assert why_not == "rank 1: this system provides no shared memory: too many open files"
    assert messages == [f"no shared memory between the ranks of this host: {why_not}"]
