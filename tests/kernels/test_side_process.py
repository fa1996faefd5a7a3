"""The side process of `interpreted/`, with a folder of its own that imports nothing large."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
import os
from pathlib import Path
import pytest
from tests.kernels.interpreted.side_process import SideProcess

def pytest_configure(config):
    if os.environ.get("WHERE") != "aside":
        config.pluginmanager.register(SideProcess(config, Path(__file__).parent, {"WHERE": "aside"}))

def pytest_collection_modifyitems(config, items):
    for item in items:
        if config.pluginmanager.hasplugin("xdist"):
            item.add_marker(pytest.mark.xdist_group("one"))
"""
INSIDE = """
import os, warnings
import pytest

PASSED = []

@pytest.fixture(scope="module", autouse=True)
def whole():
    yield
    print("torn down once", os.environ["WHERE"])

def test_environment(tmp_path):
    PASSED.append(os.getpid())
    assert os.environ["WHERE"] == "aside"

@pytest.mark.parametrize("x", [1, 2, 3])
def test_many(x):
    print("printed", x)
    assert x != 2, f"x is {x}"

def test_skipped():
    pytest.skip("a reason")

@pytest.mark.xfail(reason="another reason", strict=True)
def test_expected_failure():
    assert PASSED == []

@pytest.mark.filterwarnings("ignore:may happen")
def test_warned():
    warnings.warn("may happen")
    with pytest.raises(UserWarning):
        warnings.warn("may not happen")

@pytest.fixture
def broken():
    yield
    raise ValueError("in the teardown")

def test_broken(broken):
    pass

def test_dies():
    os.abort()

def test_goes_on():
    assert PASSED == []  # in a process that has run nothing else
"""
OUTSIDE = """
import os

def test_outside():
    assert "WHERE" not in os.environ
"""
SUMMARY = "2 failed, 8 passed, 1 skipped, 1 xfailed, 1 error"
INI = "[pytest]\nfilterwarnings = error\naddopts = -ra\n"


@pytest.fixture
def project(tmp_path):
    files = {"pytest.ini": INI, "beside/test_a.py": OUTSIDE, "test_c.py": OUTSIDE, "beside/aside/conftest.py": CONFTEST}
    for name, text in {**files, "beside/aside/test_b.py": INSIDE}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return tmp_path


def command(*arguments):
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]


def environment():
    hidden = ("PYTEST_", "CI", "BUILD_NUMBER")  # with the last two pytest prints a summary of another length
    own = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return own | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # which take a second


def run(project, *arguments):
    given = {"cwd": project, "env": environment(), "timeout": 300}
    return subprocess.run(command(*arguments), **given, capture_output=True, text=True)


def outcomes(done):
    """The outcome of each test by its name, from lines as `aside/test_b.py::test_warned PASSED [ 10%]`."""
    words = [line.split() for line in done.stdout.splitlines()]
    return {each[0].partition("::")[2]: each[1] for each in words if len(each) > 2 and "::" in each[0]}


def test_items_are_reported_as_if_they_had_run_here(project):
    """Between others, with which they share a folder or not."""
    done = run(project, "-v", "beside/test_a.py", "beside/aside", "test_c.py")
    assert outcomes(done) == {
        **{"test_environment": "PASSED", "test_many[1]": "PASSED", "test_many[2]": "FAILED", "test_many[3]": "PASSED"},
        **{"test_skipped": "SKIPPED", "test_expected_failure": "XFAIL", "test_warned": "PASSED"},
        **{"test_broken": "ERROR", "test_dies": "FAILED", "test_goes_on": "PASSED", "test_outside": "PASSED"},
    }, done.stdout
    for expected in (
        *("x is 2", "printed 2", "a reason", "another reason", "ValueError: in the teardown"),
        *(SUMMARY, "the side process died with exit code -6 and printed:", "Fatal Python error: Aborted"),
    ):
        assert expected in done.stdout, done.stdout
    for unexpected in ("printed 1", "torn down", "no tests ran"):
        assert unexpected not in done.stdout
    assert (done.returncode, done.stderr) == (1, "")


def test_an_item_is_selected_by_its_node_id(project):
    done = run(project, "beside/aside/test_b.py::test_many[2]", "-v", "--tb=line", "-x")
    assert outcomes(done) == {"test_many[2]": "FAILED"}
    assert "AssertionError: x is 2" in done.stdout, done.stdout
    assert "def test_many" not in done.stdout


def test_node_ids_with_the_group_of_a_worker_of_xdist(project):
    pytest.importorskip("xdist")
    done = run(project, "-v", "-p", "xdist", "-n", "1", "--dist", "loadgroup")
    assert SUMMARY in done.stdout, done.stdout
    assert "beside/aside/test_b.py::test_many[2]@one" in done.stdout


def test_what_is_wrong_where_items_are_collected_is_said(project):
    (project / "beside/aside/test_only_here.py").write_text(
        "import os\nassert os.environ.get('WHERE') is None, 'not there'"
    )
    done = run(project, "beside/aside/test_b.py", "-k", "many")
    assert done.stdout.count("the side process died with exit code 2 and printed:") == 3, done.stdout
    assert "AssertionError: not there" in done.stdout


def test_a_process_that_ends_badly_is_an_error_of_a_session_that_is_green(project):
    ends = "\ndef pytest_unconfigure():\n    if os.environ.get('WHERE') == 'aside':\n        os._exit(3)\n"
    (project / "beside/aside/conftest.py").write_text(CONFTEST + ends)
    done = run(project, "beside/aside/test_b.py::test_environment")
    assert done.returncode == 1
    assert "the side process ended with exit code 3 and printed:" in done.stderr, done


def test_the_side_process_ends_with_the_outer_one_whatever_it_does(project):
    """It holds the pipe that is read here to the end."""
    (project / "beside/aside/test_d.py").write_text(
        "import threading\ndef test_waits():\n    print('waiting', flush=True)\n    threading.Event().wait()\n"
    )
    outer = subprocess.Popen(
        command("-s", "beside/aside/test_d.py"),
        cwd=project,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with outer:
        try:
            assert any(b"waiting" in line for line in outer.stdout)
        finally:
            outer.kill()
        outer.communicate(timeout=300)
