"""Snapshots in memory, and the processes that hold them."""

import os
import signal
import subprocess
import sys

import pytest

from shardlite import CheckpointError
from shardlite.checkpoint.in_memory import holder as holders
from shardlite.checkpoint.in_memory import snapshot
from shardlite.checkpoint.in_memory.holder import Agent, HolderError, parent_and_start
from shardlite.checkpoint.in_memory.snapshot import Header, SnapshotMemory
from tests.support.patience import until

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory is held by processes that are found in /proc"
)


def test_a_version_is_there_when_it_is_whole():
    memory = SnapshotMemory.allocate()
    for step in (3, 4, 5):
        before = set(memory.complete())
        memory.overwrite_older(100).fill_(step)
        assert set(memory.complete()) == set(sorted(before)[-1:])  # a rank that dies here leaves the newest
        memory.mark_complete(Header(step, 2, 100, 80, 7))
    assert list(memory.complete().values()) == [Header(5, 2, 100, 80, 7), Header(4, 2, 100, 80, 7)]
    other = SnapshotMemory(os.dup(memory.descriptor))
    assert other.content(4).tolist() == [4] * 100
    other.drop_all_but(4)
    assert set(memory.complete()) == {4}
    with pytest.raises(CheckpointError, match="memory of 4096 bytes does not hold copies"):
        SnapshotMemory(snapshot.make_memory(4096))


LAUNCHER = """
import importlib.util, os, signal, subprocess, sys
spec = importlib.util.spec_from_file_location("holding", sys.argv[1])
holding = sys.modules["holding"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(holding)
if "TORCHELASTIC_RUN_ID" not in os.environ:  # the agent
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell started in the background
    rank = [sys.executable, __file__, sys.argv[1]]
    for attempt in range(2):
        subprocess.run(rank, env={**os.environ, "TORCHELASTIC_RUN_ID": "x"}, start_new_session=True)
    print("waits", flush=True)
    sys.stdin.read()
else:
    agent = holding.Agent.of_this_process()
    found = agent.holders("a copy")
    if not found:
        memory = os.memfd_create("copy")
        os.write(memory, b"whole")
        print(agent.pid, agent.hold("a copy", memory).pid, flush=True)
        os.killpg(0, signal.SIGKILL)
    print(list(found), os.pread(found["a copy"].open(), 9, 0).decode(), found["a copy"].pid, flush=True)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, None])
def test_memory_outlives_ranks_and_ends_with_their_agent(tmp_path, monkeypatch, end):
    """A killed rank finds it when it is started again; another user and another agent do not."""
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    command = [sys.executable, str(script), str(holders.__file__)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        assert agent.stdin is not None
        first, second, third = (agent.stdout.readline().strip() for _ in range(3))
        pid, holder = map(int, first.split())
        assert (pid, second, third) == (agent.pid, f"['a copy'] whole {holder}", "waits")
        identity = Agent(agent.pid, parent_and_start(agent.pid)[1])
        found = identity.holders("a copy")["a copy"]
        assert not Agent(agent.pid, identity.start + 1).holders("")
        with monkeypatch.context() as patch:
            user = os.geteuid()
            patch.setattr(os, "geteuid", lambda: user + 1)
            assert not identity.holders("")
        assert found.is_alive
        agent.send_signal(end) if end else agent.stdin.close()
        agent.wait()
        until(lambda: not found.is_alive)
    with pytest.raises(OSError, match=f"{holder}"):
        found.open()


def test_memory_is_not_held_for_an_agent_that_has_ended():
    memory = SnapshotMemory.allocate()
    with pytest.raises(HolderError, match=r"could not be started: .*is not the agent"):
        Agent(os.getpid(), 1).hold("a copy", memory.descriptor)
