"""The narrow state formats train a small GPT to the loss that exact state trains it to, as far as chance lets one see.

`bench.formats` says what is trained, and by which criterion a format is as good as exact.
"""

from pathlib import Path

import pytest
import torch.distributed as dist

from bench.formats import CONTROL, EXACT, SEEDS, STEPS, Training, formats, measure, render, summary
from bench.table import RESULTS, read_rows

LEARNED = 2.5
"""Nats per byte: a model that ignores context loses 3.1 (`unigram_entropy`), one that has not begun 5.5."""


@pytest.fixture(scope="module")
def group():
    """One rank, in this process: a minute of training is too long for a body of the cluster."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def rows(group):
    return {row["run"]: row for row in measure(group, {**EXACT, **formats(1), **CONTROL}, STEPS)}


def test_the_exact_runs_have_learned(rows):
    assert all(row["loss"] < LEARNED for row in rows.values())
    assert 0 < rows["exact 0"]["chance"] < 0.1


@pytest.mark.parametrize("run", formats(1))
def test_a_format_is_as_good_as_exact(rows, run):
    assert rows[run]["difference"] != 0, "it would be no other format"
    assert rows[run]["of_chance"] <= 1, f"{rows[run]['difference']:+.4f}, chance {rows[run]['chance']:.4f}"


def test_weights_in_bf16_alone_are_not(rows):
    (control,) = (rows[run] for run in CONTROL)
    assert control["of_chance"] > 1
    assert control["difference"] > 0


def test_a_table_has_a_line_for_each_run(group):
    rows = measure(group, {**EXACT, "again": Training()}, steps=3)
    assert len(render(rows).splitlines()) == 2 + len(rows)
    first, *_, again = rows
    assert all(row["difference"] == 0 for row in rows)
    assert again["loss"] == first["loss"]
    assert first["chance"] > 0
    assert {"machine", "torch", "date", "parameters", "steps", "rounding"} <= first.keys()


def test_the_readme_says_what_the_rows_say():
    rows = read_rows([RESULTS / "formats-gpt.jsonl"])
    assert summary(rows) in (Path(__file__).parent.parent / "kernels" / "README.md").read_text()
    assert all(row["of_chance"] <= 1 for row in rows if row["run"] in formats(SEEDS))
