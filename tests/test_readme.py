"""What the README shows must run as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.table import RESULTS, read_rows, render
from shardlite.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
def test_python_blocks_run_on_two_ranks(tmp_path, code):
    script = tmp_path / "train.py"
    script.write_text(code)
    path = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    launcher = [sys.executable, "-W", "default", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(script)], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_python_blocks():
    assert len(blocks("python")) == 3


def test_make_targets_exist():
    named = set(re.findall(r"\bmake ([a-z]+)", README))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert named
    assert named <= targets


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`shardlite ([a-z]+)", README))))
def test_commands_exist(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "--ranks" in capsys.readouterr().out


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_the_tables_are_made_from_the_rows():
    shown = re.search(r"<!-- rows: .*? -->\n(.*?)<!-- end of rows -->", README, flags=re.DOTALL)
    assert shown is not None
    assert shown.group(1).strip() == render(read_rows(RESULTS.glob("*.jsonl"))).strip()
