"""All strategies learn the same, their traffic is counted, and the page shows the commands' output."""

import re
from contextlib import ExitStack
from unittest import mock

import pytest

from bench.strategies import problem, rings, run
from bench.strategies.replicas import AVERAGED_EVERY
from bench.strategies.run import STRATEGIES, main
from shardlite.lab.table import read_rows
from shardlite.lab.train.settings import GPTConfig
from tests.support.markdown import ROOT, assert_printed, commands
from tests.support.ranks.scripts import run_command

PAGE = (ROOT / "docs" / "data-parallelism.md").read_text()
SMALL = GPTConfig(layers=2, width=16, heads=2, context=16)
STEPS = 2 * AVERAGED_EVERY
CLOSE = 1e-3


def small(main, arguments):
    """Call `main` with a smaller model, a smaller batch and a smaller tolerance."""
    with ExitStack() as patches:
        for module, name, value in ((problem, "CONFIG", SMALL), (problem, "BATCH", 4), (run, "CLOSE", CLOSE)):
            patches.enter_context(mock.patch.object(module, name, value))
        return main(arguments)


def small_main(arguments):
    return small(main, arguments)


def wrong_main(arguments):
    """Leave out the ring, so that each rank trains on its own gradients."""
    chosen = {name: STRATEGIES[name] for name in ("one process", "CPU master", "ring all-reduce")}
    with mock.patch.object(run, "STRATEGIES", chosen), mock.patch.object(rings, "ring_all_reduce"):
        return small(main, arguments)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_strategies_learn_the_same(cluster, tmp_path, world_size):
    options = ["--what", "strategies", "--steps", STEPS, "--out", tmp_path]
    done = run_command(cluster, small_main, *options, ranks=world_size)
    assert [each.status for each in done] == [0] * world_size, done[0].err
    rows = {row["strategy"]: row for row in read_rows([tmp_path / f"strategies-gpt-{world_size}ranks.jsonl"])}
    assert rows.keys() == STRATEGIES.keys() - {"nn.DataParallel"}
    for name, row in rows.items():
        assert len(row["losses"]) == STEPS
        if STRATEGIES[name].is_same:
            assert row["largest_difference"] < CLOSE, name
        if row["formula"].startswith("at most"):
            assert row["formula_bytes"] / 3 < row["sent_bytes"] <= 1.2 * row["formula_bytes"], name  # padding, flags
        else:
            assert row["sent_bytes"] == pytest.approx(row["formula_bytes"], rel=0.05), name
    assert rows["parameter averaging"]["largest_difference"] > CLOSE
    assert rows["sharded by hand"]["held_bytes"] < 0.8 * rows["bucketed DDP"]["held_bytes"]
    assert (tmp_path / "strategies-losses.png").stat().st_size > 10_000
    assert "step 10 of 20" in done[0].err
    assert done[1].out == done[1].err == ""


def test_a_wrong_strategy_fails_the_bench(cluster, tmp_path):
    done = run_command(cluster, wrong_main, "--what", "strategies", "--steps", STEPS, "--out", tmp_path)
    assert [each.status for each in done] == [1, 1]
    assert "ring all-reduce: a loss differs by" in done[0].err
    assert "CPU master" not in done[0].err.split("step 10 of 20")[1]


# ---- the page -------------------------------------------------------------------------------------------------------

CONSOLE = commands(PAGE)


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=pytest.mark.slow if "plan" in each else ()) for each in CONSOLE]
)
def test_commands_print_what_the_page_shows(command):
    assert_printed(command, CONSOLE[command])


def test_the_page_has_a_command_for_each_kind_of_number():
    assert {command.split()[0] for command in CONSOLE} == {"ring", "plan"}
    assert "1,557,611,200 parameters" in PAGE
    assert f"more than {run.CLOSE} nats per byte" in PAGE


def test_each_strategy_is_on_the_page():
    names = set(re.findall(r":pyobject: (\w+)", PAGE))
    assert {strategy.train.__name__ for strategy in STRATEGIES.values()} <= names
