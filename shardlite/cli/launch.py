"""Start a command on several ranks with `torchrun`, and join the process group as one of these ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def world_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that the launcher has started, or `None` if no launcher started this process."""
    return int(environment["WORLD_SIZE"]) if "RANK" in environment else None


def is_restart(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun has restarted this process after a failure."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def default_ranks() -> int:
    """Return the default number of ranks: one per GPU, or 2 if there are no GPUs."""
    import torch

    return torch.cuda.device_count() or 2


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Initialize the process group of the launched ranks, and yield this rank's device.

    The backend for GPUs is NCCL if this machine has a GPU for each rank. Otherwise the backend is gloo, because NCCL
    does not allow ranks to share a GPU.
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
    """Run `shardlite ARGUMENTS` in `ranks` processes of this machine and return the exit status.

    If a process fails, all processes are restarted, at most `restarts` times. See `run_agent` for signals.
    """
    return run_agent(torchrun(ranks, arguments, restarts=restarts), environment_for(ranks))


def run_agent(command: Sequence[str], environment: Mapping[str, str], output: IO[str] | None = None) -> int:
    """Run a `torchrun` command, wait for all of its processes, and return its exit status.

    If this process receives SIGINT (Ctrl-C), SIGTERM or SIGHUP, it passes the signal on to the ranks, and the exit
    status is 128 plus the number of the signal.

    Args:
        command: the command, as returned by `torchrun`.
        environment: environment variables of all processes.
        output: the file for the output of the processes. `None` selects the output of this process.
    """
    # The agent has its own session, so it gets each signal only once, from this process. A second signal, from the
    # terminal, would interrupt the shutdown of the agent.
    agent = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    received: list[int] = []

    def pass_on(number: int) -> None:
        received.append(number)
        agent.send_signal(number)

    with on_signals(("SIGINT", "SIGTERM", "SIGHUP"), pass_on):
        status = agent.wait()
    return 128 + received[-1] if received else status


@contextmanager
def on_signals(names: Sequence[str], act: Callable[[int], object]) -> Iterator[None]:
    """Call `act` with the number of each signal received in the `with` block. Outside the main thread, do nothing."""
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    in_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.signal(each, lambda number, _: act(number)) for each in known if in_main}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def torchrun(ranks: int, arguments: Sequence[str], *, module: str = "shardlite", restarts: int = 0) -> list[str]:
    """Return the command that starts `python -m MODULE ARGUMENTS` in `ranks` processes."""
    launcher = [sys.executable, "-m", "shardlite.cli.launcher", "--standalone", "--nproc-per-node", str(ranks)]
    launcher += ["--max-restarts", str(restarts)] if restarts else []
    # Without "--", torchrun would interpret `--master` as an abbreviation of its own options.
    return [*launcher, "-m", "--", module, *arguments]


def run_launcher() -> None:
    """Run `torchrun` in this process. After a signal, print one line and no traceback, because the ranks have ended."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main

    try:
        main()
    except SignalException as stopped:
        sys.exit(f"shardlite: {stopped.sigval.name} has ended all ranks")


OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""An environment variable of `torchrun`. If its value is 1, each attempt of `--max-restarts` has its own store.

Otherwise all attempts share the store of torchrun's agent. In that store, gloo finds the addresses of dead processes
(PyTorch 2.13).
"""


def environment_for(ranks: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environment` with variables that give each rank a share of the cores, and each attempt its own store.

    Variables that are already set keep their values.
    """
    threads = max(1, usable_cores() // ranks)
    return {"OMP_NUM_THREADS": str(threads), OWN_STORE: "1", **environment}


def usable_cores() -> int:
    """Return the number of cores that this process may use. A container may have fewer cores than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
