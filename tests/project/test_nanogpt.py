"""The diff of the docs lets nanoGPT's `train.py` train on ShardLite, with the losses of `DistributedDataParallel`."""

import re
from pathlib import Path

import pytest

from tests.support.markdown import ROOT, blocks
from tests.support.ranks.scripts import torchrun

STAND_IN = (ROOT / "tests" / "support" / "nanogpt_train.txt").read_text()
[DIFF] = blocks((ROOT / "docs" / "migration.md").read_text(), "diff")


def hunks() -> list[tuple[str, str]]:
    """Return the text of each hunk before and after."""
    lines = [each.splitlines() for each in re.split(r"^@@.*\n", DIFF, flags=re.MULTILINE)[1:]]
    text = lambda hunk, sign: "".join(f"{line[1:]}\n" for line in hunk if line[:1] in (" ", "", sign))  # noqa: E731
    return [(text(hunk, "-"), text(hunk, "+")) for hunk in lines]


def patched(source: str) -> str:
    for before, after in hunks():
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return source


def test_the_diff_has_at_most_15_lines_and_applies():
    changes = [line for line in DIFF.splitlines() if re.match(r"[+-](?![+-])", line)]
    assert len(changes) == 15
    assert sum(line.startswith("+") for line in changes) == 10
    source = patched(STAND_IN)
    assert "DDP(" not in source
    compile(source, "train.py", "exec")


@pytest.mark.slow
def test_losses_are_those_of_ddp_and_checkpoints_can_be_exchanged(tmp_path):
    losses = {}
    for name, source in (("ddp", STAND_IN.replace(", device_ids=[ddp_local_rank]", "")), ("own", patched(STAND_IN))):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.py").write_text(source)
        losses[name] = run(tmp_path / f"{name}.py", tmp_path / name, 2, "scratch")
    assert losses["own"] == losses["ddp"]
    assert len(losses["own"]) == 6
    resumed = [
        run(tmp_path / f"{script}.py", tmp_path / folder, 2, "resume")
        for script, folder in (("ddp", "ddp"), ("own", "ddp"), ("ddp", "own"), ("own", "own"))
    ]
    assert all(each == resumed[0] for each in resumed)
    assert len(resumed[0]) == 2


def run(script: Path, *arguments: object) -> list[str]:
    return re.findall(r"loss (0x\S+)", torchrun(script, *arguments, warnings="default").out)
