"""The lease on the folder of a run. Only the process that has the lease may save into the folder.

The owner keeps the file `.lease` in the folder open, and a thread of the owner renews the lease every `RENEWAL`
seconds. Another process may take over the lease of a dead owner. If both processes run on the same host, the
other process checks whether the owner lives. Otherwise the owner counts as dead if it does not renew the lease for
`STALE` seconds while the other process observes the lease. Clocks of two hosts are never compared. The file of the new
lease is renamed over the old file. So an old owner that still lives renews a file that has no name any more. An owner
reads the lease before each rename and removal, and stops if another process has the lease.

The file system must provide exclusive creation and atomic renames, and a newly opened file must show all synced writes.
NFS meets these requirements since version 3. `flock` is not used. An owner that is suspended for more than `STALE`
seconds between its check and the rename can still publish once.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import secrets
import socket
import stat
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
"""Seconds without a renewal after which a process of another host may take over the lease."""

_POLL = 1.0
"""Seconds between two reads of an observed lease."""

_RACE = 0.1
"""Seconds after a takeover in which other processes may also take over. The last such process gets the lease."""

_NBYTES = 512
"""Size of the file in bytes. The size is constant, so that a renewal never truncates the file."""

Content = dict[str, Any]
"""The content of the file, with the keys `token`, `host`, `where`, `process`, `began`, `folder` and `renewals`."""


@dataclass(eq=False)
class Lease:
    """A lease of this process on a folder."""

    root: Path
    content: Content
    file: int
    """Descriptor of the open file; -1 if closed. After another process has taken the lease, writes have no effect."""

    holders: WeakSet[Any] = field(default_factory=WeakSet)
    """Models that were saved into this folder, and saves in progress. If no holder lives, a renewal gives up the lease.
    """

    def is_mine(self) -> bool:
        """Return whether this process still has the lease."""
        content = _read(self.root / NAME)
        return content is not None and content.get("token") == self.content["token"]

    def check(self) -> None:
        """Check that this process still has the lease.

        Raises:
            CheckpointError: another process has taken over the lease, or the lease was removed.
        """
        if self.is_mine():
            return
        content = _read(self.root / NAME)
        reason = "was removed" if content is None else f"was taken over by {_owner(content)}"
        raise CheckpointError(
            f"lost the lease on {self.root}, which {reason}: it was not renewed for {STALE:g} s, or the folder was "
            "replaced. This save was abandoned; the other job's files are untouched"
        )

    def renew(self) -> bool:
        """Renew the lease. Return whether this process still has the lease."""
        if self.file < 0 or not self.is_mine():
            return False
        self.content["renewals"] += 1
        with suppress(OSError):  # the disk is full or lost: the next renewal may succeed
            _write(self.file, self.content)
        return True

    def give_up(self) -> None:
        """Remove the lease if this process still has it, and close the file."""
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
"""A lock that protects `_held`. No thread holds this lock while it waits for a lease."""

_acquiring = threading.Lock()
"""A lock that lets only one thread at a time acquire leases."""

_renewing: list[threading.Thread] = []
_ended = threading.Event()


def acquire(root: Path, holder: object) -> Lease:
    """Acquire the lease on a folder for as long as `holder` lives. If this process has it already, return that lease.

    Raises:
        CheckpointError: another running job has the lease.
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
    """Create the lease, or take over the lease of a dead owner."""
    path, mine = root / NAME, _of_this_process(root)
    while True:
        with suppress(FileExistsError):
            return _created(root, path, mine)
        content = _read(path)
        if content is None:
            continue  # the owner has given up the lease in the meantime
        _check_file(path)
        _check_dead(root, path, content)
        temporary = root / f"{NAME}-{mine['token']}"
        lease = _created(root, temporary, mine)
        if _read(path) != content:  # the owner has renewed the lease, or another process has taken it over
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
    """Check that the owner of a lease is dead. This may take `STALE` seconds.

    Raises:
        CheckpointError: the owner is alive.
    """
    if content.get("where") == _where():
        copied = content.get("folder") != root.stat().st_ino  # the lease is a copy, made together with the folder
        lost = content.get("process") == os.getpid()  # this process had the lease earlier, and has lost it
        if not copied and not lost and _lives(content.get("process"), content.get("began")):
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
        f"that job first. A dead job loses its lease: on the same host at once, on other hosts after {STALE:g} s"
    )


def _owner(content: Content) -> str:
    if "process" not in content:
        return "an unknown process"
    return f"process {content['process']} on {content.get('host')}"


def _created(root: Path, path: Path, content: Content) -> Lease:
    """Create the file of a lease.

    Raises:
        FileExistsError: the file exists.
    """
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
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
    """Return the content of a lease; `{}` if it is damaged or no file, or `None` if nothing has this name.

    The lease may be anything that another program has put there, so links are not followed, and a pipe does not block.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            return {}
        raise
    try:
        content = json.loads(os.read(file, 2 * _NBYTES) or b"{}") if stat.S_ISREG(os.fstat(file).st_mode) else {}
    except (ValueError, RecursionError):
        return {}
    finally:
        os.close(file)
    return content if isinstance(content, dict) else {}


def _check_file(path: Path) -> None:
    """Check that the lease is an ordinary file, which this process may replace.

    Raises:
        CheckpointError: it is a link, a folder or another kind of entry.
    """
    with suppress(FileNotFoundError):  # the owner has given up the lease in the meantime
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a symbolic link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "no file"
            raise CheckpointError(
                f"{path} is {kind}, but the lease of the job that saves into this folder must be a file: remove it"
            )


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
    """Return an identifier of the host's boot and the PID namespace. Processes with equal values can see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)  # no other process has this value, so processes observe each other's leases


def _lives(process: Any, began: str | None) -> bool:
    """Return whether a process of this host is alive and was started at `began`.

    If start times are hidden, any living process with this ID counts. An ID that no process can have does not live.
    """
    if type(process) is not int or process <= 0:  # 0 and negative numbers are groups of processes
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # the process belongs to another user
    now = _began(process)
    return now == began or now is None


def _began(process: int) -> str | None:
    """Return the start time of a process of this host, in ticks since boot; `None` if the time is hidden."""
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
    """Renew all leases of this process, and give up leases without holders."""
    with _lock:
        held = list(_held.items())
    for key, lease in held:
        with _lock:
            unused = next(iter(lease.holders), None) is None  # the length may include objects that are being freed
            if unused and _held.get(key) is lease:
                del _held[key]
        with suppress(OSError):  # the file system may be unavailable for a moment
            lease.give_up() if unused else lease.renew()


def _give_up_all() -> None:
    _ended.set()
    with _lock:
        held = list(_held.values())
        _held.clear()
    for lease in held:
        lease.give_up()


def _after_fork() -> None:
    """Forget the leases of the parent process. A forked child calls this."""
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
