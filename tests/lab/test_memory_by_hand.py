"""The demo model's bytes as `docs/memory.md` derives them by hand: the formulas, the plan, and what was measured."""

import re

import pytest

from shardlite.lab.plan.source import find_source
from shardlite.plan import Planner, RankPlan, Setting
from tests.support.markdown import ROOT
from tests.support.ranks.scripts import run_process

PAGE = (ROOT / "docs" / "memory.md").read_text()
BY_HAND = PAGE.split("## The demo model by hand")[1].split("\n## ")[0]
COMMAND, *PRINTED = PAGE.split("$ shardlite memory ")[1].split("```")[0].splitlines()
ROW = re.compile(r"^\| (?:`(?P<name>[\w ]+)` \| )?`(?P<formula>[\w ()+*/]+)` \| (?P<value>[\d,]+) \|", re.MULTILINE)
SYMBOL = re.compile(r"^\| `(?P<name>\w)` \| (?P<value>\d+) \|", re.MULTILINE)
MEASURED = re.compile(r"^(?P<purpose>[a-z ]+?)  +(?:[\d.]+ to )?[\d.]+ +(?P<value>[\d.]+) ", re.MULTILINE)


@pytest.fixture(scope="module")
def formulas() -> list[tuple[str, int]]:
    """Return name and value of each row in order, after checking that the formula gives the value."""
    values = {found["name"]: int(found["value"]) for found in SYMBOL.finditer(BY_HAND)}
    found = [(row["name"] or "", row["formula"], int(row["value"].replace(",", ""))) for row in ROW.finditer(BY_HAND)]
    for name, formula, value in found:
        assert eval(formula, values) == value, formula
        values |= {name: value} if name.isidentifier() else {}
    return [(name, value) for name, _, value in found]


@pytest.fixture(scope="module")
def plan() -> RankPlan:
    """Return the plan of the page's command."""
    return Planner(find_source("demo-demo", 4, None)).plan(Setting(world_size=2, on_gpu=False))


def measured(lines: list[str]) -> dict[str, float]:
    """Return MiB by purpose of a printed table."""
    return {found["purpose"]: float(found["value"]) for found in MEASURED.finditer("\n".join(lines))}


def test_the_formulas_give_the_bytes_of_the_plan(formulas, plan):
    assert len(formulas) > 20
    at_peak = dict(reversed([each for each in formulas if " " in each[0] or each[0] in plan.timeline.peak]))
    assert {purpose: at_peak.get(purpose, 0) for purpose in plan.timeline.peak} == plan.timeline.peak
    for purpose, nbytes in formulas:
        assert purpose not in plan.timeline.most or nbytes in (plan.timeline.peak[purpose], plan.timeline.most[purpose])


def test_what_was_measured_is_what_was_derived(plan):
    printed = measured(PRINTED)
    assert printed.pop("all together") == pytest.approx(plan.peak / 2**20, rel=0.02)
    bounds = {purpose: nbytes / 2**20 for purpose, nbytes in plan.timeline.most.items() if nbytes}
    assert printed.keys() == bounds.keys()
    for purpose, mib in printed.items():
        assert mib == pytest.approx(bounds[purpose], rel=0.02) or purpose == "gradient buckets"
    assert f"{plan.peak:,} bytes, which are {plan.peak / 2**20:.2f} MiB" in BY_HAND


@pytest.mark.slow
def test_the_command_measures_it_again(tmp_path, plan):
    pytest.importorskip("matplotlib", reason="--timeline needs it")
    done = run_process("-m", "shardlite", "memory", *COMMAND.split(), folder=tmp_path)
    assert done.status == 0, done.out + done.err
    assert measured(done.out.splitlines())["all together"] == pytest.approx(plan.peak / 2**20, rel=0.02)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
