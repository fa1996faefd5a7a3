"""The code of the README runs unchanged."""

import re
import subprocess
import tomllib

import pytest

from bench import readme
from shardlite.cli import main
from shardlite.lab.table import read_rows, system_name
from tests.support.markdown import ROOT, assert_links_lead_somewhere, blocks
from tests.support.ranks.scripts import run_process, run_script, torchrun

README = (ROOT / "README.md").read_text()
BLOCKS = blocks(README, "python")


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run_on_two_ranks(cluster, tmp_path, block):
    script = tmp_path / "train.py"
    script.write_text(block)
    for each in run_script(cluster, script):
        assert_losses(each.out)


def assert_losses(out):
    """Each rank prints one line per step, and the model learns."""
    lines = [re.fullmatch(r"step (\d): loss (\d\.\d{3})", line) for line in out.splitlines()]
    assert [line[1] for line in lines] == ["0", "1", "2"]
    assert float(lines[2][2]) < float(lines[0][2])


@pytest.mark.slow
def test_the_first_block_runs_as_it_says(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BLOCKS[0])
    losses = torchrun(script, folder=tmp_path).out.splitlines()
    assert len(losses) == 6


def test_without_torchrun_the_program_says_how_to_start_it(tmp_path):
    text = (ROOT / "docs/getting-started.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(blocks(text, "python")[0])
    done = run_process(str(script))
    command = "torchrun --nproc-per-node 2 train.py"
    assert (done.status, done.out, done.err) == (1, "", f"Start this program with: {command}\n")
    assert f"{command}`" in text  # the page says the same


def test_there_is_one_python_block_of_twelve_lines():
    assert [len([line for line in block.splitlines() if line]) for block in BLOCKS] == [12]


def test_one_oldest_python_is_named_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = project["project"]["requires-python"].removeprefix(">=")
    assert f"(Python {oldest} or newer" in README
    assert f"| Python {oldest}, " in (ROOT / "docs" / "gpu.md").read_text()
    assert f"Programming Language :: Python :: {oldest}" in project["project"]["classifiers"]
    assert project["tool"]["mypy"]["python_version"] == oldest
    assert project["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")


def test_make_targets_exist():
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert named
    assert named <= targets


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`shardlite ([a-z]+)", README))))
def test_commands_exist(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "--ranks" in capsys.readouterr().out


def test_links_lead_somewhere():
    assert_links_lead_somewhere(ROOT / "README.md")


def test_the_picture_shows_the_rows():
    rows = read_rows([readme.ROWS])
    drawn = readme.PICTURE.read_text()
    assert readme.source(rows) in drawn, "run `python -m bench.readme --draw`"
    for bench, systems in (("step", 3), ("footprint", 4)):
        found = readme.bars(rows, bench)
        assert len(found) == systems
        for name, size in found.items():
            assert f">{system_name(name)}<" in drawn
            assert f">{size:.0f}<" in drawn, "run `python -m bench.readme --draw`"


def test_rows_of_the_picture_are_recent():
    """The rows are at most 150 commits of the library old. `make bench-readme` measures them anew."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs the history of a clone")
    commits = {row["commit"] for row in read_rows([readme.ROWS]) if "commit" in row}
    assert len(commits) == 1
    newer = git("rev-list", "--count", f"{commits.pop()}..HEAD", "--", "shardlite", "kernels")
    assert int(newer) <= 150, "run `make bench-readme` on a machine with nothing else to do"


def git(*arguments):
    """Return what git prints, or nothing if this is no clone."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def test_numbers_of_rows_stand_in_the_picture_only():
    for statement in README.split("## Use it")[0].splitlines():
        assert not re.findall(r"\d\.\d|\d+ ?(?:ms|s|KiB|MiB|GiB|GB|times)\b", statement)


def test_each_reason_leads_to_a_test_or_a_page():
    reasons = [
        line for line in README.split("## Why use it")[1].split("\n## ")[0].splitlines() if line.startswith("- ")
    ]
    assert len(reasons) == 6
    for reason in reasons:
        assert re.search(r"\]\((docs|tests)/", reason), reason


def test_it_is_short():
    assert len(README.splitlines()) <= 90
