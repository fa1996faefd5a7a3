"""The table of mutants fits the sources, and the script that seeds them tells killed ones from survivors."""

import ast
import contextlib
import json
import os
import shutil
import subprocess
from itertools import chain
from pathlib import Path

import pytest

from tests.support.patience import until
from tools import mutate
from tools.mutants import FIRST, KINDS

ROOT = mutate.ROOT
PACKAGES = ("shardlite", "kernels/shardlite_kernels")
LONG = 60  # code lines: a module with more has a mutant

SOURCE = '''"""A module."""


def larger(a, b):
    return a if a > b else b


def first(items):
    return items[0]
'''

TESTS = """from fake.module import first, larger


def test_larger():
    assert larger(1, 2) == 2


def test_first():
    assert first([3, 3]) == 3
"""

TABLE = """MUTANTS = [
    ("fake/module.py", "comparison", "a if a > b", "a if a < b", "the smaller one is returned"),
    ("fake/module.py", "index", "items[0]", "items[1]", "the second one is returned"),
]
FIRST = {}
"""


@pytest.fixture(scope="module")
def mutants():
    return mutate.read_table()


def test_each_snippet_is_found_once_and_the_mutated_file_compiles(mutants):
    assert mutate.check(mutants, ROOT) == []
    for mutant in mutants:
        source = mutant.mutated(ROOT)
        assert source != (ROOT / mutant.path).read_text(), mutant
        compile(source, mutant.path, "exec")


def test_the_table_is_complete(mutants):
    assert len(mutants) >= 40
    assert len({mutant.key for mutant in mutants}) == len(mutants)
    assert {mutant.kind for mutant in mutants} == set(KINDS)
    assert all(mutant.why and mutant.snippet for mutant in mutants)
    assert FIRST.keys() <= {mutant.path for mutant in mutants}
    assert set(chain(*FIRST.values())) <= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}


def test_each_long_module_has_a_mutant(mutants):
    modules = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = {path.relative_to(ROOT).as_posix() for path in modules if path.name != "__init__.py"}
    long = {name for name in names if _code_lines((ROOT / name).read_text()) > LONG}
    assert "shardlite/model.py" in long
    assert long - {mutant.path for mutant in mutants} == set()


def test_a_snippet_that_moved_on_is_reported(tmp_path):
    (tmp_path / "module.py").write_text("a = 1\nb = 1\n")
    gone = mutate.Mutant(1, "module.py", "constant", "= 2", "= 3", "")
    twice = mutate.Mutant(2, "module.py", "constant", "= 1", "= 3", "")
    elsewhere = mutate.Mutant(3, "other.py", "constant", "a = 1", "a = 3", "")
    assert mutate.check([gone, twice, elsewhere], tmp_path) == [
        "mutant 1: '= 2' occurs 0 times in module.py, expected 1",
        "mutant 2: '= 1' occurs 2 times in module.py, expected 1",
        "mutant 3: there is no other.py",
    ]


def test_one_of_two_mutants_is_killed(tmp_path, monkeypatch, capsys):
    table = _fake_project(tmp_path, monkeypatch)
    arguments = ["--command", "python -m pytest -p no:cacheprovider", "--out", str(tmp_path / "rows.jsonl")]

    assert mutate.main(arguments, tmp_path, table) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["number"], row["result"], row["by"]) for row in rows] == [
        (0, "green", ""),
        (1, "killed", "tests/test_module.py::test_larger"),
        (2, "survived", ""),
    ]
    assert "a if a > b  ->  a if a < b" in capsys.readouterr().out
    assert (tmp_path / "fake" / "module.py").read_text() == SOURCE

    monkeypatch.setattr(mutate.Runner, "run", lambda *_: pytest.fail("all mutants have a row"))
    assert mutate.main([*arguments, "--fail-under", "50"], tmp_path, table) == 0
    assert mutate.main([*arguments, "--fail-under", "51"], tmp_path, table) == 1
    with pytest.raises(SystemExit, match="rows of another command"):
        mutate.main([*arguments, "--tests-from", "HEAD"], tmp_path, table)


def test_a_command_that_fails_without_a_mutant_stops_the_run(tmp_path, monkeypatch, capsys):
    table = _fake_project(tmp_path, monkeypatch)
    assert mutate.main(["--command", "false"], tmp_path, table) == 2
    assert "fails without a mutant" in capsys.readouterr().err


def test_a_command_that_runs_out_of_time_has_noticed_the_mutant(tmp_path, monkeypatch):
    table = _fake_project(tmp_path, monkeypatch)
    arguments = ["--command", "sleep 600", "--timeout", "0.1", "--no-control", "--only", "2", "--fail-under", "100"]
    assert mutate.main([*arguments, "--out", str(tmp_path / "rows.jsonl")], tmp_path, table) == 0
    assert json.loads((tmp_path / "rows.jsonl").read_text())["result"] == "timeout"


@pytest.mark.skipif(shutil.which("setsid") is None, reason="needs setsid, and /proc to find such processes")
def test_processes_that_have_left_the_group_of_the_command_end_with_it(tmp_path):
    script = "setsid sh -c 'echo > ready; sleep 600' & sleep 600"
    environment = {**os.environ, "SHARDLITE_MUTANT": str(tmp_path)}
    process = subprocess.Popen(["sh", "-c", script], cwd=tmp_path, env=environment, start_new_session=True)
    until((tmp_path / "ready").exists, "the start of the process that leaves the group")
    assert len(_sleepers(tmp_path)) > 1
    mutate.end_tree(process, str(tmp_path))
    assert _sleepers(tmp_path) == []


def test_tests_that_are_likely_to_notice_a_mutant_come_first(tmp_path):
    (tmp_path / "tests").mkdir()
    for name, text in (
        ("test_a", "wire = 1"),
        ("test_b_wire", ""),
        ("test_hinted", ""),
        ("test_importing", "from fake.transport.wire import pack"),
        ("test_importing_it", "from fake import (wire)"),
        ("test_parity", ""),
        ("test_wire", ""),
        ("test_wired", ""),
    ):
        (tmp_path / "tests" / f"{name}.py").write_text(text)
    names = ["test_wire", "test_hinted", "test_importing", "test_importing_it", "test_b_wire", "test_parity"]
    assert mutate.relevant(tmp_path, "fake/transport/wire.py", ("test_hinted", "test_gone")) == [
        f"tests/{name}.py" for name in names
    ]


def _sleepers(folder):
    """Return the processes that were started in `folder` and have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder and (process / "cmdline").read_bytes():
                found.append(process.name)
    return found


def _fake_project(folder, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("needs git, which lists the files to copy")
    for name, text in (("fake/module.py", SOURCE), ("tests/test_module.py", TESTS)):
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    (folder / "table").write_text(TABLE)
    (folder / ".gitignore").write_text("table\nrows.jsonl\n")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return folder / "table"


def _code_lines(source):
    """Count the lines that hold code: no comments, no docstrings."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = [line.strip() for i, line in enumerate(source.splitlines(), start=1) if i not in docstrings]
    return sum(bool(line) and not line.startswith("#") for line in lines)
