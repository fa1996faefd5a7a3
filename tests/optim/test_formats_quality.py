"""Narrow state formats train a small GPT to the loss of exact state, within its random variation.

`bench.formats.states` says what is trained, and by which criterion a format passes.
"""

from pathlib import Path

import pytest
import torch.distributed as dist

from bench.formats.states import CONTROL, EXACT, SEEDS, Training, formats, measure, summary
from shardlite.lab.table import RESULTS, read_rows

SHORT, LONG = 40, 300

LEARNED = {SHORT: 4.5, LONG: 2.5}
"""Nats per byte: a model that ignores context loses 3.1 (`unigram_entropy`), one that has not begun 5.5."""

AS_GOOD = {SHORT: 0.5, LONG: 1.0}
"""Parts of chance by which a format may differ: in a few steps there is little time to go apart."""


@pytest.fixture(scope="module")
def group():
    """One rank, in this process: a minute of training is too long for a body of the cluster."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
def rows(request, group):
    return measure(group, {**EXACT, **formats(1), **CONTROL, "again": Training()}, request.param)


def of_run(rows, name):
    return next(row for row in rows if row["run"] == name)


def test_the_exact_runs_have_learned(rows):
    assert all(row["loss"] < LEARNED[row["steps"]] for row in rows)
    assert 0 < rows[0]["chance"] < 0.1
    assert all(of_run(rows, name)["difference"] == 0 for name in (*EXACT, "again"))


@pytest.mark.parametrize("run", formats(1))
def test_a_format_is_as_good_as_exact(rows, run):
    row = of_run(rows, run)
    assert row["difference"] != 0, "it would be no other format"
    assert row["of_chance"] <= AS_GOOD[row["steps"]], f"{row['difference']:+.4f}, chance {row['chance']:.4f}"


def test_weights_in_bf16_alone_are_not(rows):
    (control,) = (of_run(rows, run) for run in CONTROL)
    assert control["of_chance"] > 1
    assert control["difference"] > 0


def test_a_row_says_what_was_trained(rows):
    assert {"machine", "torch", "date", "parameters", "steps", "rounding"} <= rows[0].keys()


def test_the_readme_says_what_the_rows_say():
    rows = read_rows([RESULTS / "formats-gpt.jsonl"])
    assert summary(rows) in (Path(__file__).parents[2] / "kernels" / "README.md").read_text()
    assert all(row["of_chance"] <= 1 for row in rows if row["run"] in formats(SEEDS))
