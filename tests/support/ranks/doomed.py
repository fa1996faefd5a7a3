"""Ranks that may die: `Doomed.run(body, world_size, *args)` starts processes for one scenario and sees them all end.

The fork server starts them, so a start costs little and no other test's ranks are touched; a rank is a Python process
with one thread that ends as every other does. Whatever happens, `run` returns: a rank that has not ended in time is
killed.
"""

import json
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.patience import seconds, until
from tests.support.ranks.cluster import SEED
from tests.support.ranks.forkserver import ForkServer, find, name_of

JOIN = seconds(45)  # that ranks have to end


@dataclass(frozen=True)
class Ended:
    """The end of a rank: its result, error, status and log."""

    status: int
    """Its exit status; negative: the signal that ended it."""

    kind: str = ""
    """The type of the exception that ended its body, if one did."""

    text: str = ""
    result: Any = None
    log: str = ""
    """The end of what it has printed: a process that was aborted says there why."""


class Doomed:
    """Starts ranks and sees them end."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def run(
        self,
        body: Callable[..., Any],
        world_size: int,
        *args: Any,
        directory: Path,
        limit: float = JOIN,
        killed: int | None = None,
        tcp_store: bool = False,
    ) -> list[Ended]:
        """Run `body(group, *args)` on each of some ranks; return their ends. `args` must be valid JSON.

        Rank `killed` is killed once all others have ended. Nothing may be left behind by any of them. With `tcp_store`
        the store of the process group is served by rank 0, and stops with it; otherwise it is a file.
        """
        for name in ("tmp", "said"):
            (directory / name).mkdir()
        pids = [
            self._server.fork(
                _be, rank, world_size, str(directory), tcp_store, name_of(body), args, log=directory / f"log-{rank}"
            )
            for rank in range(world_size)
        ]
        self._server.join([pid for rank, pid in enumerate(pids) if rank != killed], limit)
        statuses = self._server.kill(pids)
        _nothing_is_left(directory, pids)
        return [_ended(directory, rank, status) for rank, status in enumerate(statuses)]


def _ended(directory: Path, rank: int, status: int | None) -> Ended:
    assert status is not None, "it was killed"
    said = directory / "said" / str(rank)
    log = (directory / f"log-{rank}").read_text(errors="replace")[-2000:]
    return Ended(status, log=log, **(json.loads(said.read_text()) if said.exists() else {}))


def _nothing_is_left(directory: Path, pids: list[int]) -> None:
    """Check that the ranks have left no process and no file."""
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not list((directory / "tmp").iterdir())
    shared = Path("/dev/shm")
    if shared.is_dir():
        marks = ["shardlite", *map(str, pids)]
        assert not [each for each in shared.iterdir() if any(mark in each.name for mark in marks)]


def _be(rank: int, world_size: int, folder: str, tcp_store: bool, name: tuple[str, str, str], args: list[Any]) -> None:
    """Be a rank."""
    directory = Path(folder)
    warnings.simplefilter("error")
    tempfile.tempdir = os.environ["TMPDIR"] = str(directory / "tmp")
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    store = _tcp_store(rank, directory / "port") if tcp_store else dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=JOIN))
    dist.barrier()
    outcome: dict[str, Any] = {}
    try:
        outcome["result"] = find(*name)(dist.group.WORLD, *args)
    except Exception as error:
        traceback.print_exc()
        outcome |= {"kind": type(error).__name__, "text": str(error)}
    (directory / "said" / str(rank)).write_text(json.dumps(outcome))


def _tcp_store(rank: int, port: Path) -> dist.TCPStore:
    """Return a store served by rank 0, which writes its port to a file."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        part = port.with_suffix(".part")
        part.write_text(str(store.port))
        part.rename(port)
        return store
    until(port.exists)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
