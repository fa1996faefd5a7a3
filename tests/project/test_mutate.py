"""The mutants fit the sources, and the script that seeds them tells killed ones from survivors."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.patience import until
from tools import mutate

SOURCE = '''"""A module."""


def larger(a, b):
    return a if a > b else b


def first(items):
    return items[0]
'''

TESTS = """from shardlite.module import first, larger


def test_larger():
    assert larger(1, 2) == 2


def test_first():
    assert first([3, 3]) == 3
"""
KILLED = mutate.Mutant(
    "shardlite/module.py", "a  if a >\nb", "a if a < b", "test_module::test_larger", "the smaller one"
)
ALIVE = mutate.Mutant("shardlite/module.py", "items[0]", "items[1]", "test_module::test_first", "the second one")


def test_each_mutant_fits_the_sources():
    mutants = mutate.read_table()
    assert mutate.check(mutants, mutate.ROOT) == []
    assert len(set(mutants)) == len(mutants) >= 60
    for mutant in mutants:
        file, source = mutant.source(mutate.ROOT)
        assert source != file.read_text(), mutant


def test_a_table_has_four_lines_for_each_mutant(tmp_path):
    table = tmp_path / "table.txt"
    table.write_text(
        "A table.\n\na.py: it is wrong\n- one + two\n+ one - two\n! test_a\n\nb.py: gone\n- x\n+\n! test_b::test_c\n"
    )
    assert mutate.read_table(table) == [
        mutate.Mutant("a.py", "one + two", "one - two", "test_a", "it is wrong"),
        mutate.Mutant("b.py", "x", "", "test_b::test_c", "gone"),
    ]
    table.write_text("A table.\n\na.py: it is wrong\n- one\n! test_a\n")
    with pytest.raises(ValueError, match=r"table.txt: expected `FILE: WHY`, .* got 'a.py: it is wrong"):
        mutate.read_table(table)


def test_text_that_has_moved_is_found_and_what_is_gone_is_reported(project):
    moved = mutate.Mutant("shardlite/old.py", "items[0]", "items[1]", "test_module", "")
    gone = mutate.Mutant("shardlite/module.py", "items[9]", "", "test_module", "")
    twice = mutate.Mutant("shardlite/module.py", "return", "", "test_module", "")
    untested = mutate.Mutant("shardlite/module.py", "items[0]", "0", "test_module::test_last", "")
    broken = mutate.Mutant("shardlite/module.py", "items[0]", "(", "test_module", "")
    assert mutate.check([moved, gone, twice, untested, broken], project) == [
        "  2  shardlite/module.py: 'items[9]' must occur once; it is in no file",
        "  3  shardlite/module.py: 'return' must occur once; it is in shardlite/module.py, shardlite/module.py",
        "  4  shardlite/module.py: 'items[0]': there is no test test_module::test_last",
        "  5  '(' was never closed (module.py, line 9)",
    ]


def test_one_of_two_mutants_is_killed(project, capsys):
    assert mutate.main([], project, [KILLED, ALIVE]) == 1
    out = capsys.readouterr().out
    assert "  1  killed" in out
    assert "  2  SURVIVED" in out
    assert "1 of 2 mutants were killed; survivors: [2]" in out
    assert (project / "shardlite" / "module.py").read_text() == SOURCE
    assert mutate.main(["--only", "1"], project, [KILLED, ALIVE]) == 0
    with pytest.raises(SystemExit, match=r"no mutants \[3\]; there are 1 to 2"):
        mutate.main(["--only", "2-3"], project, [KILLED, ALIVE])


def test_tests_that_fail_without_a_mutant_stop_the_run(project, capsys):
    (project / "tests" / "test_module.py").write_text(TESTS.replace("== 2", "== 3"))
    assert mutate.main([], project, [KILLED]) == 2
    assert "the tests fail without a mutant" in capsys.readouterr().out


def test_a_test_that_times_out_has_noticed_the_mutant(project):
    (project / "tests" / "test_module.py").write_text("import time\n\n\ndef test_it():\n    time.sleep(600)\n")
    assert mutate.run(project, ["tests"], timeout=0.1)[0]


@pytest.mark.skipif(shutil.which("setsid") is None, reason="needs setsid, and /proc to find such processes")
def test_processes_that_have_left_the_group_of_the_command_end_with_it(tmp_path):
    script = "setsid sh -c 'echo > ready; sleep 600' & sleep 600"
    environment = {**os.environ, "SHARDLITE_MUTANT": str(tmp_path)}
    process = subprocess.Popen(["sh", "-c", script], cwd=tmp_path, env=environment, start_new_session=True)
    until((tmp_path / "ready").exists, "the start of the process that leaves the group")
    assert len(_sleepers(tmp_path)) > 1
    mutate.end_tree(process, str(tmp_path))
    assert _sleepers(tmp_path) == []


def _sleepers(folder):
    """Return the processes that were started in `folder` and have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder and (process / "cmdline").read_bytes():
                found.append(process.name)
    return found


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A checkout with a module and its tests."""
    if shutil.which("git") is None:
        pytest.skip("needs git, which lists the files to copy")
    for name, text in (("shardlite/module.py", SOURCE), ("tests/test_module.py", TESTS), ("shardlite/__init__.py", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return tmp_path
