"""Scripts and commands on several ranks: under `torchrun`, and on the warm cluster, which costs no start.

`torchrun` is the real thing: processes, a launcher, exit statuses. It takes some ten seconds of CPU time per start.
`run_script` and `run_command` execute the same code on the ranks of the cluster, where it finds what a launcher
provides: environment, arguments, folder, `__main__`, and no process group until it asks for one. What it changes of
these, of random state and of loggers is undone afterwards.
"""

import contextlib
import gc
import io
import logging
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.support.patience import seconds
from tests.support.ranks.cluster import Cluster
from tests.support.ranks.frozen import freeze

ROOT = Path(__file__).parents[3]
IMPORTED_FROM = (ROOT, ROOT / "kernels", ROOT / "examples")


class Done(NamedTuple):
    """What a script or a command left on one rank, or on all ranks if a launcher collected it."""

    status: int
    out: str
    err: str


# ---- processes ------------------------------------------------------------------------------------------------------


def run_process(*command: str, folder: Path | None = None, warnings: str | None = None) -> Done:
    """Run `python COMMAND` on CPUs, outside of any launcher, with this working tree on its path."""
    launched = ("RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, IMPORTED_FROM)),
        "PYTHONFAULTHANDLER": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    if warnings is not None:
        environment["PYTHONWARNINGS"] = warnings
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds(300),
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def torchrun(
    script: Path, *arguments: object, folder: Path | None = None, warnings: str = "error", ranks: int = 2
) -> Done:
    """Start a script as its documentation says; `warnings` are those of the ranks, not of the launcher."""
    launcher = ["-W", "default", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = run_process(*launcher, str(script), *map(str, arguments), folder=folder, warnings=warnings)
    assert done.status == 0, done.out + done.err
    return done


# ---- the warm cluster -----------------------------------------------------------------------------------------------


def run_script(
    cluster: Cluster, script: Path, *arguments: object, folder: Path | None = None, warnings: str = "error"
) -> list[Done]:
    """Execute a script as `__main__` on two ranks, in `folder`. `warnings` is one action for all warnings.

    Raises:
        RemoteError: the script raised or exited with another status than 0; the traceback shows its line.
    """
    argv = [str(script), *map(str, arguments)]
    return cluster.run(_as_script, 2, argv, folder or script.parent, warnings)


def run_command(cluster: Cluster, main: Callable[[list[str]], int], *arguments: object, ranks: int = 2) -> list[Done]:
    """Call `main(arguments)` on `ranks` ranks and return its status and output by rank. `main` is a top-level name."""
    return cluster.run(_as_command, ranks, main, list(map(str, arguments)))


def _as_script(group: Any, argv: list[str], folder: Path, action: str) -> Done:
    """Body of a rank."""
    script = Path(argv[0])
    code = compile(script.read_text(), argv[0], "exec", dont_inherit=True)
    with launched(group, argv, folder, action) as output, _main_module(argv[0]) as main:
        try:
            exec(code, vars(main))
        except SystemExit as stopped:
            if stopped.code not in (None, 0):
                raise AssertionError(f"{script.name} exited with status {stopped.code}") from stopped
    return Done(0, *output())


def _as_command(group: Any, main: Callable[[list[str]], int], arguments: list[str]) -> Done:
    """Body of a rank."""
    with launched(group, ["command", *arguments], Path.cwd(), "error") as output:
        status = main(arguments)
    return Done(status, *output())


@contextlib.contextmanager
def launched(
    group: dist.ProcessGroup, argv: list[str], folder: Path, action: str, *, on_gpu: bool = False
) -> Iterator[Callable[[], tuple[str, str]]]:
    """Make this rank of the cluster look like a process that `torchrun` has started.

    The machine seems to have no GPUs. If `on_gpu`, each rank seems to be on a node of its own with one GPU.

    Yields a function that returns what was written to stdout and stderr.
    """
    out, err = io.StringIO(), io.StringIO()
    search = [str(Path(argv[0]).parent), *map(str, IMPORTED_FROM), *sys.path]
    freeze()  # a `Meter` counts what the script makes
    with contextlib.ExitStack() as stack:
        for context in (
            mock.patch.dict(os.environ, _environment(group, on_gpu)),
            mock.patch.object(sys, "argv", list(argv)),
            mock.patch.object(sys, "path", search),
            contextlib.nullcontext() if on_gpu else _no_gpu(),
            _folder(folder),
            _random_state(),
            _loggers(),
            _process_group(group),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            stack.enter_context(context)
        warnings.resetwarnings()
        warnings.simplefilter(action)
        try:
            yield lambda: (out.getvalue(), err.getvalue())
        except BaseException:
            print(out.getvalue(), err.getvalue(), file=sys.__stderr__, flush=True)  # the traceback is the cluster's
            raise
        gc.collect()  # what a finaliser raises belongs to this script


@contextlib.contextmanager
def _no_gpu() -> Iterator[None]:
    none = mock.patch.object(torch.cuda, "is_available", return_value=False)
    with none, mock.patch.object(torch.cuda, "device_count", return_value=0):
        yield


def _environment(group: dist.ProcessGroup, on_gpu: bool) -> dict[str, str]:
    rank, ranks = str(group.rank()), str(group.size())
    return {
        "RANK": rank,
        "LOCAL_RANK": "0" if on_gpu else rank,
        "GROUP_RANK": rank if on_gpu else "0",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": "1" if on_gpu else ranks,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",  # nothing listens there: `init_process_group` does not connect
    }


@contextlib.contextmanager
def _process_group(group: dist.ProcessGroup) -> Iterator[None]:
    """Hide the default group; `init_process_group` then gives `group`, and `destroy_process_group` hides it again."""
    default, known = dist.group.WORLD, set(dist.distributed_c10d._world.pg_map)
    destroy = dist.destroy_process_group

    def give(backend: str | None = None, *_: Any, **options: Any) -> None:
        assert not dist.is_initialized(), "a process group is initialized twice"
        assert backend in (None, "gloo", "cpu:gloo,cuda:nccl"), f"the cluster's group is gloo's, not {backend!r}"
        dist.group.WORLD = group

    def take(which: dist.ProcessGroup | None = None) -> None:
        assert dist.is_initialized(), "there is no process group to destroy"
        if which not in (None, group):
            destroy(which)
            return
        dist.group.WORLD = None

    def forget_new_groups() -> None:
        dist.group.WORLD = group
        for each in set(dist.distributed_c10d._world.pg_map) - known:
            destroy(each)

    with mock.patch.object(dist, "init_process_group", give), mock.patch.object(dist, "destroy_process_group", take):
        dist.group.WORLD = None
        try:
            yield
        finally:
            forget_new_groups()
            dist.group.WORLD = default


@contextlib.contextmanager
def _main_module(path: str) -> Iterator[ModuleType]:
    """A fresh `__main__`, where pickle finds the classes of a script, too."""
    main, before = ModuleType("__main__"), sys.modules["__main__"]
    main.__file__ = path
    sys.modules["__main__"] = main
    try:
        yield main
    finally:
        sys.modules["__main__"] = before
        vars(main).clear()


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _random_state() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def _loggers() -> Iterator[None]:
    """Give all loggers their level, handlers and propagation back; those that are new get defaults."""

    def all_loggers() -> Sequence[logging.Logger]:
        named = logging.root.manager.loggerDict.values()
        return [logging.root, *(each for each in named if isinstance(each, logging.Logger))]

    before = {each: (each.level, each.handlers[:], each.propagate, each.disabled) for each in all_loggers()}
    try:
        yield
    finally:
        for each in all_loggers():
            level, each.handlers[:], each.propagate, each.disabled = before.get(each, (logging.NOTSET, [], True, False))
            each.setLevel(level)
