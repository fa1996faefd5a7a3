"""The house stays small: each number of its size has a ceiling, which falls with the number."""

import subprocess
import sys

import pytest

from tools.size import ROOT, ceilings, code_lines, import_closure, measure


@pytest.fixture(scope="module")
def now() -> dict[str, int]:
    return measure()


def test_each_number_has_a_ceiling_and_each_ceiling_a_number(now):
    assert now.keys() == ceilings().keys()


def test_numbers_are_below_their_ceilings(now):
    """A change that needs room takes as much out. A ceiling is raised by a commit of its own, which says why."""
    above = {words: (now[words], ceiling) for words, ceiling in ceilings().items() if now[words] > ceiling}
    assert not above


def test_ceilings_fall_with_their_numbers(now):
    """Room that was won is not spent unseen: `python tools/size.py --lower` lowers ceilings."""
    loose = {words for words, ceiling in ceilings().items() if ceiling > now[words] + max(20, now[words] // 50)}
    assert not loose


def test_lines_of_code_are_those_without_blanks_comments_and_docstrings():
    lines = [
        '"""Text."""',
        "",
        "X = 1  # why",
        "# a comment",
        "def f():",
        '    """Text',
        '    more."""',
        '    return """a',
        'b"""',
    ]
    assert code_lines("\n".join(lines)) == {3, 5, 8, 9}


def test_the_import_closure_follows_imports_at_the_top_level_only():
    files = {
        "shardlite/__init__.py": "",
        "shardlite/model.py": "from shardlite.comm import a\ndef f():\n    import shardlite.late\n",
        "shardlite/comm/__init__.py": "from shardlite.comm.b import a\n",
        "shardlite/comm/b.py": "import torch\n",
        "shardlite/late.py": "",
    }
    assert import_closure(files) == set(files) - {"shardlite/late.py"}


def test_the_command_prints_every_number(now):
    command = [sys.executable, "tools/size.py", "--base", "HEAD"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(words in printed for words in now)
