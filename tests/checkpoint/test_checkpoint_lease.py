"""One job at a time saves into a folder: a second job is refused while the first one lives."""

import gc
import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shardlite import CheckpointError, save
from shardlite.checkpoint import files, latest, lease
from tests.support.checkpoints import on_first, run_on, train, tree
from tests.support.patience import seconds, until

DEAD = 2**22 + 1  # above the highest number of a process


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(lease, "_POLL", 0.02)
    yield
    give_up_all()


def write(root: Path, **changes: Any) -> dict[str, Any]:
    """Write the lease of another process: by default of this test's parent, which is alive."""
    root.mkdir(exist_ok=True)
    process = os.getppid()
    told = {**lease._of_this_process(root), "token": "another", "process": process, "began": lease._began(process)}
    told |= {"host": "elsewhere", **changes}
    file = os.open(root / lease.NAME, os.O_CREAT | os.O_RDWR, 0o644)
    lease._write(file, told)
    os.close(file)
    return told


def give_up_all() -> None:
    for each in [*lease._held.values()]:
        each.give_up()
    lease._held.clear()


@contextmanager
def renewed(root: Path, told: dict[str, Any]):
    """Renew a lease as its owner would, all the time."""
    end = threading.Event()

    def renew() -> None:
        number = 0
        while not end.wait(0.01):
            write(root, **told | {"renewals": (number := number + 1)})

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


class Holder:
    """Something that holds a lease."""


# ---- whose the folder is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [False, True], ids=["it can be seen", "`hidepid` hides it"])
def test_a_live_process_of_this_host_keeps_its_lease(tmp_path, monkeypatch, hidden):
    told = write(tmp_path)
    if hidden:
        monkeypatch.setattr(lease, "_began", lambda _: None)
    with pytest.raises(CheckpointError, match=f"another job, which is running: process {os.getppid()} on elsewhere"):
        lease.acquire(tmp_path, Holder())
    assert lease._read(tmp_path / lease.NAME) == told


@pytest.mark.parametrize(
    "changes",
    [{"process": DEAD}, {"began": "1"}, {"folder": 1}],
    ids=["it has died", "its number was given to another", "the folder is a copy"],
)
def test_the_lease_of_a_dead_process_is_taken_over_at_once(tmp_path, changes):
    write(tmp_path, **changes)
    holder = Holder()
    with mock.patch.object(lease, "monotonic", side_effect=AssertionError("it was observed")):
        mine = lease.acquire(tmp_path, holder)
    mine.check()
    assert lease._read(tmp_path / lease.NAME)["process"] == os.getpid()
    assert lease.acquire(tmp_path, holder) is mine
    assert [each.name for each in tmp_path.iterdir()] == [lease.NAME]
    give_up_all()
    assert not list(tmp_path.iterdir())


def test_on_another_host_a_lease_that_is_renewed_is_kept(tmp_path):
    with renewed(tmp_path, write(tmp_path, where="another host")):
        with pytest.raises(CheckpointError, match="is the folder of another job"):
            lease.acquire(tmp_path, Holder())


def test_on_another_host_a_lease_that_is_not_renewed_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "STALE", 0.3)
    write(tmp_path, where="another host", process=DEAD)
    holder = Holder()
    lease.acquire(tmp_path, holder).check()


def test_a_process_takes_back_what_it_has_lost(tmp_path, monkeypatch):
    """By another name of the folder, or where the folder was away for a moment."""
    holder = Holder()
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    first = lease.acquire(Path("run"), holder)
    monkeypatch.chdir("/")
    lease.renew_all()
    assert lease.acquire(tmp_path / "run", holder) is first
    lease._held.clear()
    again = lease.acquire(tmp_path / "run", holder)
    again.check()
    assert again is not first


def test_files_are_closed_and_holders_go_to_the_lease_that_follows(tmp_path):
    holder, other = Holder(), Holder()
    lease.acquire(tmp_path, holder)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        (tmp_path / lease.NAME).unlink()
        lease.renew_all()
        mine = lease.acquire(tmp_path, other)
        mine.check()
    assert len(os.listdir("/proc/self/fd")) == before
    assert holder in mine.holders


def test_a_file_system_that_is_away_ends_no_renewal(tmp_path):
    holder = Holder()
    mine = lease.acquire(tmp_path, holder)
    with mock.patch.object(lease, "_read", side_effect=OSError("stale file handle")):
        lease.renew_all()
    lease.renew_all()
    mine.check()
    assert lease._read(tmp_path / lease.NAME)["renewals"] >= 1


def test_a_lease_that_is_being_written_is_not_taken(tmp_path):
    """Its maker has created it, and not said yet who it is."""
    (tmp_path / lease.NAME).touch()

    timer = threading.Timer(0.1, write, [tmp_path], {"where": "another host"})
    timer.start()
    with pytest.raises(CheckpointError, match="on elsewhere"):
        lease.acquire(tmp_path, Holder())
    timer.join()


def test_of_many_threads_that_take_over_one_has_it(tmp_path):
    """Each for itself, as processes would."""
    write(tmp_path, process=DEAD)
    got: list[Any] = []

    def take() -> None:
        try:
            got.append(lease._take(tmp_path))
        except CheckpointError as error:
            got.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owner = lease._read(tmp_path / lease.NAME)["token"]
    valid = [each for each in got if isinstance(each, lease.Lease) and each.content["token"] == owner]
    assert len(valid) == 1
    for each in got:
        if isinstance(each, lease.Lease) and each is not valid[0]:
            with pytest.raises(CheckpointError, match="was taken over by"):
                each.check()
    valid[0].give_up()


def test_a_lease_ends_with_what_holds_it(tmp_path):
    holder = Holder()
    lease.acquire(tmp_path, holder)
    lease.renew_all()
    assert lease._read(tmp_path / lease.NAME)["renewals"] == 1
    del holder
    gc.collect()
    lease.renew_all()
    assert not (tmp_path / lease.NAME).exists()


def test_a_lease_that_was_lost_is_not_renewed(tmp_path):
    holder = Holder()
    mine = lease.acquire(tmp_path, holder)
    (tmp_path / lease.NAME).unlink()
    told = write(tmp_path)
    lease.renew_all()
    assert lease._read(tmp_path / lease.NAME) == told
    with pytest.raises(CheckpointError, match="was taken over by process"):
        mine.check()
    mine.give_up()
    assert (tmp_path / lease.NAME).exists()


# ---- saves ----------------------------------------------------------------------------------------------------------


def test_a_second_job_is_refused_on_all_ranks(group: Any, path: Path) -> None:
    """All ranks are told, nothing of the other job is touched, and afterwards the save succeeds."""
    model, optimizer = run_on(group)
    train(model, optimizer)
    theirs = path / ".saving-step-00000007"
    on_first(group, lambda: [theirs.mkdir(parents=True), (theirs / "__0_0.distcp").write_bytes(b"theirs"), write(path)])
    before = tree(path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"is the folder of another job, which is running: process \d+ on"):
            save(path, model, optimizer, step=1, keep=1)
        dist.barrier(group)
        assert tree(path) == before
        dist.barrier(group)
    on_first(group, (path / lease.NAME).unlink)
    save(path, model, optimizer, step=1, keep=1)
    assert latest(path) == path / "step-00000001"
    assert not theirs.exists()  # its job is gone


def test_a_job_that_has_lost_its_lease_publishes_nothing(group: Any, path: Path) -> None:
    """The lease goes to another job while this one writes: it publishes nothing, and removes nothing."""
    model, optimizer = run_on(group)
    train(model, optimizer)
    for step in (1, 2):
        save(path, model, optimizer, step=step)
    sync = files._sync

    def lose(folder: Path) -> None:
        sync(folder)
        (path / lease.NAME).unlink()
        write(path)

    with mock.patch.object(files, "_sync", lose), pytest.raises(CheckpointError, match="was taken over by process"):
        save(path, model, optimizer, step=3, keep=1)
    dist.barrier(group)
    assert list(files.checkpoints_in(path)) == [1, 2]
    assert (path / ".saving-step-00000003").exists()  # the folder is another's now
    with pytest.raises(CheckpointError, match="another job"):
        save(path, model, optimizer, step=4, keep=1)
    dist.barrier(group)
    assert list(files.checkpoints_in(path)) == [1, 2]


def saving_body(group: Any, path: str) -> str:
    model, optimizer = run_on(group)
    train(model, optimizer)
    return save(path, model, optimizer, keep=1).name


def owning_body(group: Any, path: Path) -> None:
    """Save, and stay alive until the other job has tried to."""
    model, optimizer = run_on(group)
    train(model, optimizer)
    save(path, model, optimizer, step=5)
    if dist.get_rank(group) == 0:
        (path.parent / "saved").touch()
        until((path.parent / "tried").exists)
    dist.barrier(group)
    save(path, model, optimizer, step=6)
    assert list(files.checkpoints_in(path)) == [5, 6]


def test_a_process_of_another_job_is_refused_until_the_first_has_ended(cluster, doomed, tmp_path):
    path = tmp_path / "run"

    def second() -> None:
        until((tmp_path / "saved").exists)
        ended.extend(doomed.run(saving_body, 1, str(path), directory=beside))
        (tmp_path / "tried").touch()

    beside, ended = tmp_path / "second", list[Any]()
    beside.mkdir()
    thread = threading.Thread(target=second)
    thread.start()
    try:
        cluster.check(owning_body, 2, path)
    finally:
        thread.join(seconds(60))
    assert ended[0].kind == "CheckpointError", ended
    assert "another job, which is running" in ended[0].text


def dying_body(group: Any, path: str) -> None:
    model, optimizer = run_on(group)
    save(path, model, optimizer)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_folder_is_free_when_its_job_was_killed(doomed, tmp_path):
    path = tmp_path / "run"
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (ended,) = doomed.run(dying_body, 1, str(path), directory=first)
    assert ended.status == -signal.SIGKILL
    assert (path / lease.NAME).exists()
    (ended,) = doomed.run(saving_body, 1, str(path), directory=second)
    assert ended.result == "step-00000001"


# ---- entries that are no leases --------------------------------------------------------------------------------------


HOLDER = Holder()

STRANGE = {
    "a symbolic link": lambda path: path.symlink_to(path.parent / "nowhere"),
    "a symbolic link to itself": lambda path: path.symlink_to(path.name),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_an_entry_that_is_no_file_is_named_and_kept(tmp_path, kind):
    STRANGE[kind](tmp_path / lease.NAME)
    with pytest.raises(CheckpointError, match=rf"{lease.NAME} is (a|no) .* must be a file: remove it"):
        lease.acquire(tmp_path, object())
    assert os.path.lexists(tmp_path / lease.NAME)
    (tmp_path / lease.NAME).rmdir() if kind == "a folder" else (tmp_path / lease.NAME).unlink()
    assert lease.acquire(tmp_path, HOLDER).is_mine()


@pytest.mark.parametrize("process", ["x", None, 0, -1, 10**30, True])
def test_a_process_that_cannot_exist_is_dead(tmp_path, process):
    write(tmp_path, process=process)
    assert lease.acquire(tmp_path, HOLDER).is_mine()


def test_a_lease_of_deep_json_is_damaged(tmp_path):
    (tmp_path / lease.NAME).write_text("[" * 200_000)
    assert lease._read(tmp_path / lease.NAME) == {}
