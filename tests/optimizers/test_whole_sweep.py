"""No optimizer of other libraries trains something else in silence, crashes or hangs. All of them are slow tests."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD

from bench.optimizers.libraries import LIBRARIES, Candidate, candidates
from bench.optimizers.sweep import DEFECTS, FILE, counts, sweep, table, try_all
from shardlite.lab.table import RESULTS, read_rows

SAMPLE = {
    "torch": ["SGD", "AdamW", "Muon", "Adafactor", "RAdam"],
    "pytorch_optimizer": ["soap", "shampoo", "lamb", "lion", "adamp", "prodigy", "sm3"],
    "timm": ["cadamw", "laprop", "nadamw", "adopt"],
}


def swept(library: str, group: Any, only: list[str]) -> list[dict[str, Any]]:
    rows = [*sweep([library], group, only)]
    bad = [row for row in rows for where in ("shards", "whole") if set(row[where].values()) & set(DEFECTS)]
    assert not bad, bad
    return rows


def on(library: str, ranks: int, *marks: Any) -> Any:
    absent = pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")
    return pytest.param(library, ranks, marks=(absent, *marks))


@pytest.mark.parametrize(
    ("library", "group"), [on("torch", 2), on("pytorch_optimizer", 3), on("timm", 2)], indirect=["group"]
)
def test_a_sample_is_the_same_or_refused(group: Any, library: str) -> None:
    rows = swept(library, group, SAMPLE[library])
    assert sorted(row["optimizer"] for row in rows) == sorted(SAMPLE[library])
    if library == "torch":
        outcomes = {row["optimizer"]: (row["shards"]["3"], row["whole"]["3"]) for row in rows}
        assert outcomes["AdamW"] == ("same", "same")
        assert outcomes["Muon"] == outcomes["Adafactor"] == ("refused", "same")


@pytest.mark.parametrize(
    ("library", "group"),
    [on(library, ranks, pytest.mark.slow) for library in LIBRARIES for ranks in (2, 3)],
    indirect=["group"],
)
@pytest.mark.parametrize("third", range(3))
def test_all_are_the_same_or_refused(group: Any, library: str, third: int) -> None:
    names = [each.name for each in candidates(library)]
    if group.size() < dist.get_world_size():  # demo communicates with all processes, not with those of the group
        names = [name for name in names if name != "demo"]
    assert swept(library, group, names[third::3])


class Lengths(SGD):
    """Steps along a gradient of length 1, computed without a function that is watched."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            flat = param.grad.flatten()
            param.sub_(0.1 * param.grad / (flat @ flat).sqrt())


def test_a_difference_would_be_found(group: Any) -> None:
    """Without the check, an optimizer of norms differs on shards."""
    with patch("shardlite.optimizers.hand_over._judge_class"):
        row = try_all(Candidate("here", "norms", Lengths, {"lr": 0.01}), group, stages=(3,))
    assert row["shards"] == {"3": "differs"}
    assert row["whole"] == {"3": "same"}
    assert "here norms (shards, 2 ranks, stage 3): differs" in counts([row])


def test_the_rows_of_all_optimizers_have_no_defect() -> None:
    rows = read_rows([Path(RESULTS) / FILE])
    assert {row["ranks"] for row in rows} == {2, 3}
    assert not [row for row in rows for where in ("shards", "whole") if set(row[where].values()) & set(DEFECTS)]
    names = {library: len({row["optimizer"] for row in rows if row["library"] == library}) for library in LIBRARIES}
    assert names["timm"] >= 80
    assert names["pytorch_optimizer"] >= 120
    assert len(table(rows).splitlines()) == 2 + sum(names.values())
    assert {each.name for each in candidates("torch")} == {
        row["optimizer"] for row in rows if row["library"] == "torch"
    }
