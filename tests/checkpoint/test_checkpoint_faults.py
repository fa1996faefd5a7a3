"""Damaged checkpoints, and ranks that die while saving: errors name the file, and nothing is partly loaded."""

import io
import os
import pickle
import random
import resource
import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from shardlite import AdamW, CheckpointError, CommError, load, save
from shardlite.checkpoint import SafeLoadPlanner, SafeReader, files, latest, lease, saving
from tests.support.checkpoints import assert_names, on_first, run_on, same_state, train
from tests.support.patience import seconds
from tests.support.twins.sharded import same_bits

# ---- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


HARMS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a flipped bit": ("__1_0.distcp", lambda file: flip(file, file.stat().st_size // 2)),
    "truncated": ("__0_0.distcp", lambda file: os.truncate(file, file.stat().st_size - 1)),
    "missing": ("__1_0.distcp", Path.unlink),
    "of another checkpoint": (
        "__1_0.distcp",
        lambda file: shutil.copy(file.parents[1] / "step-00000000" / file.name, file),
    ),
    "a flipped bit of the metadata": (files.METADATA, lambda file: flip(file, 200)),
    "empty metadata": (files.METADATA, lambda file: file.write_bytes(b"")),
    "a flipped bit of the manifest": (files.MANIFEST, lambda file: flip(file, 20)),
    "a manifest without JSON": (files.MANIFEST, lambda file: file.write_text("steps: 3")),
}


@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_found_before_anything_is_loaded(group: Any, path: Path, harm: str) -> None:
    model, optimizer = run_on(group)
    train(model, optimizer)
    whole = save(path, model, optimizer, step=0)
    train(model, optimizer)
    place = save(path, model, optimizer, step=1)
    name, damage = HARMS[harm]
    on_first(group, lambda: damage(place / name))
    other, its = run_on(group, seed=1)
    train(other, its)
    before = (other.full_state_dict(), [value.to_local().clone() for value in _moments(its)])
    with pytest.raises(CheckpointError, match=f"{place}/{name}"):
        load(path, other, its)
    same_state(other.full_state_dict(), before[0])
    for value, expected in zip(_moments(its), before[1], strict=True):
        same_bits("moments", value.to_local(), expected)
    load(whole, other, its)
    train(other, its)
    same_state(other.full_state_dict(), model.full_state_dict())


def _moments(optimizer: AdamW) -> list[Any]:
    return [entry[key] for entry in optimizer.state_dict()["state"].values() for key in ("exp_avg", "exp_avg_sq")]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
def test_the_disk_begins_with_each_block_as_soon_as_it_is_whole(tmp_path, monkeypatch):
    begun: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, begin, *_: begun.append(begin))
    with files.summed(tmp_path / "file") as stream:
        stream.write(bytes(files.BLOCK - 1))
        assert begun == []
        stream.write(bytes(files.BLOCK + 2))
        assert begun == [0, files.BLOCK]


def test_a_view_is_written_without_a_copy_and_without_its_neighbours():
    arena = torch.arange(12, dtype=torch.bfloat16)
    part = saving._with_own_storage(arena[3:9].view(2, 3))
    assert torch.equal(part, arena[3:9].view(2, 3))
    assert part.data_ptr() == arena[3:].data_ptr()
    assert part.untyped_storage().nbytes() == 6 * 2
    transposed = arena.view(3, 4).t()[1:]
    assert torch.equal(saving._with_own_storage(transposed), transposed)
    assert saving._with_own_storage(transposed).untyped_storage().nbytes() == 9 * 2


def test_each_block_of_a_file_has_a_checksum(tmp_path):
    path = tmp_path / "file"
    content = random.Random(0).randbytes(2 * files.BLOCK + 5)
    with files.summed(path) as stream:
        for begin in range(0, len(content), 1_000_003):
            stream.write(content[begin : begin + 1_000_003])
    assert path.read_bytes() == content
    told = stream.sums()
    assert told == files.sums_of(path)
    assert len(told["crc32"]) == 3
    manifest = {"block": files.BLOCK, "files": {"file": told}}
    flip(path, files.BLOCK + 7)
    files.check_blocks(tmp_path, manifest, {"file": [(0, files.BLOCK), (2 * files.BLOCK, 2 * files.BLOCK + 1)]})
    for begin, end in ((files.BLOCK, files.BLOCK + 1), (0, files.BLOCK + 1), (2 * files.BLOCK - 1, len(content))):
        with pytest.raises(CheckpointError, match=f"{path} is damaged: bytes 4194304 to 8388608"):
            files.check_blocks(tmp_path, manifest, {"file": [(begin, end)]})
    with pytest.raises(CheckpointError, match="other is not a file of this checkpoint"):
        files.check_blocks(tmp_path, manifest, {"other": [(0, 1)]})


# ---- malice ----------------------------------------------------------------------------------------------------------


class Malice:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_loading_executes_no_code(group: Any, path: Path) -> None:
    model, optimizer = run_on(group)
    place, mark = save(path, model, optimizer), path / "executed"
    on_first(group, (place / files.MANIFEST).unlink)
    metadata = (place / files.METADATA).read_bytes()
    on_first(group, lambda: (place / files.METADATA).write_bytes(pickle.dumps(Malice(mark))))
    with pytest.raises(CheckpointError, match=r"names posix\.system, which is not part of metadata"):
        load(path, model, optimizer)
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        SafeReader(place).read_metadata()
    content = pickle.loads(metadata)

    def put_into_an_object() -> None:
        write_foreign_metadata(place, metadata)
        where = next(each for index, each in content.storage_data.items() if index.fqn.endswith("param_groups.0.lr"))
        with (place / where.relative_path).open("r+b") as file:
            file.seek(where.offset)
            file.write(pickle.dumps(Malice(mark)))

    on_first(group, put_into_an_object)
    with pytest.raises(CheckpointError, match=r"'optimizer.param_groups.0.lr' holds something|cannot be read"):
        load(path, model, optimizer)
    assert not mark.exists()
    for where in content.storage_data.values():
        where.relative_path = "../../secret"
    on_first(group, lambda: write_foreign_metadata(place, pickle.dumps(content)))
    with pytest.raises(CheckpointError, match=r"names a file outside of the checkpoint: \.\./\.\./secret"):
        load(path, model)


def write_foreign_metadata(place: Path, content: bytes) -> None:
    """Write the metadata of another program, which has no manifest."""
    (place / files.METADATA).write_bytes(content.replace(b"ranks.0.generators", b"ranks.0.generatorz"))


def test_the_planner_loads_plain_objects_only():
    planner = SafeLoadPlanner(flatten_state_dict=False)
    planner.state_dict = {"a": None}
    for value, fails in (({"x": [1, 2.5, "y", None, (True, torch.ones(2))]}, False), (Malice(Path("/nowhere")), True)):
        content = io.BytesIO()
        torch.save(value, content)
        content.seek(0)
        nothing = torch.Size([0])
        index = MetadataIndex("a")
        item = ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)
        if fails:
            with pytest.raises(CheckpointError, match="'a' holds something that is neither a tensor"):
                planner.load_bytes(item, content)
        else:
            planner.load_bytes(item, content)
            assert planner.state_dict["a"]["x"][:4] == [1, 2.5, "y", None]


# ---- failures while saving -------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_earlier_checkpoint(group: Any, path: Path) -> None:
    """No rank can write more than a few kilobytes into a file, as on a full disk."""
    model, optimizer = run_on(group)
    train(model, optimizer)
    whole = save(path, model, optimizer)
    expected = model.full_state_dict()
    train(model, optimizer)
    write, (soft, hard) = saving.RankFile.write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*args: Any) -> Any:
        if dist.get_rank(group) == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        try:
            return write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    words = r"__1_0.distcp cannot be written: \[Errno 27\] File too large"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving.RankFile, "write", limited)
        with pytest.raises(CheckpointError, match=words):
            save(path, model, optimizer)
    signal.signal(signal.SIGXFSZ, handler)
    assert_names(group, path, whole.name)
    other, its = run_on(group, seed=1)
    load(path, other, its)
    same_state(other.full_state_dict(), expected)
    assert save(path, model, optimizer).name == "step-00000001"


def killed_body(group: Any, path: str, seed: int, everyone: bool) -> None:
    """Train and save again and again, until rank 1, or both at their own time, are killed at a random moment."""
    rank = dist.get_rank(group)
    model, optimizer = run_on(group, timeout=timedelta(seconds=seconds(2)))
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        for step in range(1000):
            if step == 2 and (everyone or rank == 1):
                signal.setitimer(signal.ITIMER_REAL, random.Random(2 * seed + rank).uniform(0.001, 0.15))
            train(model, optimizer)
            save(path, model, optimizer, {"step": step}, step=step, keep=3)
    except CommError:
        if everyone:
            signal.pause()  # the other rank was killed long before this one
        raise


def resumed_body(group: Any, path: Path) -> int:
    """Load the newest checkpoint, and check that it is what training for as many steps gives."""
    newest = latest(path)
    assert newest is not None
    model, optimizer = run_on(group, seed=1)
    step: int = load(path, model, optimizer)["step"]
    assert newest.name == files.name_of(step)
    straight, its = run_on(group)
    train(straight, its, step + 1)
    same_state(model.full_state_dict(), straight.full_state_dict())
    save(path, model, optimizer, {"step": step + 1}, step=step + 1)
    assert {each.name for each in path.iterdir() if each.name.startswith(".")} <= {lease.NAME}
    return step


@pytest.mark.parametrize(
    ("seed", "everyone"),
    [
        pytest.param(seed, everyone, marks=() if seed == 0 else pytest.mark.slow)
        for seed in range(25)
        for everyone in (False, True)
    ],
)
def test_a_rank_killed_while_it_saves_leaves_whole_checkpoints(cluster, doomed, tmp_path, seed, everyone):
    first, second = doomed.run(killed_body, 2, str(tmp_path / "run"), seed, everyone, directory=tmp_path)
    assert second.status == -signal.SIGKILL
    assert first.status == -signal.SIGKILL if everyone else first.kind == "CommError", first
    steps = cluster.run(resumed_body, 2, tmp_path / "run")
    assert steps[0] == steps[1] >= 1
