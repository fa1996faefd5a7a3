"""The end of a program in which a thread of gloo still holds Python objects."""

from pathlib import Path

import pytest

from tests.support.ranks.scripts import run_process

SCRIPT = """
import atexit
import sys
from threading import Event, Thread
import torch
import torch.distributed as dist
import shardlite.comm

ends, begun = Event(), Event()
atexit.register(ends.set)  # runs before what the library has registered

def finish(_):
    begun.set()
    ends.wait()
    for _ in range(1_000_000):  # takes the GIL again and again
        pass
    print("freed", flush=True)

def connect(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2)

groups, store = {}, dist.HashStore()
threads = [Thread(target=connect, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
first = groups[0].allreduce([torch.ones(1)])
future = first.get_future().then(finish)  # on gloo's thread, because the other rank is late
second = groups[1].allreduce([torch.ones(1)])
begun.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the states of threads are read from /proc")
def test_the_end_of_the_program_waits_for_threads_of_gloo():
    """Otherwise one that takes the GIL to free a tensor while the interpreter shuts down would abort the process."""
    done = run_process("-W", "ignore", "-c", SCRIPT)
    assert (done.status, done.out) == (0, "freed\n"), done.err
