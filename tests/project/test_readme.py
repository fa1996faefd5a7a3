"""The code of the README runs unchanged."""

import re
import tomllib

import pytest

from shardlite.cli import main
from tests.support.markdown import ROOT, assert_links_lead_somewhere, blocks, made, tables
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


def test_each_question_has_one_table():
    benches = [re.search(r"bench=(\w+)", source)[1] for source, _ in tables(README)]
    assert [bench for bench in benches if bench != "gpu"] == ["step", "footprint"]
    for source, table in tables(README):
        assert len(re.findall(r"^\|", table, flags=re.MULTILINE)) == 2 + 3  # a heading and three rows
        assert table == made(source), "run `python -m tests.support.markdown`"
        assert "2 cores" in table or "bench=gpu" in source


def test_measured_numbers_stand_in_tables_only():
    measured = README.split("## Measured")[1].split("\n## ")[0]
    for source, table in tables(README):
        measured = measured.replace(source, "").replace(table, "")
    assert not re.findall(r"\d\.\d|\d+ ?(?:ms|s|KiB|MiB|GiB|GB|%|times)\b", measured)


def test_it_is_short():
    assert len(README.splitlines()) <= 110
