"""The table of slower cases takes the worst pair of the newest runs, and gives a reason in each line."""

import re

from shardlite.lab.slower import CASES, render
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
    assert lines == reasons == [case.what for case in CASES]
