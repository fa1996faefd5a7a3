"""`python -m bench` runs all benches into one file; a bench that fails or hangs ends no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench import step
from shardlite.lab import suite
from shardlite.lab.ranks import parser_of
from shardlite.lab.suite import ON_GPU, PARTS, Part, run
from shardlite.lab.table import read_rows
from tests.support.patience import seconds, until

WRITES = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
(folder / "rows.jsonl").write_text(json.dumps({"bench": "x", "value": int(sys.argv[1])}) + chr(10))
"""


@pytest.fixture
def scripts(tmp_path):
    made = {"writes": WRITES, "fails": f"{WRITES}\nsys.exit(3)", "hangs": f"{WRITES}\nimport time; time.sleep(1000)"}
    for name, text in made.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


BUDGET = seconds(60)


def part(scripts, name, value=1, limit=BUDGET):
    words = f"{scripts / name}.py {value}"
    return Part(name, words, limit, words)


class Started(subprocess.Popen):
    """A bench whose limit counts from when it has written its rows: a busy machine may start it late."""

    def wait(self, timeout=None):
        rows = Path(self.args[-1]) / "rows.jsonl"
        until(lambda: rows.exists() and rows.stat().st_size > 0, "the bench")
        return super().wait(timeout)


def test_what_fails_or_hangs_costs_no_other(scripts, capfd, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(suite, "commit", lambda: "0123456789")
    missing = Part("missing", "-m bench.nothing", BUDGET, "-m bench.nothing")
    chosen = [part(scripts, "fails"), part(scripts, "hangs", limit=2), missing, part(scripts, "writes")]
    file = scripts / "out" / "rows.jsonl"
    ended = run(chosen, file, BUDGET, dry=False)
    statuses = [row["status"] for row in ended]
    assert statuses == ["failed with status 3", "ended after 2 s", "skipped: not in this checkout", "ok"]
    rows = read_rows([file])
    assert [(row["suite"], row["bench"]) for row in rows] == [
        *((name, bench) for name in ("fails", "hangs") for bench in ("x", "suite")),
        ("missing", "suite"),
        ("writes", "x"),
        ("writes", "suite"),
    ]
    told = capfd.readouterr().err
    assert "bench 4/4: writes, " in told
    assert "s of the budget left" in told


def test_a_part_that_is_run_again_replaces_its_rows(scripts):
    file = scripts / "rows.jsonl"
    for value in (1, 2):
        run([part(scripts, "writes", value), part(scripts, "fails")], file, BUDGET, dry=False)
    assert sorted(row["value"] for row in read_rows([file]) if row["bench"] == "x") == [1, 2]
    assert len(read_rows([file])) == 4


def test_the_parts_have_names_of_their_own_and_options_that_are_understood():
    names = [each.name for each in (*PARTS, *ON_GPU)]
    assert len(set(names)) == len(names)
    for each in PARTS:
        assert each.is_there
        for words in (each.command, each.dry):
            if "-m bench.step " in words:
                options = parser_of("bench.step").parse_args(words.split()[2:])
                step._check(options)


@pytest.mark.slow
def test_all_run_at_toy_size(tmp_path):
    """The commands start their ranks. Of parts that are the same one at toy size, the last is run."""
    names = {each.dry: each.name for each in PARTS}.values()
    command = [sys.executable, "-m", "bench", "--dry", "--only", *names, "--out", str(tmp_path)]
    assert subprocess.run(command, cwd=suite.ROOT, check=False).returncode == 0
    rows = read_rows(tmp_path.glob("*.jsonl"))
    assert {row["bench"] for row in rows} >= {"step", "ring", "footprint", "scale", "host", "checkpoint", "kernels"}
