"""`shardlite train` under torchrun, whose ranks may be killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from shardlite.checkpoint import Checkpoint, latest
from shardlite.cli import main
from tests.support.ranks.cluster import Cluster
from tests.support.ranks.scripts import run_command
from tests.support.twins.sharded import same_bits

TINY = [*("--size", "tiny", "--layers", "2", "--width", "16", "--heads", "2", "--context", "16", "--batch", "1")]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """The weights and moments of the newest checkpoint."""
    newest = latest(folder)
    assert newest is not None
    checkpoint = Checkpoint(newest)
    return {name: checkpoint.object(name) for name in checkpoint.entries if checkpoint.size_of(name) is not None}


def assert_same_weights(folder: Path, other: Path) -> None:
    expected = weights_in(other)
    for name, value in weights_in(folder).items():
        if not name.startswith("ranks."):
            same_bits(name, value, expected[name])


def ranks_of(agent: int) -> list[int]:
    """Return the processes that an agent of torchrun has started."""
    try:
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in children]


def train_straight(cluster: Cluster, folder: Path, ranks: int) -> None:
    """Train as `started` does, without a launcher and without interruptions."""
    options = ["--steps", "40", "--out", str(folder), "--checkpoints", str(folder / "run"), "--save-every", "40"]
    assert run_command(cluster, main, "train", *TINY, *options, ranks=ranks)[0].status == 0


@contextmanager
def started(
    folder: Path,
    *more: str,
    restarts: int = 0,
    steps: int = 40,
    nodes: Sequence[str] = ("--standalone", "--nproc-per-node", "3"),
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `shardlite train` on three ranks, saving each step into `folder / "run"`, with `more` options."""
    launcher = [sys.executable, "-m", "torch.distributed.run", *nodes, "--max-restarts", str(restarts)]
    options = ["--steps", str(steps), "--out", str(folder), "--checkpoints", str(folder / "run"), "--save-every", "1"]
    command = [*launcher, "-m", "shardlite", "train", *TINY, *options, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("a") as log:
        agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield agent
        finally:
            ranks = ranks_of(agent.pid) if agent.poll() is None else []
            agent.kill()
            agent.wait()
            for rank in ranks:  # of a test that failed: they would train on
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
