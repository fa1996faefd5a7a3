"""A checkpoint with a missing file or a newer format raises an error that names the file; links are not followed."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardlite import CheckpointError, load, save
from shardlite.checkpoint import files, latest
from shardlite.cli.inspect_checkpoint import inspect
from tests.support.checkpoints import assert_names, names_in, on_first, run_on, same_state, train, tree


@pytest.mark.parametrize("name", [files.METADATA, files.MANIFEST])
def test_a_missing_file_is_named(group: Any, path: Path, name: str) -> None:
    model, optimizer = run_on(group)
    for step in (1, 2, 3):
        train(model, optimizer)
        save(path, model, optimizer, step=step)
    weights = model.full_state_dict()
    newest = path / "step-00000003"
    on_first(group, (newest / name).unlink)
    other, its = run_on(group, seed=1)
    before = other.full_state_dict()
    for place in (path, newest):
        with pytest.raises(CheckpointError, match=rf"step-00000003(/| is damaged: ){name}"):
            load(place, other, its)
    same_state(other.full_state_dict(), before)
    for call in (lambda: latest(path), lambda: next(inspect(path))):
        with pytest.raises(CheckpointError, match=f"{name} is missing.*newest complete checkpoint is .*step-00000002"):
            call()
    assert load(path, other, its, missing_ok=True).step == 2
    on_first(group, (path / "step-00000002" / name).unlink)
    with mock.patch.object(logging.getLogger("shardlite"), "warning") as warned:
        assert load(path, other, its, missing_ok=True).step == 1
    skipped = f"step-00000002 lacks {name}, step-00000003 lacks {name}"
    assert [call.args[2] for call in warned.mock_calls] == [skipped] * (dist.get_rank(group) == 0)
    assert load(path / "step-00000001", other, its).step == 1
    on_first(group, (path / "step-00000001" / name).unlink)
    with pytest.raises(CheckpointError, match=f"step-00000003 is damaged: {name} is missing. Nothing was loaded"):
        load(path, other, its, missing_ok=True)
    damaged = tree(newest)
    save(path, model, optimizer, keep=1)
    assert names_in(path) == [f"step-0000000{step}" for step in range(1, 5)]  # damaged files may be repaired
    assert tree(newest) == damaged
    load(path, other, its)
    same_state(other.full_state_dict(), weights)


def no_folder_body(group: Any, root: Path) -> None:
    """A file, or a link to a disk that is not there, is where the folder of a run should be."""
    model, optimizer = run_on(group)
    before = tree(root)
    for name, place, words in (
        ("file", "file", "is a file, but checkpoints need a folder: remove it, or name another path"),
        ("file/run", "file", "is a file, but checkpoints need a folder"),
        (
            "link",
            "link",
            rf"is a link to {root}/disk/run, which does not exist, .*: make that folder, or mount its disk",
        ),
        ("link/run", "link", "is a link to"),
    ):
        for act in (
            lambda path: save(path, model, optimizer),
            lambda path: save(path, model, optimizer, step=3, keep=1),
            lambda path: load(path, model, optimizer),
            lambda path: load(path, model, optimizer, missing_ok=True),
        ):
            with pytest.raises(CheckpointError, match=f"{root / name}: {root / place} {words}"):
                act(root / name)
    assert tree(root) == before
    on_first(group, lambda: (root / "disk" / "run").mkdir(parents=True))
    save(root / "link", model, optimizer)
    load(root / "link", model, optimizer)


def test_a_file_or_dangling_link_in_place_of_the_folder_is_named(cluster, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    cluster.check(no_folder_body, 2, tmp_path)


def test_folders_that_save_has_not_written(group: Any, path: Path) -> None:
    """What DCP has written needs no manifest. A folder may be empty, as of a copy that was interrupted."""
    model, optimizer = run_on(group)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path / "step-00000004", process_group=group)
    assert load(path, run_on(group, seed=1)[0]).source == str(path / "step-00000004")
    on_first(group, (path / "step-00000005").mkdir)
    with pytest.raises(CheckpointError, match=r"step-00000005 is damaged: .metadata is missing"):
        load(path, model)
    assert save(path, model, optimizer).name == "step-00000006"


def test_a_newer_format_is_refused_with_both_numbers(group: Any, path: Path) -> None:
    model, optimizer = run_on(group)
    place = save(path, model, optimizer)

    def make_newer() -> None:
        told = json.loads((place / files.MANIFEST).read_text())
        del told["crc32"]
        told["format"] = files.FORMAT + 1
        told["crc32"] = crc32(json.dumps(told, sort_keys=True).encode())
        (place / files.MANIFEST).write_text(json.dumps(told))

    on_first(group, make_newer)
    words = f"has format {files.FORMAT + 1}, but this version of ShardLite reads format {files.FORMAT}"
    with pytest.raises(CheckpointError, match=words):
        load(path, model, optimizer)


# ---- links ----------------------------------------------------------------------------------------------------------


def test_links_are_never_followed_for_removal(group: Any, path: Path) -> None:
    """An old checkpoint was moved to another disk and linked; the folder that a link leads to is never touched."""
    path, far = path / "run", path / "far"
    model, optimizer = run_on(group)
    for step in (0, 1):
        save(path, model, optimizer, step=step)

    def move() -> None:
        shutil.move(path / "step-00000000", far)
        (path / "step-00000000").symlink_to(far)
        (path / ".saving-step-00000009").symlink_to(far)  # which an earlier version may have left
        (path / "step-00000042").symlink_to(path / "nowhere")

    on_first(group, move)
    content = tree(far)
    for step in (2, 3, 4):
        save(path, model, optimizer, step=step, keep=2)
        assert_names(
            group, path, "step-00000000", *[f"step-0000000{each}" for each in (step - 1, step)], "step-00000042"
        )
    assert tree(far) == content
    assert load(path / "step-00000000", model, optimizer).step == 0
    for step in (0, 42):  # in the place of a link
        place = save(path, model, optimizer, step=step)
        dist.barrier(group)
        assert not place.is_symlink()
    assert tree(far) == content


def test_a_save_that_failed_does_not_make_the_next_one_fail(group: Any, path: Path) -> None:
    """What cannot be removed costs only its place, and an error in the middle of a save is the same on all ranks."""
    model, optimizer = run_on(group)
    for step in (1, 2):
        save(path, model, optimizer, step=step)
    with mock.patch.object(files.shutil, "rmtree", side_effect=PermissionError("no")):
        for step in (3, 4):
            save(path, model, optimizer, step=step, keep=1)
            assert load(path, model, optimizer).step == step
    with mock.patch.object(files, "_sync", side_effect=OSError("the disk is gone")):
        with pytest.raises(CheckpointError, match="save: rank 0: OSError: the disk is gone"):
            save(path, model, optimizer, step=5, keep=1)
    save(path, model, optimizer, step=6, keep=1)
    assert_names(group, path, "step-00000006")
