"""The table of losses takes the worst pair of the newest runs, and gives a reason in each line."""

import re

import pytest

from shardlite.lab.losses import LOSSES, by_setting, render
from shardlite.lab.table import heading, texts
from tests.support.markdown import ROOT

COMMON = {"bench": "step", "model": "gpt", "ranks": 2, "transport": "gloo", "machine": "m", "torch": "2", "file": "f"}


def step(system: str, ms: float, **others: object) -> dict:
    return {**COMMON, "date": "2026-11-24", "system": system, "ms_p50": ms, **others}


def test_a_line_has_the_worst_pair_of_one_run():
    rows = [*(step("ddp", 100.0), step("stage3", 110.0)), *(step("ddp", 10.0, ranks=4), step("stage3", 12.0, ranks=4))]
    assert render(rows).splitlines()[2:] == [
        "| Step over shared memory, stage 3 | gpt, 4 ranks | DDP | 10.0 ms | 12.0 ms | 1.20 |"
    ]


def test_a_run_that_was_repeated_counts_no_more():
    old = [step("ddp", 1.0, date="2026-11-01"), step("stage3", 9.0, date="2026-11-01")]
    new = [step("ddp", 2.0, precision="fp32"), step("stage3", 1.0, precision="fp32")]
    assert render([*old, *new]).endswith("| 2.00 ms | 1.00 ms | 0.50 |")


def test_each_line_of_the_page_has_a_reason():
    section = (ROOT / "docs" / "measured.md").read_text().split("## Where ShardLite is slower")[1].split("\n## ")[0]
    lines = re.findall(r"^\| ([A-Z][^|]*) \|", section, flags=re.MULTILINE)
    reasons = re.findall(r"^- \*\*(.*?)\.\*\*", section, flags=re.MULTILINE)
    assert lines == reasons == [loss.what for loss in LOSSES]


def test_rows_of_other_settings_are_not_compared_and_older_ones_come_later():
    new = [step("ddp", 1.0), step("stage3", 2.0)]
    old = [{**row, "date": "2026-10-01"} for row in new]
    other, bf16 = ([{**row, **changed} for row in new] for changed in ({"ranks": 4}, {"precision": "bf16"}))
    assert by_setting([*old, *other, *new, *bf16], ("system",)) == [[new, old], [other], [bf16]]


@pytest.mark.parametrize(
    ("key", "values", "title", "shown"),
    [
        ("cpu_ms_p50", [1010.4, 842.0, None], "CPU time, ms", ["1,010", "842", ""]),
        ("peak_bytes", [5 << 30, 1 << 30], "peak size, GiB", ["5.00", "1.00"]),
        ("bytes_per_parameter", [16.376], "size per parameter, bytes", ["16.4"]),
        ("ms_vs_ddp", [0.954, 2.0], "time / DDP", ["0.954", "2.00"]),
        ("ms_p50", [0.21, 99.96], "time, ms", ["0.210", "100"]),
        ("loss.plain", [2.5], "loss: plain", ["2.50"]),
        ("messages", [12, 1024], "messages", ["12", "1,024"]),
        ("reached", [True, None], "reached", ["yes", ""]),
        ("loss", [float("nan"), 1.0], "loss", ["nan", "1.00"]),
    ],
)
def test_keys_and_numbers_are_shown_with_their_units(key, values, title, shown):
    assert heading(key, values) == title
    assert texts(key, values) == shown
