"""Settings and fixtures for all tests."""

import gc
import os

# Before anything reads it: released buffers are filled with NaN, here and in the workers, which inherit it.
os.environ["SHARDLITE_POISON"] = "1"

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.ranks.cluster import SEED, Cluster, run_local
from tests.support.ranks.doomed import Doomed
from tests.support.ranks.forkserver import ForkServer
from tests.support.ranks.frozen import freeze
from tests.support.twins.sharded import EVERY_STAGE, STAGES, number_of

torch.set_num_threads(1)  # the workers use one thread: a matmul has the same bits here and there

WAYS = {f"{ranks}-ranks-stage-{stage}": (ranks, stage) for ranks, stage in ((2, 3), (4, 3), (2, 2))}
"""Stage 3 at two world sizes, and that of the others which shards most; by the names that tests have there."""

LONGEST = ("test_faults", "test_parity", "interpreter", "aot", "test_readme", "test_doctor", "test_races", "test_soak")
"""Groups of tests that take long altogether. They begin first, so that no worker ends with one of them alone."""

SAMPLED = {
    "test_a_backward_before_the_step_is_refused": 2,
    "test_a_graph_that_is_retained": 2,
    "test_a_narrow_sum_is_finished_in_fp32": 2,
    "test_a_rank_keeps_what_zero_says": 2,
    "test_a_run_goes_on_with_the_same_bits": 2,
    "test_a_run_that_is_taken_up_goes_on_with_the_same_bits": 2,
    "test_a_steady_step_allocates_the_roots_bucket_alone": 2,
    "test_adamw": 2,
    "test_all_is_equal_or_within_its_bound": 2,
    "test_any_mixture_gives_the_bits_of_its_twin": 2,
    "test_any_other_is_refused_on_every_rank": 2,
    "test_between_steps": 2,
    "test_changed_gradients_have_the_norm_of_now": 2,
    "test_containers_of_inputs_and_outputs": 2,
    "test_every_format_has_the_bits_of_messages": 2,
    "test_every_system_trains_and_begins_alike": 2,
    "test_gradients_are_dropped": 2,
    "test_gradients_are_those_of_the_tree_written_out": 2,
    "test_gradients_of_gradients": 2,
    "test_it_has_the_bits_of_the_ordinary_step": 2,
    "test_it_is_found": 2,
    "test_new_values_are_kept_or_refused": 2,
    "test_optimizers_formats_and_transports": 2,
    "test_other_algorithms_add_in_the_order_of_their_schedule": 3,
    "test_other_algorithms_gather_everything": 3,
    "test_programs_that_read_weights": 2,
    "test_reduce_scatter_adds_in_ring_order": 2,
    "test_selective_checkpointing": 2,
    "test_shards_may_be_written_through_data": 2,
    "test_so_many_buckets_exist_beside_the_roots_however_slow_reductions_are": 2,
    "test_traffic_is_exact_and_as_zero_has_it": 2,
    "test_training": 2,
    "test_training_follows_a_twin_in_24_bits": 2,
    "test_training_follows_the_twin_of_its_precision": 2,
    "test_training_gives_the_bits_of_a_twin_that_quantizes_its_weights": 2,
    "test_training_has_the_bits_of_the_rings_order": 2,
    "test_uses_of_parts_are_warned_of_once": 2,
    "test_weights_come_to_rest_again_after_anything_else": 2,
    "test_weights_lie_in_each_step_where_they_lay_in_the_second": 2,
    "test_what_wants_gradients_afterwards_is_refused": 2,
}
"""Tests with many cases that are alike: one in so many is not slow, chosen by the names of the cases."""


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


@pytest.fixture(scope="session")
def doomed(fork_server: ForkServer) -> Doomed:
    """Ranks that may die. See `Doomed.run`."""
    return Doomed(fork_server)


@pytest.fixture(params=["threads", "gloo"])
def run_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`run_ranks(body, world_size, *args, **kwargs)`: one body that sees only a transport, on threads and on gloo."""
    if request.param == "threads":
        return run_local
    return request.getfixturevalue("cluster").run_transport


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that is marked `every_stage` the stages, and one that is marked `everywhere` the `WAYS`.

    That all stages have the same bits is shown in `test_parity.py`, so elsewhere a sample is enough: stage 3, and by
    the name of the test another one, or more ranks. `slow` runs the others.
    """
    if metafunc.definition.get_closest_marker("every_stage"):
        sample = (3, number_of(metafunc.definition.name, below=3))
        marks = [() if stage in sample else pytest.mark.slow for stage in STAGES]
        metafunc.parametrize("stage", [pytest.param(s, marks=m) for s, m in zip(STAGES, marks, strict=True)])
    if metafunc.definition.get_closest_marker("everywhere"):
        metafunc.parametrize(("world_size", "stage"), WAYS.values(), ids=WAYS)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep the tests of a file on one worker, unless they say otherwise: they share fixtures and imports."""
    if not item.get_closest_marker("xdist_group"):
        item.add_marker(pytest.mark.xdist_group(item.path.stem))
    every = SAMPLED.get(getattr(item, "originalname", ""), 1)
    if number_of(item.name, below=every):
        item.add_marker(pytest.mark.slow)
    if item.get_closest_marker("everywhere"):
        two, four, other = WAYS
        way = next(way for way in WAYS if way in item.name)
        number = number_of(item.name.replace(way, ""), below=12)
        if way not in {four if number % 6 == 0 else two, other if number % 3 == 0 else ""}:
            item.add_marker(pytest.mark.slow)


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
