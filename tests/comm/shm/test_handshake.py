"""Who gets a rank's memory: the ranks of its group and no other process, whatever it sends."""

import ctypes
import fcntl
import logging
import os
import secrets
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardlite.comm.shm import handshake, rendezvous
from shardlite.comm.shm.handshake import NUMBER, Reception, StrangerError
from shardlite.comm.shm.heap import Heap
from shardlite.comm.shm.rendezvous import _listen
from tests.support.patience import seconds

KEY = bytes(range(NUMBER))
OTHER = bytes(NUMBER)
NEWNS, NEWPID = 0x00020000, 0x20000000


def soon():
    return time.monotonic() + seconds(20)


def hello(rank=1, wants=0, magic=handshake._MAGIC):
    return handshake._HELLO.pack(magic, rank, wants, secrets.token_bytes(NUMBER))


def said_by_a_stranger(address, *words, wait=True):
    """Connect, say something, and return all that comes back, and how many descriptors."""
    heard, descriptors = b"", []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds(20))
        connection.connect(address)
        with suppress(BrokenPipeError):  # it was hung up on before
            for each in words:
                connection.sendall(each)
        while wait:
            try:
                more, new, _, _ = socket.recv_fds(connection, 256, 4)
            except ConnectionResetError:
                break
            heard, descriptors = heard + more, descriptors + new
            if not more:
                break
    return heard, descriptors


def was_hung_up_on(connection):
    connection.settimeout(seconds(20))
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def listening():
    """A rank 0 that waits for rank 1, and where."""
    heap, listener = Heap(4096), _listen(2)
    reception = Reception(listener, 0, {1}, KEY, heap)
    with ThreadPoolExecutor(1) as pool, listener:
        yield listener.getsockname(), reception, pool.submit(reception.run, soon())


def rank_1_comes(address, came):
    own = Heap(4096)
    connection, mapping = handshake.connect(address, 1, 0, KEY, own, soon())
    own.words(0, 1)[0] = 7
    ((rank, (other_end, seen)),) = came.result().items()
    assert rank == 1
    assert seen.words(0, 1)[0] == 7
    assert mapping.nbytes == own.nbytes
    connection.close()
    other_end.close()


@pytest.mark.parametrize(
    "words",
    [
        [b"GET / HTTP/1.1\r\n" + bytes(40)],
        [hello(magic=b"shardlt0")],
        [hello(rank=0)],
        [hello(rank=2)],
        [hello(rank=2**32 - 1)],
        [hello(wants=3)],
        [hello(), bytes(NUMBER)],
        [hello(), secrets.token_bytes(NUMBER)],
    ],
)
def test_strangers_get_nothing_and_ranks_come_all_the_same(listening, words):
    address, reception, came = listening
    heard, descriptors = said_by_a_stranger(address, *words)
    assert len(heard) in (0, 2 * NUMBER)
    assert descriptors == []
    rank_1_comes(address, came)
    assert reception.refused == 1


def test_who_says_nothing_or_half_or_hangs_up_holds_nobody_up(listening):
    address, reception, came = listening
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(20)]
    for i, each in enumerate(silent):
        each.connect(address)
        each.sendall(hello()[: i % 7])
    said_by_a_stranger(address, hello()[:10], wait=False)
    rank_1_comes(address, came)
    assert reception.refused == 1
    for each in silent:
        assert was_hung_up_on(each)
        each.close()


def test_a_rank_of_another_group_is_a_stranger(listening):
    address, reception, came = listening
    with pytest.raises(StrangerError, match="the process that answers for rank 0 does not have the key of the group"):
        handshake.connect(address, 1, 0, OTHER, Heap(4096), soon())
    rank_1_comes(address, came)
    assert reception.refused == 1


def test_who_connects_gives_nothing_to_a_stranger():
    """One that has taken a rank's place says what it likes; it sees no descriptor."""
    heard = []

    def stranger(listener):
        with listener.accept()[0] as connection:
            heard.append(connection.recv(1000))
            connection.sendall(secrets.token_bytes(2 * NUMBER))
            heard.append(socket.recv_fds(connection, 1000, 4))

    with _listen(2) as listener:
        thread = threading.Thread(target=stranger, args=(listener,))
        thread.start()
        with pytest.raises(StrangerError):
            handshake.connect(listener.getsockname(), 1, 0, KEY, Heap(4096), soon())
        thread.join()
    assert len(heard[0]) == handshake._HELLO.size
    assert heard[1][:2] == (b"", [])


def test_a_proof_is_of_no_use_twice(listening):
    """What a rank has said is heard and said again."""
    address, _, came = listening
    key = []
    proof = handshake._proof
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "_proof", lambda *given: key.append(proof(*given)) or key[-1])
        rank_1_comes(address, came)
    again = Reception(_listen(2), 0, {1}, KEY, Heap(4096))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(again.run, time.monotonic() + 1)
        _, descriptors = said_by_a_stranger(again._listener.getsockname(), hello(), key[-1])
        with pytest.raises(OSError, match="rank 1 did not connect in time; 1 foreign connections were closed"):
            running.result()
    assert descriptors == []
    again._listener.close()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_memory_whose_size_may_change_is_refused(listening, seals):
    address, reception, came = listening
    loose = Heap(4096)
    descriptor = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 8192)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    loose.descriptor = descriptor
    handshake.connect(address, 1, 0, KEY, loose, soon())[0].close()
    os.close(descriptor)
    rank_1_comes(address, came)
    assert reception.refused == 1


def test_a_heap_keeps_its_size():
    heap = Heap(4096)
    for size in (0, heap.nbytes - 4096, heap.nbytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(heap.descriptor, size)


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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change its user")
@pytest.mark.parametrize(
    "who", [{}, {"user": 65534}, {"namespaces": NEWNS | NEWPID}], ids=["same", "user", "container"]
)
def test_other_processes_get_nothing(listening, who):
    """Of the same user, of another one, and root of a container that shares the network."""
    address, reception, came = listening

    def intrude():
        heard, descriptors = said_by_a_stranger(address, hello(), bytes(NUMBER))
        return struct.pack("<II", len(heard), len(descriptors))

    said = as_another_process(intrude, **who)
    if said == b"not allowed":
        pytest.skip("this system makes no namespaces")
    answered, descriptors = struct.unpack("<II", said)
    assert descriptors == 0
    assert answered == (0 if "user" in who else 2 * NUMBER)
    rank_1_comes(address, came)
    assert reception.refused == 1


def without_sockets_body(group):
    """Meet where rank 1 gets no socket; return why ranks share no memory, and what is logged of it."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("shardlite").addHandler(handler)
    listen = rendezvous._listen

    def refuse(world_size: int) -> socket.socket:
        raise OSError("too many open files")

    try:
        if group.rank() == 1:
            rendezvous._listen = refuse
        met = rendezvous.rendezvous(dist.new_group(list(range(group.size()))), timedelta(seconds=seconds(30)))
    finally:
        rendezvous._listen = listen
        logging.getLogger("shardlite").removeHandler(handler)
    return met.why_not, [(record.levelname, record.getMessage()) for record in records]


def test_less_than_was_asked_for_is_a_warning(cluster):
    for why_not, logged in cluster.run(without_sockets_body, 2):
        assert why_not == "rank 1: this system gives no shared memory: too many open files"
        assert logged == [("WARNING", f"no shared memory between the ranks of this host: {why_not}")]
