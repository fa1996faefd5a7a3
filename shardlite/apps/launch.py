"""Start a command once per rank with `torchrun`, and join the process group as one of its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def world_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that the launcher has started, or `None` without a launcher."""
    return int(environment["WORLD_SIZE"]) if "RANK" in environment else None


def is_restart(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun has restarted this process after a failure."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def default_ranks() -> int:
    """Return one rank per GPU, or 2 without GPUs."""
    import torch

    return torch.cuda.device_count() or 2


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Initialize the process group of the launched ranks, and yield this rank's device.

    NCCL is used if this machine has a GPU for each rank. Otherwise gloo is used, because NCCL does not allow ranks to
    share a GPU.
    """
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count()
    device, backend = place(gpus)
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        yield torch.device(device)
    finally:
        dist.destroy_process_group()


def place(gpus: int, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the device of this rank, and the backends of its process group."""
    if gpus == 0:
        return "cpu", "gloo"
    local_rank, local_ranks = (int(environment[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return f"cuda:{local_rank % gpus}", "cpu:gloo,cuda:nccl" if local_ranks <= gpus else "gloo"


def launch(ranks: int, arguments: Sequence[str], *, restarts: int = 0) -> int:
    """Run `shardlite ARGUMENTS` on `ranks` processes of this machine and return the exit status.

    If one of them fails, all are restarted, at most `restarts` times. See `run_agent` for signals.
    """
    return run_agent(torchrun(ranks, arguments, restarts=restarts), environment_for(ranks))


def run_agent(command: Sequence[str], environment: Mapping[str, str], output: IO[str] | None = None) -> int:
    """Run a `torchrun` command, wait for all of its processes, and return its exit status.

    Ctrl-C, SIGTERM and SIGHUP are passed on to the ranks. The status is then 128 plus the number of the signal.

    Args:
        command: the command, as `torchrun` returns it.
        environment: environment variables of all processes.
        output: the file to which they print; `None` prints where this process does.
    """
    # In its own session it gets each signal once, from here: a second one would interrupt the shutdown of the ranks.
    agent = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    with _passed_on_to(agent) as signals:
        status = agent.wait()
    return 128 + signals[-1] if signals else status


@contextmanager
def _passed_on_to(agent: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Forward signals that terminate this process to `agent`. Yields the list of those that were received."""
    received: list[int] = []

    def pass_on(number: int, _: object) -> None:
        received.append(number)
        agent.send_signal(number)

    here = threading.current_thread() is threading.main_thread()  # another thread cannot have handlers
    before = {each: signal.signal(each, pass_on) for each in _ENDS} if here else {}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


_ENDS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def torchrun(ranks: int, arguments: Sequence[str], *, module: str = "shardlite", restarts: int = 0) -> list[str]:
    """Return the command that starts `python -m MODULE ARGUMENTS` on `ranks` processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher += ["--max-restarts", str(restarts)] if restarts else []
    # without "--", torchrun would read our `--master` as an abbreviation of its own options
    return [*launcher, "-m", "--", module, *arguments]


OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable of `torchrun`. Unless it is 1, all attempts of `--max-restarts` share the agent's store, where
gloo finds the addresses of dead processes (PyTorch 2.13).
"""


def environment_for(ranks: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environment` with cores divided among ranks and a store per attempt. Values that are set stay."""
    threads = max(1, usable_cores() // ranks)
    return {"OMP_NUM_THREADS": str(threads), OWN_STORE: "1", **environment}


def usable_cores() -> int:
    """Return the number of cores that this process may use. In a container it may be less than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
