"""Settings and fixtures for all tests."""

import gc
import os

# Before anything reads it: released buffers are filled with NaN, here and in the workers, which inherit it.
os.environ["SHARDLITE_POISON"] = "1"

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.support.ranks.cluster import SEED, Cluster, run_local
from tests.support.ranks.doomed import Doomed
from tests.support.ranks.forkserver import ForkServer
from tests.support.ranks.frozen import freeze
from tests.support.twins.sharded import EVERY_STAGE, STAGES, slow

torch.set_num_threads(1)  # the workers use one thread: a matmul has the same bits here and there

WAYS = {(2, 3): "2-ranks-stage-3", (4, 3): "4-ranks-stage-3", (2, 2): "2-ranks-stage-2"}
"""Stage 3 at two world sizes, and that of the others which shards most, with their names."""

LONGEST = (
    "test_faults",
    "test_parity",
    "test_interpreter",
    "aot",
    "test_readme",
    "test_doctor",
    "test_races",
    "test_soak",
)
"""Groups of tests that take long altogether. They begin first, so that no worker ends with one of them alone."""


def pytest_configure(config: pytest.Config) -> None:
    """Let bodies of ranks know whether slow tests are run."""
    if "not slow" not in config.option.markexpr:
        os.environ[EVERY_STAGE] = "1"


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """A process that has imported everything, and forks ranks."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def cluster(fork_server: ForkServer) -> Iterator[Cluster]:
    """Gloo processes, started at the first use. See `Cluster.run`."""
    gloo = Cluster(fork_server)
    yield gloo
    gloo.close()


@pytest.fixture
def group(request: pytest.FixtureRequest, cluster: Cluster) -> tuple[Cluster, int]:
    """Argument of a test that runs on ranks, two unless it is marked `ranks`; there it is their process group."""
    mark = request.node.get_closest_marker("ranks")
    return cluster, getattr(request, "param", mark.args[0] if mark else 2)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test that takes a `group` on each rank of the cluster; pass on what it takes besides."""
    values = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if "group" not in values:
        return None
    cluster, world_size = values.pop("group")
    cluster.check(pyfuncitem.obj, world_size, **values)
    return True


@pytest.fixture(scope="session")
def doomed(fork_server: ForkServer) -> Doomed:
    """Ranks that may die. See `Doomed.run`."""
    return Doomed(fork_server)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[[Callable[..., Any], Sequence[str]], str]:
    """`refusal(main, arguments)`: what a command prints, only to stderr, before it exits with status 2."""

    def call(main: Callable[..., Any], arguments: Sequence[str]) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        printed = capsys.readouterr()
        assert not printed.out
        return printed.err

    return call


@pytest.fixture(params=["threads", "gloo"])
def run_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`run_ranks(body, world_size, *args, **kwargs)`: one body that sees only a transport, on threads and on gloo."""
    if request.param == "threads":
        return run_local
    return request.getfixturevalue("cluster").run_transport


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Give a test marked `stages` all stages, and one marked `ways` all `WAYS`; what the mark does not name is slow.

    A test marked `ranks(n, ...)` runs on each of these numbers of ranks.

    `test_parity.py` shows that all stages have the same bits, so elsewhere a sample is enough. Of the cases of a test
    marked `sample(n)` all but each `n`-th are slow: a case that differs from one that is not in a single parameter is.
    """
    for mark in metafunc.definition.iter_markers("stages"):
        metafunc.parametrize("stage", [*mark.args, *(slow(stage) for stage in STAGES if stage not in mark.args)])
    ranks = "group" if "group" in metafunc.fixturenames else "world_size"
    for mark in metafunc.definition.iter_markers("ways"):
        others = [way for way in WAYS if way not in mark.args]
        ids = [WAYS[way] for way in (*mark.args, *others)]
        ways = [*mark.args, *(slow(*way) for way in others)]
        metafunc.parametrize((ranks, "stage"), ways, ids=ids, indirect=["group"] if ranks == "group" else [])
    for mark in metafunc.definition.iter_markers("ranks"):
        if len(mark.args) > 1:
            metafunc.parametrize("group", mark.args, indirect=True)
    yield
    together = _given_together(metafunc)
    for mark in metafunc.definition.iter_markers("sample"):
        for call in metafunc._calls:
            if sum(place for name, place in call.indices.items() if name not in together) % mark.args[0]:
                call.marks.append(pytest.mark.slow.mark)


def _given_together(metafunc: pytest.Metafunc) -> set[str]:
    """Return the parameters that stand in one list with another: all but the first of each list."""
    lists = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    names = [each.replace(" ", "").split(",") if isinstance(each, str) else each for each in lists]
    names += [("ranks", "stage") for _ in metafunc.definition.iter_markers("ways")]
    return {name for each in names for name in each[1:]}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep the tests of a file on one worker, unless they say otherwise: they share fixtures and imports."""
    if not item.get_closest_marker("xdist_group"):
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(tryfirst=True)  # who wants another order makes it later
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the `LONGEST`."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(_group(item), len(places)))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from all modules of tests and what they import."""
    freeze()


def pytest_unconfigure() -> None:
    """Free modules when Python ends: Triton reports what is not freed."""
    gc.unfreeze()


def _group(item: pytest.Item) -> str:
    return str(next(item.iter_markers("xdist_group")).args[0])


def pytest_runtest_setup() -> None:
    """Begin each test from the same seed."""
    torch.manual_seed(SEED)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Say how a test that failed is run alone, and from which seed it begins, alone and after any others."""
    report = yield
    if report.failed:
        nodeid = item.nodeid.removesuffix(f"@{_group(item)}")
        report.sections.append(("run it alone", f".venv/bin/python -m pytest '{nodeid}'  # seed {SEED}"))
    return report
