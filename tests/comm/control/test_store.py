"""The store of a process group: exchanges over it, and timeouts of its calls."""

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from shardlite import ShardLite
from shardlite.comm.control import store as control_store
from shardlite.comm.control import threads
from shardlite.comm.control.store import BoundedStore, all_gather_json, bounded_store
from shardlite.errors import CommError
from tests.support.patience import seconds
from tests.support.twins.sharded import slow

LIMIT = seconds(0.3)
PATIENT = timedelta(seconds=seconds(30))


@pytest.mark.ranks(1, 2, 4)
def test_every_rank_hears_every_other_one_and_little_is_left(group):
    store = dist.distributed_c10d._get_default_store()
    name, before = group.group_name, store.num_keys()
    rows = [all_gather_json(group, [group.rank(), f"round {i}", None, 2.5], "numbers", PATIENT) for i in range(3)]
    dist.barrier(group)
    left = [each for each in range(4) if store.check([f"shardlite/{name}/{bounded_store().calls[name] - each}"])]
    assert rows == [[[rank, f"round {i}", None, 2.5] for rank in range(group.size())] for i in range(3)]
    assert left == ([0] if group.size() > 1 else []), "the last list, which the next one takes away"
    assert store.num_keys() - before <= 1


@pytest.mark.ranks(3)
def test_what_is_left_of_an_earlier_group_is_not_heard(group):
    """Come to exchanges of the same numbers, as process groups of the same name in one store do."""
    rows = []
    for i in range(3):
        rows.append(all_gather_json(group, [group.rank(), i], "numbers", PATIENT))
        dist.barrier(group)
        bounded_store().calls[group.group_name] -= 1
    bounded_store().calls[group.group_name] += 3
    assert rows == [[[rank, i] for rank in range(3)] for i in range(3)]


def absent_body(group, absent):
    if group.rank() not in absent:
        all_gather_json(group, "here", "what each rank wraps", timedelta(seconds=LIMIT))
    time.sleep(4 * LIMIT)  # the store of a file is gone with the last who has it open


@pytest.mark.parametrize(("absent", "named"), [slow([2], "rank 2"), ([0], "rank 0"), ([1, 2], "ranks 1, 2")])
def test_who_does_not_come_is_named(doomed, absent, named, tmp_path):
    for rank, each in enumerate(doomed.run(absent_body, 3, absent, directory=tmp_path)):
        assert each.status == 0
        if rank in absent:
            assert each.kind == ""
        else:
            assert each.kind == "CommError"
            timed_out = f"rank {rank} timed out after {LIMIT:g} s waiting for {named}"
            assert each.text.startswith(f"what each rank wraps: {timed_out}")


def wraps_alone_body(group):
    if group.rank() == 0:
        ShardLite(nn.Linear(2, 2), timeout=timedelta(seconds=LIMIT))


def test_wrapping_waits_no_longer_than_its_timeout(cluster):
    (kind, message), other = cluster.failures(wraps_alone_body, 2)
    assert (kind, other) == ("CommError", None)
    assert message.startswith(f"what each rank wraps: rank 0 timed out after {LIMIT:g} s waiting for rank 1.")


@pytest.mark.parametrize(("timeout", "error"), [(0.0, TypeError), (timedelta(0), ValueError), (-PATIENT, ValueError)])
def test_a_timeout_is_a_time(cluster, timeout, error):
    with pytest.raises(error, match="timeout must be "):
        ShardLite(nn.Linear(2, 2), timeout=timeout)


# ---- its server ------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept():
    """Yield a store, and the process that serves it."""
    ours, theirs = os.pipe()
    server = os.fork()
    if server == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(theirs, str(store.port).encode())
        signal.pause()
    port = int(os.read(ours, 16))
    yield BoundedStore(dist.TCPStore("127.0.0.1", port, is_master=False)), server
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    os.close(ours)
    os.close(theirs)


def test_a_stopped_server_is_waited_for_once(kept):
    store, server = kept
    store.ask(lambda given: given.set("a", "1"), seconds(30))
    os.kill(server, signal.SIGSTOP)
    os.waitpid(server, os.WUNTRACED)  # until it is stopped
    with pytest.raises(CommError, match=rf"does not answer: the process that keeps it.*\(waited {LIMIT:g} s\)"):
        store.ask(lambda given: given.get("a"), LIMIT)
    with pytest.raises(CommError, match=r"cannot be reached$"):
        store.ask(lambda given: given.get("a"), seconds(1e6))
    os.kill(server, signal.SIGCONT)
    store._late.result(seconds(30))
    assert store.ask(lambda given: given.get("a"), seconds(30)) == b"1"


def test_a_server_that_is_gone_is_said_to_be(kept):
    store, server = kept
    store.ask(lambda given: given.set("a", "1"), seconds(30))
    os.kill(server, signal.SIGKILL)
    with pytest.raises(CommError, match="has ended"):
        store.ask(lambda given: given.get("a"), seconds(30))


def test_a_slow_answer_to_the_last_check_is_not_a_missing_one():
    def look(_):
        time.sleep(3 * control_store._LAST_LOOK)
        return []

    with pytest.raises(TimeoutError):
        control_store._await(BoundedStore(dist.HashStore()), look, time.monotonic())


def test_the_thread_ends_with_the_store():
    before = set(threading.enumerate())
    store = BoundedStore(dist.HashStore())
    store.ask(lambda given: given.set("a", "1"), seconds(30))
    (thread,) = set(threading.enumerate()) - before
    del store
    thread.join(seconds(30))
    assert not thread.is_alive()


def test_no_pickle_is_loaded_from_a_rank_or_a_store():
    """Checkpoints are pickled, in part: `tests/checkpoint/test_checkpoint_faults.py` has what is loaded of them."""
    sources = [
        each for each in Path("shardlite").rglob("*.py") if not re.match("shardlite/(checkpoint|lab)/", str(each))
    ]
    trainers = [each for each in sources if "shardlite/integrations" in str(each)]  # their files are pickled, too
    sources = [each for each in sources if each not in trainers]
    assert len(sources) > 50
    loads = [line for each in trainers for line in each.read_text().splitlines() if "torch.load(" in line]
    assert loads
    assert all("weights_only=True" in line for line in loads)
    for words in ("pickle.load", "_object(", "_object_list(", "import pickle", "torch.load("):
        assert [str(each) for each in sources if words in each.read_text()] == []


def test_the_end_of_the_program_ends_and_joins_the_threads_that_call_pytorch(monkeypatch):
    """Otherwise one that returns from C++ while the interpreter shuts down would abort the process."""
    monkeypatch.setattr(threads, "_ends", {})
    store = BoundedStore(dist.HashStore())
    assert store.ask(lambda given: given.num_keys(), LIMIT) == 0
    stop, done = threading.Event(), []
    threads.start_thread("test", lambda: stop.wait(seconds(10)) and done.append(1), stop.set)
    running = list(threads._ends)
    threads.end_threads()
    assert [each.name for each in running] == ["shardlite-store", "shardlite-test"]
    assert done == [1]
    assert not any(each.is_alive() for each in running)
    assert not threads._ends
