"""Every test file of the repository is collected."""

import os
import re
from pathlib import Path

import pytest

from tests.support.ranks.scripts import ROOT

_TEST = re.compile(r"^    def test_|^def test_", re.MULTILINE)
_SKIPPED = {"node_modules", "outputs", "__pycache__"}
_INTERPRETED = ROOT / "tests" / "kernels" / "interpreted"
"""`tests/kernels/test_interpreter.py` runs these in another process."""


def files_with_tests(root: Path) -> list[Path]:
    """Return all files under `root`, outside of hidden folders, that are called as a file of tests or define a test."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [each for each in subfolders if not each.startswith(".") and each not in _SKIPPED]
        paths = [Path(folder, each) for each in files if each.endswith(".py")]
        found += [path for path in paths if path.name.startswith("test_") or _TEST.search(path.read_text())]
    return sorted(found)


def test_every_file_with_tests_is_collected(pytestconfig: pytest.Config):
    places = [ROOT / each for each in pytestconfig.getini("testpaths")]
    patterns = pytestconfig.getini("python_files")
    paths = [path for path in files_with_tests(ROOT) if path.parent != _INTERPRETED]
    assert len({path.parent for path in paths}) > 15

    def is_collected(path: Path) -> bool:
        """Ask pytest itself about the file and each folder that it lies in."""
        place = next((each for each in places if path.is_relative_to(each)), None)
        if place is None or not any(path.match(pattern) for pattern in patterns):
            return False
        inside = [path, *(each for each in path.parents if each.is_relative_to(place))]
        ignore = pytestconfig.hook.pytest_ignore_collect
        return not any(ignore(collection_path=each, config=pytestconfig) for each in inside)

    assert [str(path.relative_to(ROOT)) for path in paths if not is_collected(path)] == []
