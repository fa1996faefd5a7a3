"""Test `shardlite ring`: its text."""

import pytest

from shardlite.cli import main
from shardlite.lab.ring.picture import HEIGHT, WIDTH, frames, text
from tests.support.markdown import ROOT, blocks
from tests.support.simulated import MAKERS, by_steps, cases, every


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """Make pages as wide as they can be, whatever terminal runs the tests."""
    monkeypatch.setenv("COLUMNS", f"{WIDTH}")


@pytest.mark.parametrize("block", blocks((ROOT / "docs" / "rings.md").read_text(), "text"))
def test_the_documentation_shows_what_it_prints(block, capsys):
    """Check its pages; the documentation may omit some lines."""
    command, shown = block.split("\n", 1)
    main(command.removeprefix("$ shardlite ").split())
    page, found = capsys.readouterr().out, 0
    for stretch in shown.split("(...)\n"):
        found = page.index(stretch.strip("\n"), found)


FEW = (1, 2, 3, 4, 5, 8, 12, 64)
"""Where something changes: a world of one, none and several divisors, all ranks on a page and one for all."""

MANY = [pytest.param(*param.values, id=param.id, marks=pytest.mark.slow) for param, _ in cases(6, 7, 9, 10, 11, 16, 48)]


@pytest.mark.parametrize(
    ("operation", "algorithm", "world_size", "node"), [*(param for param, _ in cases(*FEW)), *MANY]
)
@pytest.mark.parametrize("width", [80, WIDTH])
def test_every_page_fits_a_terminal(operation, algorithm, world_size, node, width):
    page = text(MAKERS[operation](algorithm, world_size, node=node), node, width)
    lines = page.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 2 * HEIGHT
    assert page.isascii()
    assert lines == [line.rstrip() for line in lines]


@every(1, 2, 3, 4, 5, 6, 8)
def test_the_frames_are_what_the_schedule_means(operation, algorithm, world_size, node):
    schedule = MAKERS[operation](algorithm, world_size, node=node)
    *steps, end = frames(schedule)
    assert [step.sent for step in steps] == list(schedule.steps)
    assert list(end.held) == by_steps(schedule)


@pytest.mark.parametrize("algorithm", ["ring", "direct", "bidirectional"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_bytes_that_a_rank_sends(make, algorithm):
    """All but its own share, in whole segments or in halves."""
    assert "\nbytes per rank      3/4 of the buffer sent, as much received\n" in text(make(algorithm, 4)) + "\n"
