"""The lease on the folder of a run: one process at a time saves into it.

The owner keeps `.lease` in the folder open, and a thread renews it every `RENEWAL` seconds. Another process takes over
the lease of a dead owner. On the same host it checks whether the owner's process lives. On another host the owner
counts as dead if it does not renew the lease for `STALE` seconds while it is observed; no two clocks are compared. The
new lease is renamed over the old one, so an old owner that still lives renews a file without a name. An
owner reads the lease before each rename and removal, and stops if the lease is another's.

This requires exclusive creation, atomic renames, and that an opened file shows what was synced before; NFS provides
these since version 3. `flock` is not used. An owner that is suspended for more than `STALE` seconds between its check
and the rename can still publish once.
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
from weakref import WeakSet

from shardlite.errors import CheckpointError

NAME = ".lease"
RENEWAL = 10.0
"""Seconds between renewals."""

STALE = 60.0
"""Seconds without a renewal after which a lease of another host is taken over."""

_POLL = 1.0
"""Seconds between two reads of a lease that is observed."""

_RACE = 0.1
"""Seconds after a takeover in which another process may do the same: the last one has the lease."""

_NBYTES = 512
"""Size of the file, constant so that a renewal never truncates it."""

Content = dict[str, Any]
"""Content of the file: `token`, `host`, `where`, `process`, `began`, `folder` and the number of renewals."""


@dataclass(eq=False)
class Lease:
    """The lease of this process on a folder."""

    root: Path
    content: Content
    file: int
    """The open file, -1 when closed. Writes have no effect after another process has taken the lease."""

    holders: WeakSet[Any] = field(default_factory=WeakSet)
    """Models that were saved here, and saves in progress. The lease is given up at the renewal that finds none."""

    def is_mine(self) -> bool:
        """Return whether the file is still this process's."""
        content = _read(self.root / NAME)
        return content is not None and content.get("token") == self.content["token"]

    def check(self) -> None:
        """Raise `CheckpointError` unless this process still has the lease."""
        if self.is_mine():
            return
        content = _read(self.root / NAME)
        reason = "was removed" if content is None else f"was taken over by {_owner(content)}"
        raise CheckpointError(
            f"the lease on {self.root} {reason}: this process had not renewed it for {STALE:g} s, or the folder was "
            "replaced. The running save publishes nothing more, and leaves the files of the other job alone"
        )

    def renew(self) -> bool:
        """Renew the lease. Return whether it is still this process's."""
        if self.file < 0 or not self.is_mine():
            return False
        self.content["renewals"] += 1
        with suppress(OSError):  # the disk is full or lost: the next renewal may succeed
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
"""Protects `_held`. Not held while a lease is waited for."""

_acquiring = threading.Lock()
"""Held while a lease is acquired, one at a time."""

_renewing: list[threading.Thread] = []
_ended = threading.Event()


def acquire(root: Path, holder: object) -> Lease:
    """Acquire the lease on a folder, or return the one that this process has, as long as `holder` lives.

    Raises:
        CheckpointError: another running job has it.
        OSError: the lease cannot be written.
    """
    root = root.resolve()
    status = root.stat()
    key = status.st_dev, status.st_ino
    with _acquiring:
        with _lock:
            lease = _held.get(key)
            if lease is not None:
                lease.holders.add(holder)
        if lease is None or not lease.renew():
            earlier, lease = lease, _take(root)
            lease.holders |= {holder, *(earlier.holders if earlier is not None else ())}
            with _lock:
                _held[key] = lease
            if earlier is not None:
                earlier.close()
        if not _renewing or not _renewing[0].is_alive():
            _renewing[:] = [threading.Thread(target=_renew, name="shardlite-lease", daemon=True)]
            _renewing[0].start()
    return lease


def _take(root: Path) -> Lease:
    """Create the lease, or take over that of a dead owner."""
    path, mine = root / NAME, _of_this_process(root)
    while True:
        with suppress(FileExistsError):
            return _created(root, path, mine)
        content = _read(path)
        if content is None:
            continue  # it was given up meanwhile
        _check_dead(root, path, content)
        temporary = root / f"{NAME}-{mine['token']}"
        lease = _created(root, temporary, mine)
        if _read(path) != content:  # its owner has renewed it, or another process was faster
            lease.close()
            temporary.unlink(missing_ok=True)
            continue
        temporary.rename(path)
        sleep(_RACE)
        try:
            lease.check()
        except CheckpointError:
            lease.close()
            raise
        return lease


def _check_dead(root: Path, path: Path, content: Content) -> None:
    """Return if the owner of a lease is dead, which may take `STALE` seconds.

    Raises:
        CheckpointError: it is alive.
    """
    if content.get("where") == _where():
        copied = content.get("folder") != root.stat().st_ino  # with the folder
        lost = content.get("process") == os.getpid()  # by this process
        if not copied and not lost and _lives(content.get("process", 0), content.get("began")):
            raise _other_job(root, content)
        return
    deadline = monotonic() + STALE
    while monotonic() < deadline:
        sleep(_POLL)
        now = _read(path)
        if now is None:
            return
        if now != content:
            raise _other_job(root, now)


def _other_job(root: Path, content: Content) -> CheckpointError:
    return CheckpointError(
        f"{root} is the folder of another job, which is running: {_owner(content)}. Save into another folder, or end "
        f"that job first. The lease of a dead job is taken over: on the same host at once, on others after {STALE:g} s"
    )


def _owner(content: Content) -> str:
    if "process" not in content:
        return "an unknown process"
    return f"process {content['process']} on {content.get('host')}"


def _created(root: Path, path: Path, content: Content) -> Lease:
    """Create the file of a lease.

    Raises:
        FileExistsError: it exists.
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


# ---- processes ------------------------------------------------------------------------------------------------------


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
        return secrets.token_hex(16)  # no other process has it: each observes the leases of the others


def _lives(process: int, began: str | None) -> bool:
    """Return whether a process of this host lives that started then. If start times are hidden, its number decides."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another user's
    now = _began(process)
    return now == began or now is None


def _began(process: int) -> str | None:
    """Return the start of a process of this host, in ticks since boot; `None` if it is hidden."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    state, *rest = status.rpartition(")")[2].split()
    return "it has ended" if state in "ZX" else rest[18]


# ---- renewal --------------------------------------------------------------------------------------------------------


def _renew() -> None:
    while not _ended.wait(RENEWAL):
        renew_all()


def renew_all() -> None:
    """Renew all leases of this process, and give up those without holders."""
    with _lock:
        held = list(_held.items())
    for key, lease in held:
        with _lock:
            unused = next(iter(lease.holders), None) is None  # its length may count what is being freed
            if unused and _held.get(key) is lease:
                del _held[key]
        with suppress(OSError):  # the file system may be away for a moment
            lease.give_up() if unused else lease.renew()


def _give_up_all() -> None:
    _ended.set()
    with _lock:
        held = list(_held.values())
        _held.clear()
    for lease in held:
        lease.give_up()


def _after_fork() -> None:
    """Leave the leases of the parent to the parent."""
    global _lock, _acquiring, _ended
    _lock, _acquiring, _ended = threading.Lock(), threading.Lock(), threading.Event()
    for lease in _held.values():
        lease.close()
    _held.clear()
    _renewing.clear()
    _where.cache_clear()


atexit.register(_give_up_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
