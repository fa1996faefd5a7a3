"""The heap that ranks of one host share: blocks, pages, and threads."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch

from shardlite.comm.transport.shared_memory.heap import Heap
from shardlite.errors import CommError
from tests.support.patience import seconds

PAGE = 4096


@pytest.fixture
def small(monkeypatch):
    """`small(pages)`: a heap of that many pages behind one that is reserved."""

    def make(pages):
        sizes = {"SC_PAGE_SIZE": PAGE, "SC_PHYS_PAGES": pages}
        monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
        return Heap(PAGE)

    return make


def resident(heap):
    """Return the bytes of pages that a heap takes."""
    return os.fstat(heap.descriptor).st_blocks * 512


def test_bytes_may_be_asked_for_during_a_change(small):
    """A signal handler may interrupt the change, so nobody waits for its end."""
    heap = small(4)
    block = heap.empty(PAGE)
    with ThreadPoolExecutor(1) as pool, heap._change():
        assert pool.submit(lambda: (heap.live, heap.warm)).result(seconds(5)) == (block.nbytes, 0)


def test_blocks_are_given_back_and_used_again(small):
    heap = small(4)
    blocks = [heap.empty(PAGE) for _ in range(4)]
    places = [heap.offset_of(block) for block in blocks]
    assert places == [PAGE * (1 + i) for i in range(4)]
    view = blocks[1].view(torch.float32)[10:20]
    del blocks[1], blocks[1]
    assert heap.offset_of(heap.empty(PAGE - 1)) == places[2], "the other one is viewed"
    del view
    assert heap.offset_of(heap.empty(2 * PAGE)) == places[1], "two that touch are one"


def test_a_heap_without_room_says_so(small):
    heap = small(4)
    kept = heap.empty(3 * PAGE)
    with pytest.raises(CommError, match=r"no room for 8192 bytes in the 20480 bytes that ranks of this host share"):
        heap.empty(PAGE + 1)
    assert heap.empty(0).numel() == 0
    assert heap.empty(PAGE).numel() == PAGE
    del kept
    assert heap.empty(3 * PAGE).numel() == 3 * PAGE


def test_random_blocks_never_overlap_and_do_not_grow(small):
    """The reserved memory is bounded by the memory in use: here half of it, in pieces."""
    heap, random = small(256), Random(0)
    kept = []
    for i in range(4000):
        block = heap.empty(random.randrange(1, 4 * PAGE))
        block.fill_(i % 251)
        kept.append((block, i % 251))
        if len(kept) > 32:
            old, value = kept.pop(random.randrange(len(kept)))
            assert (old[0], old[-1]) == (value, value)
    del block, old
    kept.clear()
    assert heap.empty(256 * PAGE).numel() == 256 * PAGE, "all is one block again"


def test_so_many_free_pages_are_kept_as_asked_for(small):
    heap = small(64)
    blocks = [heap.empty(numel * PAGE).fill_(1) for numel in (8, 1, 4)]
    del blocks[0], blocks[1]
    heap.trim(keep=5 * PAGE)
    assert resident(heap) == (5 + 1) * PAGE
    heap.trim(keep=6 * PAGE)
    blocks.append(heap.empty(5 * PAGE).fill_(1))
    blocks.clear()
    heap.trim(keep=2 * PAGE)
    assert resident(heap) == 2 * PAGE


def test_pages_are_kept_for_the_next_block_and_given_back_after_a_step_without_use(small):
    heap = small(64)

    def pages():
        return resident(heap) // PAGE

    def step(*numels):
        blocks = [heap.empty(numel * PAGE).fill_(1) for numel in numels]
        most = pages()
        del blocks
        heap.trim()
        return most

    assert [step(8, 8), pages()] == [16, 16]  # no new pages for the next step
    assert [step(4), pages()] == [16, 4]  # what one step has not used
    assert [step(), pages()] == [4, 0]
    kept = heap.empty(3 * PAGE).fill_(1)
    assert [step(2), step(), pages()] == [5, 5, 3]
    assert kept.sum() == 3 * PAGE
    step(8)
    heap.trim(keep=0)
    assert pages() == 3
    del kept
    assert pages() == 0, "no further block is expected"
    again = heap.empty(PAGE).fill_(1)
    del again
    assert pages() == 1, "the next one is expected again"


def test_pieces_that_are_too_short_for_what_comes_give_their_pages_back(small):
    """So there are never more pages than were live at once, and 5 %."""
    heap, random = small(4096), Random(1)
    most = live = 0
    kept = []
    for _ in range(600):
        if kept and random.random() < 0.5:
            live -= kept.pop(random.randrange(len(kept))).numel()
        else:
            kept.append(heap.empty(PAGE * random.choice([1, 7, 40, 100])).fill_(1))
            live += kept[-1].numel()
        most = max(most, live)
        assert resident(heap) <= 1.05 * most


def test_pages_are_given_back_although_the_free_ranges_are_being_changed(small):
    """A finalizer asks for it, on this thread or on another one. It must not wait for whoever holds the lock."""
    heap = small(64)
    heap.empty(8 * PAGE).fill_(1)
    assert resident(heap) == 8 * PAGE
    with heap._change():
        heap.trim(keep=0)
        other = threading.Thread(target=heap.trim, kwargs={"keep": 0}, daemon=True)
        other.start()
        other.join(seconds(10))
        assert not other.is_alive()
        assert resident(heap) == 8 * PAGE
    assert resident(heap) == 0


def test_threads_never_get_the_same_block(small):
    heap, before = small(64), sys.getswitchinterval()
    start = threading.Barrier(4)

    def body(name):
        start.wait()
        for _ in range(400):
            blocks = [heap.empty(PAGE) for _ in range(8)]
            for block in blocks:
                block[:8] = name
            assert all((block[:8] == name).all() for block in blocks)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(body, name) for name in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(before)
