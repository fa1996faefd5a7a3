"""The mutants fit the sources, and the script that seeds them tells killed ones from survivors."""

import shutil
import subprocess

import pytest

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
