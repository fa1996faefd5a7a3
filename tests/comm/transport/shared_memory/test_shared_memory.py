"""Messages in shared memory between ranks of one host: mailboxes and rendezvous. Most tests have ranks in one process.

See `test_faults.py` for ranks that die, `test_soak.py` for many messages at once.
"""

import gc
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from shardlite.comm.transport.select import connect
from shardlite.comm.transport.shared_memory import mailbox, rendezvous
from shardlite.comm.transport.shared_memory.heap import Heap, Mapping
from shardlite.comm.transport.shared_memory.mailbox import PLACES, Announcement, Control, Receipts, control_nbytes
from shardlite.comm.transport.shared_memory.transport import Neighbours, SharedMemoryTransport
from shardlite.config import Route
from shardlite.errors import CommError, LayoutError
from tests.support.patience import seconds

PAGE = 4096
PATIENT = timedelta(seconds=seconds(60))
AMPLE = timedelta(seconds=seconds(20))  # for what ends at once
CPU = torch.device("cpu")


def world(size, alive=lambda peer: True, limit=AMPLE):
    """Ranks that see each other's memory as processes do: each maps it for itself."""
    heaps = [Heap(control_nbytes(size)) for _ in range(size)]
    return [
        SharedMemoryTransport(
            Neighbours(r, heaps[r], [h if h is heaps[r] else Mapping(h.descriptor) for h in heaps], alive), limit
        )
        for r in range(size)
    ]


def test_a_message_stays_until_it_is_given_back():
    first, second = world(2)
    sent = first.empty(PAGE, CPU).fill_(7)
    heap = first._neighbours.heap
    place = heap.offset_of(sent)
    departing = first.isend(sent, 1, tag=3)
    del sent, departing  # as who does not wait
    loan = second.borrow(PAGE, torch.uint8, 0, tag=3)
    lent = loan.look()
    others = [first.empty(PAGE, CPU).fill_(1) for _ in range(4)]
    assert place not in [heap.offset_of(each) for each in others]
    assert (lent == 7).all()
    loan.give_back()


# Mailboxes.


def controls():
    """Rank 1's words, as rank 1 and rank 0 see them."""
    heap = Heap(control_nbytes(2))
    return Control(heap, 1, 2), Control(Mapping(heap.descriptor), 0, 2)


def announcement(number):
    return Announcement(number, number % 7, 0xFFFFFFFF, offset=number << 30, nbytes=3 * number, receipt=number << 2)


@pytest.mark.parametrize("first", [1, 2**32 - 2 * PLACES])
def test_announcements_arrive_in_order_and_outgrow_places_and_words(first):
    mine, theirs = controls()
    mine._words[mailbox._FIRST] = first - 1  # as if all before had been read
    for number in range(first, first + 3 * PLACES):
        assert mine.read(0, number) is None
        heard = mine.bell()
        assert theirs.announce(announcement(number)), "so the user must ring"
        theirs.ring()
        assert mine.bell() != heard
        assert mine.read(0, number) == announcement(number)
        assert mine.read(0, number + PLACES) is None
        assert theirs.has_place(number + PLACES)
        assert not theirs.has_place(number + PLACES + 1)


def test_any_number_of_receipts_is_signed_in_any_order():
    heap = Heap(control_nbytes(2))
    receipts, words = Receipts(heap, 2), Mapping(heap.descriptor).words(0, heap.nbytes // 4)
    numbers = [2**32 - 5 + i for i in range(5000)]
    places = {number: receipts.open(number) for number in numbers}
    assert len(set(places.values())) == len(numbers)
    Random(0).shuffle(numbers)
    for number in numbers:
        assert not receipts.is_signed(places[number], number)
        words[places[number] // 4] = number & 0xFFFFFFFF
        assert receipts.is_signed(places[number], number)
    for place in places.values():
        receipts.close(place)
    for number in numbers:
        place = receipts.open(number + 1)  # maybe that of the message before
        assert not receipts.is_signed(place, number + 1)
    assert receipts.nbytes == 4 * len(numbers), "they are used again"


def test_too_many_open_messages_are_an_error(monkeypatch):
    monkeypatch.setattr(mailbox, "RECEIPTS", 3)
    first, _ = world(2)
    departing = [first.isend(torch.ones(4), 1, tag=0) for _ in range(3)]
    with pytest.raises(CommError, match="3 messages of this rank are open"):
        first.isend(torch.ones(4), 1, tag=0)
    assert len(departing) == 3


@pytest.mark.parametrize("word", range(1, 10))
def test_a_damaged_header_is_noticed(word):
    mine, theirs = controls()
    theirs.announce(announcement(3))
    mine._words[mine._announcement(0, 3) + word] ^= 1 << (3 * word)
    with pytest.raises(ValueError, match="the header of its message 3 is damaged"):
        mine.read(0, 3)


def failure(action):
    with pytest.raises(CommError) as caught:
        action()
    return str(caught.value)


def test_a_damaged_header_ends_both_ranks():
    first, second = world(2)
    departing = first.isend(torch.ones(4), 1, tag=3)
    control = second._neighbours._mine
    control._words[control._announcement(0, 1) + 4] ^= 0xFF  # its offset
    arriving = second.irecv(torch.ones(4), 0, tag=3)
    here = "rank 1 receiving from rank 0 (4 elements of torch.float32, 16 bytes, tag 3) failed: "
    assert failure(arriving.wait) == f"{here}rank 0 sent unreadable data: the header of its message 1 is damaged"
    there = "rank 0 sending to rank 1 (4 elements of torch.float32, 16 bytes, tag 3) failed: "
    assert failure(departing.wait) == f"{there}rank 1 has given up, because an operation of it failed."


@pytest.mark.parametrize("beyond", [{"offset": 1 << 60}, {"nbytes": 1 << 60}, {"receipt": 1 << 60}, {"receipt": 4097}])
def test_a_message_outside_of_its_senders_heap_ends_both_ranks(beyond):
    first, second = world(2)
    told = Announcement(1, tag=3, kind=0, offset=8192, nbytes=16, receipt=4096)._replace(**beyond)
    first._neighbours._controls[1].announce(told)
    said = failure(second.irecv(torch.ones(4), 0, tag=3).wait)
    assert "rank 0 sent unreadable data: the header of its message 1 names bytes" in said
    assert first._neighbours._controls[1].has_quit


def test_a_message_may_be_kept_while_any_number_of_later_ones_are_taken():
    """As by two queues, each of which holds a loan until the other continues."""
    first, second = world(2)
    count = 3 * PLACES
    departing = [first.isend(torch.full((4,), float(i)), 1, tag=i) for i in range(count)]
    loan = second.borrow(4, torch.float32, 0, tag=0)
    assert not loan.look().any()
    arrived = [torch.empty(4) for _ in range(count)]
    arriving = [second.irecv(arrived[i], 0, tag=i) for i in range(1, count)]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(departing[-1].wait)  # a wait announces messages that had no place
        for each in reversed(arriving):
            each.wait()
        sent.result()
    assert [int(each[0]) for each in arrived[1:]] == list(range(1, count))
    assert not departing[0].was_taken()
    loan.give_back()
    for each in departing:
        each.wait()
    assert not first._neighbours._untaken


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize(("sent", "numel"), [(torch.float32, 5), (torch.float32, 3), (torch.int32, 4)])
def test_a_message_of_another_kind_is_noticed_by_both_ranks(sent, numel, lent):
    first, second = world(2)
    departing = first.isend(torch.ones(numel, dtype=sent), 1, tag=3)
    wait = second.borrow(4, torch.float32, 0, tag=3).look if lent else second.irecv(torch.ones(4), 0, tag=3).wait
    assert failure(wait).endswith(f"tag 3) failed: the peer sent {4 * numel} bytes of a different kind.")
    assert failure(departing.wait).endswith("rank 1 has given up, because an operation of it failed.")


def test_what_came_before_a_peer_went_is_received():
    """A process may end between two looks at what came."""
    ranks = world(2)
    went = threading.Event()

    def alive(peer):
        if not went.is_set():
            ranks[1].isend(torch.full((4,), 5.0), 0, tag=1)
            went.set()
        return False

    ranks[0]._neighbours._alive = alive
    received = torch.zeros(4)
    ranks[0].irecv(received, 1, tag=1).wait()
    assert_close(received, torch.full((4,), 5.0))
    assert failure(ranks[0].irecv(received, 1, tag=1).wait).endswith("rank 1 is gone: its process has ended.")


def test_what_a_peer_that_gave_up_has_sent_is_not_used():
    first, second = world(2, limit=timedelta(seconds=0.1))
    failure(first.isend(torch.ones(4), 1, tag=3).wait)
    said = failure(second.irecv(torch.zeros(4), 0, tag=3).wait)
    assert said.endswith("rank 0 has given up, because an operation of it failed.")


def test_more_messages_than_places_wait_for_nobody():
    """Ranks send all that they have before they take anything, as in a reduction of many chunks."""
    ranks, count = world(2), 2 * PLACES + 9

    def body(transport):
        peer = 1 - transport.rank
        loans = [transport.borrow(1, torch.float32, peer, tag=1) for _ in range(count)]
        departing = [transport.isend(torch.full((1,), float(i)), peer, tag=1) for i in range(count)]
        got = []
        for loan in loans:
            got.append(loan.look().item())
            loan.give_back()
        for each in departing:
            each.wait()
        return got

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(body, ranks)) == [[float(i) for i in range(count)]] * 2


def test_a_message_whose_place_is_wanted_is_not_taken_yet():
    first, _ = world(2, limit=timedelta(seconds=0.2))
    opened = first.isend(torch.ones(1), 1, tag=1)
    for _ in range(PLACES):
        first.isend(torch.ones(1), 1, tag=2)
    assert "nothing happened within 0.2 s" in failure(opened.wait)


# Whether it can be had.


@pytest.mark.parametrize(
    ("system", "machine", "reason"),
    [("darwin", "x86_64", "requires Linux, this is darwin"), ("win32", "AMD64", "requires Linux, this is win32"),
     ("linux", "aarch64", "which preserves the order of writes; this is aarch64"), ("linux", "x86_64", ""),
     ("linux", "AMD64", "")],
)  # fmt: skip
def test_which_machines_share_memory(monkeypatch, system, machine, reason):
    monkeypatch.setattr(mailbox.sys, "platform", system)
    monkeypatch.setattr(mailbox.platform, "machine", lambda: machine)
    assert mailbox.why_unavailable().endswith(reason)
    assert bool(mailbox.why_unavailable()) == bool(reason)


class Broken:
    """What is wrong on rank 1, by name."""

    def __init__(self, kind):
        self.kind = kind

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        set_to = self.patch.setattr
        if dist.get_rank() != 1:
            return
        match self.kind:
            case "host":
                set_to(rendezvous, "host_name", lambda: "elsewhere")
            case "namespaces":
                set_to(rendezvous, "_NAMESPACES", ["/proc/self/ns/net"])
            case "platform":
                set_to(mailbox.platform, "machine", lambda: "riscv64")
            case "memory":
                set_to(rendezvous, "Heap", _no_memory)
            case "lock":
                set_to(rendezvous.fcntl, "lockf", _no_memory)
            case "mapping":
                set_to(rendezvous, "Mapping", _no_memory)
            case "process":
                publish = rendezvous._publish
                set_to(rendezvous, "_publish", lambda heap: (1, *publish(heap)[1:]))

    def __exit__(self, *_):
        self.patch.undo()


def _no_memory(*_):
    raise OSError("none left")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("host", "the ranks are on several hosts"),
        ("namespaces", "the ranks are in several containers (namespaces) of one host"),
        ("platform", "rank 1: requires an x86-64 processor, which preserves the order of writes; this is riscv64"),
        ("memory", "rank 1: this system provides no shared memory: none left"),
        ("lock", "rank 1: this system provides no shared memory: none left"),
        ("mapping", "rank 1 cannot open the memory of the others: none left"),
        ("process", "rank 2 cannot open the memory of the others: "),
    ],
)
@pytest.mark.ranks(3)
def test_all_ranks_use_messages_where_one_cannot_share(group, kind, reason):
    with Broken(kind):
        rendezvous._RENDEZVOUS.pop(group, None)
        try:
            transport = connect(group, CPU, AMPLE)
            with pytest.raises(LayoutError) as refused:
                connect(group, CPU, AMPLE, route=Route(transport="shared_memory"))
            left, right = ((transport.rank + i) % transport.world_size for i in (-1, 1))
            received = torch.zeros(1)
            arriving = transport.irecv(received, left, tag=1)
            transport.isend(torch.full((1,), float(transport.rank)), right, tag=1).wait()
            arriving.wait()
            assert type(transport).__name__ == "GlooTransport"
            assert received.item() == left
            said = str(refused.value)
            assert said.startswith("transport='shared_memory' is not available: ")
            assert said.endswith(". Use 'p2p' or 'auto'")
            assert reason in said
        finally:
            rendezvous._RENDEZVOUS.pop(group, None)


@pytest.mark.ranks(3)
def test_a_meeting_leaves_no_descriptors_behind(group):
    files = []
    for _ in range(4):
        met = rendezvous._rendezvous(group, PATIENT)
        assert met.neighbours is not None
        dist.barrier(group)
        del met
        gc.collect()
        files.append(sorted(_kind_of(each) for each in Path("/proc/self/fd").iterdir()))
    assert not Counter(files[-1]) - Counter(files[0])  # what an earlier test has left may go meanwhile


def _kind_of(descriptor: Path) -> str:
    """Return the target of a descriptor, without the number of a socket."""
    try:
        return str(descriptor.readlink()).partition("[")[0]
    except FileNotFoundError:
        return "that of the folder"
