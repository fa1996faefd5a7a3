"""The lease on the folder of a run: one process at a time saves into it.

The owner keeps `.lease` in the folder open, and renews it every `RENEWAL` seconds from a thread. Another process takes
over the lease of an owner that is dead. On one host it can see that. On another host the owner counts as dead when it
has not renewed the lease for `STALE` seconds, by the clock of the file system, or while the lease was watched. The new
lease is renamed over the old one, so an old owner that is alive after all renews a file without a name. An owner reads
the lease before each rename and removal, and stops if it is another's.

This needs what NFS has since version 3: exclusive creation, atomic renames, and that opening a file shows what was
synced before. It does not need `flock`. Milliseconds pass between a check and the rename behind it: an owner that was
stopped there for more than `STALE` seconds would still rename once.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from weakref import WeakSet, finalize

from shardlite.errors import CheckpointError

NAME = ".lease"
RENEWAL = 10.0
"""Seconds between renewals."""

STALE = 60.0
"""Seconds without a renewal after which a lease of another host is taken over."""

_LOOK = 1.0
"""Seconds between two looks at a lease that is watched."""

_NBYTES = 512
"""Of the file, so that a renewal never makes it shorter."""


@dataclass(eq=False)
class Lease:
    """The lease that this process holds on a folder."""

    root: Path
    told: dict[str, Any]
    """What the file says: `token`, `host`, `where`, `process`, `began`, `folder` and the number of renewals."""

    file: int
    """The open file. Writes to it reach nobody after another process has taken the lease."""

    holders: WeakSet[Any] = field(default_factory=WeakSet)
    """The models that were saved here, and saves in progress. Without any, the lease is given up."""

    def check(self) -> None:
        """Raise `CheckpointError` unless this process still has the lease."""
        told = _read(self.root / NAME)
        if told is None or told.get("token") != self.told["token"]:
            whose = "was removed" if told is None else f"was taken over by {_owner(told)}"
            raise CheckpointError(
                f"the lease on {self.root} {whose}: this process had not renewed it for {STALE:g} s, or the folder was "
                "replaced. What was being saved is not published, and nothing of the other job was touched"
            )

    def renew(self) -> bool:
        """Write the lease again. Return whether it is still this process's."""
        told = _read(self.root / NAME)
        if told is None or told.get("token") != self.told["token"]:
            return False
        self.told["renewals"] += 1
        with suppress(OSError):  # a full or lost disk: the next renewal may succeed
            _write(self.file, self.told)
        return True

    def give_up(self) -> None:
        """Remove the lease, if it is this process's."""
        told = _read(self.root / NAME)
        if told is not None and told.get("token") == self.told["token"]:
            with suppress(OSError):
                (self.root / NAME).unlink()
        with suppress(OSError):
            os.close(self.file)


_held: dict[tuple[int, int], Lease] = {}
"""Leases of this process, by device and inode of the folder."""

_lock = threading.RLock()
_renewing: list[threading.Thread] = []
_end = threading.Event()


def hold(root: Path, *holders: object) -> Lease:
    """Return this process's lease on a folder, which it takes if it does not have it. It lasts while a holder does.

    Raises:
        CheckpointError: another job has it and is alive.
        OSError: the lease cannot be written.
    """
    status = root.stat()
    key = status.st_dev, status.st_ino
    with _lock:
        lease = _held.get(key)
        if lease is None or not lease.renew():
            lease = _held[key] = _take(root)
        for each in holders:
            if each not in lease.holders:
                lease.holders.add(each)
                finalize(each, _let_go).atexit = False
        _begin_to_renew()
    return lease


def _take(root: Path) -> Lease:
    """Make the lease, or take over one whose owner is dead."""
    path, mine = root / NAME, _of_this_process(root)
    while True:
        with suppress(FileExistsError):
            return _written(root, path, mine)
        told = _read(path)
        if told is None:
            continue  # it was given up meanwhile
        _demand_dead(root, path, told)
        beside = root / f"{NAME}-{mine['token']}"
        lease = _written(root, beside, mine)
        beside.rename(path)
        sleep(_LOOK / 10)  # a third process may do the same: the last rename counts
        lease.check()
        return lease


def _demand_dead(root: Path, path: Path, told: dict[str, Any]) -> None:
    """Return if the owner of a lease is dead.

    Raises:
        CheckpointError: it is alive.
    """
    if told and told.get("folder") != root.stat().st_ino:
        return  # the folder was copied, and its lease with it
    if told and told.get("where") == _where():
        if _began(told.get("process", 0)) == told.get("began"):
            raise _taken(root, told)
        return
    if _age(root, path) > STALE:
        return
    deadline = monotonic() + STALE
    while monotonic() < deadline:
        sleep(_LOOK)
        now = _read(path)
        if now is None:
            return
        if now != told:
            raise _taken(root, now)


def _taken(root: Path, told: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"{root} is the folder of another job, which is running: {_owner(told)}. Save into a folder of its own, or end "
        f"that job first. The lease of a job that has died is taken over: on its own host at once, on others after "
        f"{STALE:g} s"
    )


def _owner(told: dict[str, Any]) -> str:
    return f"process {told.get('process')} on {told.get('host')}"


def _age(root: Path, path: Path) -> float:
    """Return the seconds since the last renewal, by the clock of the file system."""
    probe = root / f"{NAME}-{secrets.token_hex(8)}"
    try:
        probe.touch(exist_ok=False)
        return probe.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def _written(root: Path, path: Path, told: dict[str, Any]) -> Lease:
    """Make a file of a lease that does not exist.

    Raises:
        FileExistsError: it does.
    """
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_CLOEXEC", 0), 0o644)
    try:
        _write(file, told)
    except BaseException:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return Lease(root, told, file)


def _write(file: int, told: dict[str, Any]) -> None:
    os.pwrite(file, json.dumps(told).encode().ljust(_NBYTES), 0)
    os.fsync(file)


def _read(path: Path) -> dict[str, Any] | None:
    """Return what a lease says, nothing of one that is just being written, or `None` if there is none."""
    try:
        told = json.loads(path.read_bytes() or b"{}")
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _of_this_process(root: Path) -> dict[str, Any]:
    return {
        "token": secrets.token_hex(16),
        "host": socket.gethostname(),
        "where": _where(),
        "process": os.getpid(),
        "began": _began(os.getpid()),
        "folder": root.stat().st_ino,
        "renewals": 0,
    }


@cache
def _where() -> str | None:
    """Return what processes have in common that see each other: a host since it was started, and a namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)  # nobody's: leases of this process are watched by others


def _began(process: int) -> str | None:
    """Return when a process of this host began, in ticks since the host did, or `None` if there is none."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    state, *rest = status.rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]


# ---- the thread -----------------------------------------------------------------------------------------------------


def _begin_to_renew() -> None:
    if not _renewing or not _renewing[0].is_alive():
        _renewing[:] = [threading.Thread(target=_renew, name="shardlite-lease", daemon=True)]
        _renewing[0].start()


def _renew() -> None:
    while not _end.wait(RENEWAL):
        renew_all()


def renew_all() -> None:
    """Renew the leases of this process, and forget those that it has lost."""
    with _lock:
        for key, lease in list(_held.items()):
            if not lease.renew():
                os.close(lease.file)
                del _held[key]


def _let_go() -> None:
    """Give up the leases that nothing holds any more."""
    with _lock:
        for key, lease in list(_held.items()):
            if next(iter(lease.holders), None) is None:
                lease.give_up()
                del _held[key]


def _give_up_all() -> None:
    _end.set()
    with _lock:
        while _held:
            _held.popitem()[1].give_up()


def _forget() -> None:
    """Leave the leases of the parent to it, in a forked child."""
    global _lock
    _lock = threading.RLock()
    _held.clear()
    _renewing.clear()


atexit.register(_give_up_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
