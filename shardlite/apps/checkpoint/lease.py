"""The lease on the folder of a run: one process at a time saves into it.

The owner keeps `.lease` in the folder open, and renews it every `RENEWAL` seconds from a thread. Another process takes
over the lease of an owner that is dead. On one host it can see that. On another host the owner counts as dead when it
has not renewed the lease for `STALE` seconds, by the clock of the file system, or while the lease was watched. The new
lease is renamed over the old one, so an old owner that is alive after all renews a file without a name. An owner reads
the lease before each rename and removal, and stops if it is another's.

This needs what NFS has since version 3: exclusive creation, atomic renames, and that opening a file shows what was
synced before. It does not need `flock`. An owner that is suspended for more than `STALE` seconds between its check and
the rename can still publish once.
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

_RACE = 0.1
"""Seconds after a takeover, in which a third process may do the same: the last one has the lease."""

_NBYTES = 512
"""Of the file, so that a renewal never makes it shorter."""

Content = dict[str, Any]


@dataclass(eq=False)
class Lease:
    """The lease that this process has on a folder."""

    root: Path
    content: Content
    """Of the file: `token`, `host`, `where`, `process`, `began`, `folder` and the number of renewals."""

    file: int
    """The open file, -1 when closed. Writes to it reach nobody after another process has taken the lease."""

    holders: WeakSet[Any] = field(default_factory=WeakSet)
    """The models that were saved here, and saves in progress. Without any, the lease is given up."""

    def keep_for(self, holder: object) -> None:
        """Keep the lease at least as long as an object lives."""
        if holder not in self.holders:
            self.holders.add(holder)
            finalize(holder, _wake.set).atexit = False  # nothing else: it may run anywhere, locks held

    def is_mine(self) -> bool:
        """Return whether the file is still this process's."""
        content = _read(self.root / NAME)
        return content is not None and content.get("token") == self.content["token"]

    def check(self) -> None:
        """Raise `CheckpointError` unless this process still has the lease."""
        if self.is_mine():
            return
        content = _read(self.root / NAME)
        whose = "was removed" if content is None else f"was taken over by {_owner(content)}"
        raise CheckpointError(
            f"the lease on {self.root} {whose}: this process had not renewed it for {STALE:g} s, or the folder was "
            "replaced. The save that is running publishes nothing more, and touches nothing of the other job"
        )

    def renew(self) -> bool:
        """Write the lease again. Return whether it is still this process's."""
        if self.file < 0 or not self.is_mine():
            return False
        self.content["renewals"] += 1
        with suppress(OSError):  # a full or lost disk: the next renewal may succeed
            _write(self.file, self.content)
        return True

    def give_up(self) -> None:
        """Remove the lease if it is this process's, and close it."""
        with suppress(OSError):
            if self.is_mine():
                (self.root / NAME).unlink()
        self.close()

    def close(self) -> None:
        """Close the file."""
        file, self.file = self.file, -1
        if file >= 0:
            with suppress(OSError):
                os.close(file)


_held: dict[tuple[int, int], Lease] = {}
"""Leases of this process, by device and inode of the folder."""

_lock = threading.Lock()
"""Of `_held`. It is never held while a lease is waited for, and never taken by a finalizer."""

_taking = threading.Lock()
"""Held while a lease is taken, one at a time."""

_renewing: list[threading.Thread] = []
_wake = threading.Event()
_ended = threading.Event()


def hold(root: Path, holder: object) -> Lease:
    """Take the lease on a folder, or return the one that this process has. It is given up when all holders are gone.

    Raises:
        CheckpointError: another job has it and is alive.
        OSError: the lease cannot be written.
    """
    root = root.resolve()
    status = root.stat()
    key = status.st_dev, status.st_ino
    with _taking:
        with _lock:
            lease = _held.get(key)
            if lease is not None:
                lease.keep_for(holder)
        if lease is None or not lease.renew():
            earlier, lease = lease, _take(root)
            for each in () if earlier is None else list(earlier.holders):
                lease.keep_for(each)
            lease.keep_for(holder)
            with _lock:
                _held[key] = lease
            if earlier is not None:
                earlier.close()
        _begin_to_renew()
    return lease


def _take(root: Path) -> Lease:
    """Make the lease, or take over one whose owner is dead."""
    path, mine = root / NAME, _of_this_process(root)
    while True:
        with suppress(FileExistsError):
            return _written(root, path, mine)
        content = _read(path)
        if content is None:
            continue  # it was given up meanwhile
        _demand_dead(root, path, content)
        beside = root / f"{NAME}-{mine['token']}"
        lease = _written(root, beside, mine)
        if _read(path) != content:  # its owner goes on, or another process was faster
            lease.close()
            beside.unlink(missing_ok=True)
            continue
        beside.rename(path)
        sleep(_RACE)
        try:
            lease.check()
        except CheckpointError:
            lease.close()
            raise
        return lease


def _demand_dead(root: Path, path: Path, content: Content) -> None:
    """Return if the owner of a lease is dead.

    Raises:
        CheckpointError: it is alive.
    """
    if content.get("where") == _where():
        if content.get("folder") != root.stat().st_ino:
            return  # the folder was copied, and its lease with it
        if content.get("process") == os.getpid():
            return  # of this process, which has lost it
        if _lives(content.get("process", 0), content.get("began")):
            raise _taken(root, content)
        return
    limit = STALE if _age(root, path) <= STALE else 2 * RENEWAL  # the file system's clock may be that of another host
    deadline = monotonic() + limit
    while monotonic() < deadline:
        sleep(_LOOK)
        now = _read(path)
        if now is None:
            return
        if now != content:
            raise _taken(root, now)


def _taken(root: Path, content: Content) -> CheckpointError:
    return CheckpointError(
        f"{root} is the folder of another job, which is running: {_owner(content)}. Save into a folder of its own, or "
        f"end that job first. The lease of a job that has died is taken over: on its own host at once, on others after "
        f"{STALE:g} s"
    )


def _owner(content: Content) -> str:
    if "process" not in content:
        return "an unknown process"
    return f"process {content['process']} on {content.get('host')}"


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


def _written(root: Path, path: Path, content: Content) -> Lease:
    """Make a file of a lease that does not exist.

    Raises:
        FileExistsError: it does.
    """
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_CLOEXEC", 0), 0o644)
    try:
        _write(file, content)
    except BaseException:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return Lease(root, content, file)


def _write(file: int, content: Content) -> None:
    os.pwrite(file, json.dumps(content).encode().ljust(_NBYTES), 0)
    os.fsync(file)


def _read(path: Path) -> Content | None:
    """Return the content of a lease: `{}` if it is unreadable, `None` if there is none."""
    try:
        content = json.loads(path.read_bytes() or b"{}")
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _of_this_process(root: Path) -> Content:
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
def _where() -> str:
    """Identify the boot and the PID namespace. Processes with equal values see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)  # nobody's: leases of this process are watched by others


def _lives(process: int, began: str | None) -> bool:
    """Return whether a process of this host lives that began at that time. If that is hidden, its number decides."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another user's
    now = _began(process)
    return now == began or now is None


def _began(process: int) -> str | None:
    """Return when a process of this host began, in ticks since the host did; `None` if that is hidden."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    state, *rest = status.rpartition(")")[2].split()
    return "it has ended" if state in "ZX" else rest[18]


# ---- the thread -----------------------------------------------------------------------------------------------------


def _begin_to_renew() -> None:
    if not _renewing or not _renewing[0].is_alive():
        _renewing[:] = [threading.Thread(target=_renew, name="shardlite-lease", daemon=True)]
        _renewing[0].start()


def _renew() -> None:
    latest = monotonic()
    while not _ended.is_set():
        woken = _wake.wait(max(0.0, latest + RENEWAL - monotonic()))
        _wake.clear()
        renew_all(renew=not woken)
        latest = latest if woken else monotonic()


def renew_all(*, renew: bool = True) -> None:
    """Give up the leases that nothing holds any more, and renew the others."""
    with _lock:
        held = list(_held.items())
    for key, lease in held:
        with _lock:
            unheld = next(iter(lease.holders), None) is None  # its length may count what is just being freed
            if unheld and _held.get(key) is lease:
                del _held[key]
        with suppress(OSError):  # of a file system that is away for the moment
            if unheld:
                lease.give_up()
            elif renew:
                lease.renew()


def _give_up_all() -> None:
    _ended.set()
    _wake.set()
    with _lock:
        held = list(_held.values())
        _held.clear()
    for lease in held:
        lease.give_up()


def _after_fork() -> None:
    """Leave the leases of the parent to it."""
    global _lock, _taking, _wake, _ended
    _lock, _taking = threading.Lock(), threading.Lock()
    _wake, _ended = threading.Event(), threading.Event()
    for lease in _held.values():
        lease.close()
    _held.clear()
    _renewing.clear()
    _where.cache_clear()


atexit.register(_give_up_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
