"""A save in a thread writes the state at the call, whatever the training does meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardlite import CheckpointError, async_save, load, save
from shardlite.checkpoint import files, latest, saving
from tests.support.checkpoints import assert_names, run_on, same_state, train
from tests.support.internals import flats
from tests.support.patience import seconds


@contextmanager
def slow_disk() -> Iterator[threading.Event]:
    """Let no rank write before the event is set."""
    written, go = files.summed, threading.Event()

    @contextmanager
    def late(path: Path) -> Iterator[Any]:
        assert go.wait(seconds(60))
        with written(path) as stream:
            yield stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "summed", late)
        yield go


@pytest.mark.parametrize(("state", "stage"), [("fp32", 3), ("int8", 3), ("bf16", 1), ("fp32", 0)])
def test_training_goes_on_while_the_state_of_the_call_is_written(group, path, state, stage):
    model, optimizer = run_on(group, state=state, stage=stage)
    train(model, optimizer, 2)
    with slow_disk() as go:
        saved = async_save(path, model, optimizer, {"step": 2}, step=2)
        train(model, optimizer, 2)  # while nothing of it is written
        optimizer.load_state_dict(optimizer.state_dict())  # ranks communicate here and in the thread
        assert not saved.done()
        assert latest(path) is None
        go.set()
        assert saved.result() == path / "step-00000002"
    train(model, optimizer, 2)
    other, its = run_on(group, 1, state, stage=stage)
    assert load(path, other, its) == {"step": 2}
    train(other, its, 4)
    same_state(other.full_state_dict(), model.full_state_dict())


def test_a_second_save_waits(group: Any, path: Path) -> None:
    """The next call waits for the save before; a save that is not waited for is there in the end."""
    model, optimizer = run_on(group)
    train(model, optimizer)
    with slow_disk() as go:
        first = async_save(path, model, optimizer)
        threading.Timer(0.05, go.set).start()
        second = async_save(path, model, optimizer)
        assert first.done()
        train(model, optimizer)
        assert save(path, model, optimizer).name == "step-00000002"
        assert second.done()
        third = async_save(path, model, optimizer, keep=2)
        load(path, model, optimizer)
        assert third.done()
    assert_names(group, path, "step-00000002", "step-00000003")


def test_a_save_that_fails_is_an_error_of_its_result_and_of_the_next_call(group: Any, path: Path) -> None:
    model, optimizer = run_on(group)
    train(model, optimizer)
    whole = async_save(path, model, optimizer).result()
    with pytest.raises(CheckpointError, match=r"'ranks\.1\.extra' holds something that is neither"):
        async_save(path, model, extra={"bad": object()} if dist.get_rank(group) else {})
    assert_names(group, path, whole.name)

    def fails(*args: Any) -> Any:
        raise OSError("no disk")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 1:
            patch.setattr(saving.RankFile, "write", fails)
        failed = async_save(path, model, optimizer)
        with pytest.raises(CheckpointError, match=r"save: rank 1: OSError: no disk"):
            failed.result()
        train(model, optimizer)
        with pytest.raises(CheckpointError, match=r"save: rank 1: OSError: no disk"):
            save(path, model, optimizer)  # says so once
    assert_names(group, path, whole.name)
    assert save(path, model, optimizer).name == "step-00000001"


def test_the_copy_is_in_the_form_in_which_the_state_is_kept(group: Any, path: Path) -> None:
    model, optimizer = run_on(group, state="int8")
    train(model, optimizer)
    part = saving._file_of(saving.Run(model, optimizer, {}), saving.Peers(model)).copied()
    copied: dict[int, int] = {}
    for value in part.entries.values():
        for tensor in getattr(value, "_sources", ()):
            copied[id(tensor)] = tensor.nbytes
    kept = sum(flat.local.numel() for flat in flats(model))
    assert 0 < sum(copied.values()) <= 5.2 * kept  # 3 bytes of a weight, 2 of its moments, and their scales
