"""Test `shardlite ring`: its text."""

import re
from textwrap import dedent

import pytest
import torch

from shardlite.cli import main
from shardlite.comm.schedule import all_gather, order_of_addition, reduce_scatter
from shardlite.lab.ring.picture import HEIGHT, WIDTH, brief, frames, text
from tests.support.markdown import ROOT, blocks
from tests.support.simulated import MAKERS, by_steps, cases, every

RING = """\
    reduce-scatter over 3 ranks, ring: each rank sends to the next one
    Each rank begins with its own numbers for every segment. Rank k ends with the sum of segment k.
    A cell shows whose numbers are in the sum, in the order of addition.

    Columns are segments; [ ] is sent in this step, . is not there.

    step 0     0       1       2
    rank 0 |   0   |   0   |  [0]  |  2 -> rank 1
    rank 1 |  [1]  |   1   |   1   |  0 -> rank 2
    rank 2 |   2   |  [2]  |   2   |  1 -> rank 0

    step 1     0       1       2
    rank 0 |   0   | [2+0] |   .   |  1 -> rank 1
    rank 1 |   .   |   1   | [0+1] |  2 -> rank 2
    rank 2 | [1+2] |   .   |   2   |  0 -> rank 0

    end        0       1       2
    rank 0 | 1+2+0 |   .   |   .   |
    rank 1 |   .   | 2+0+1 |   .   |
    rank 2 |   .   |   .   | 0+1+2 |

    steps               2
    messages per rank   2
    bytes per rank      2/3 of the buffer sent, as much received

    order of addition   that of the ring
      segment 0         1 + 2 + 0
      segment 1         2 + 0 + 1
      segment 2         0 + 1 + 2
"""

DIRECT = """\
    all-gather over 3 ranks, direct: every rank sends to every other one at once
    Rank k begins with segment k. Each rank ends with all of them.

    Columns are segments; [ ] is sent in this step, . is not there.

    step 0   0   1   2
    rank 0 |[0]| . | . |  0 -> ranks 1, 2
    rank 1 | . |[1]| . |  1 -> ranks 2, 0
    rank 2 | . | . |[2]|  2 -> ranks 0, 1

    end      0   1   2
    rank 0 | 0 | 1 | 2 |
    rank 1 | 0 | 1 | 2 |
    rank 2 | 0 | 1 | 2 |

    steps               1
    messages per rank   2
    bytes per rank      2/3 of the buffer sent, as much received
"""

TWO_PARTS = """\
    step 1 a  >..........>   0a 1b -> rank 11, 0b 11a -> rank 1
           b  >>..........
"""


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """Make pages as wide as they can be, whatever terminal runs the tests."""
    monkeypatch.setenv("COLUMNS", f"{WIDTH}")


@pytest.mark.parametrize(
    ("arguments", "page"),
    [
        (["--ranks=3"], RING),
        (["--ranks=3", "--operation=reduce-scatter", "--algorithm=ring"], RING),
        (["--ranks=3", "--operation=all-gather", "--algorithm=direct"], DIRECT),
    ],
)
def test_three_ranks(arguments, page, capsys):
    assert main(["ring", *arguments]) == 0
    assert capsys.readouterr().out == dedent(page)


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


def test_many_ranks_are_shown_by_one():
    page = text(all_gather("bidirectional", 12))
    assert "Not all ranks fit here. This is what rank 0 does" in page
    assert dedent(TWO_PARTS) in page
    assert "rank 0 " in text(all_gather("bidirectional", 4))


@pytest.mark.parametrize("algorithm", ["ring", "direct", "bidirectional"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_bytes_that_a_rank_sends(make, algorithm):
    """All but its own share, in whole segments or in halves."""
    assert "\nbytes per rank      3/4 of the buffer sent, as much received\n" in text(make(algorithm, 4)) + "\n"


def test_what_rank_0_has_of_many_segments():
    page = text(reduce_scatter("hierarchical", 64, node=8), 8)
    rows = re.findall(r"^(step \d+|end) +([o+#.>]{64})", page, flags=re.MULTILINE)
    assert [title for title, _ in rows] == [*(f"step {t}" for t in range(14)), "end"]
    assert rows[0][1] == "ooooooo>" * 8
    assert rows[7][1] == "+......." * 7 + ">......."
    assert rows[-1][1] == "#" + "." * 63
    assert "  segment 5 " in page
    assert "  ...\n  segment 63 " in page


def test_long_sums_are_told_below_the_tables():
    page = text(reduce_scatter("hierarchical", 8, node=4), 4)
    assert "\nend: see the sums below\n" in page
    assert "  segment 0         5 + 6 + 7 + 4 + (1 + 2 + 3 + 0)\n" in page
    assert "6..1 is 6+7+0+1." not in page


def test_eight_ranks_fit_into_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["ring", "--ranks=8"]) == 0
    narrow = capsys.readouterr().out
    assert "6..1 is 6+7+0+1." in narrow
    assert "\nrank 7 |[1..7]|  .   |  .   |  .   |  .   |  .   |  .   |  7   |  0 -> rank 0\n" in narrow
    assert "Not all ranks fit here" not in narrow
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["ring", "--ranks=8"]) == 0
    assert "Not all ranks fit here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("order", "most", "written"),
    [
        (((6, 7), 0), 2, "6..0"),
        (((2, 1), 0), 2, "2+1+..+0"),
        ((1, 2), 2, "1+2"),
        (((4, 5), ((0, 1), 2)), 2, "4+5+(0..2)"),
        (2, 5, "2"),
        (((6, 7), 0), 5, "6+7+0"),
        (((((5, 6), 7), 0), 1), 5, "5+6+7+0+1"),
        ((((((5, 6), 7), 0), 1), 2), 5, "5+6+..+2"),
        ((((((2, 1), 0), 7), 6), 5), 5, "2+1+..+5"),
        (((((((2, 3), 4), 5), 6), 7), 3), 5, "2+3+..+7+3"),
        ((((((1, 2), 3), 4), 5), (((((7, 0), 1), 2), 3), 4)), 5, "1+2+3+4+5+(7+0+..+4)"),
    ],
)
def test_sums_in_few_letters(order, most, written):
    assert brief(order, 8, most=most) == written


def added(order, numbers):
    return numbers[order] if isinstance(order, int) else added(order[0], numbers) + added(order[1], numbers)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 8])
def test_the_page_says_whose_bits_they_are(world_size):
    """Tried with numbers."""
    numbers = torch.randn(world_size, 1000, generator=torch.Generator().manual_seed(world_size))
    ring = [added(order_of_addition(reduce_scatter("ring", world_size), k), numbers) for k in range(world_size)]
    for param, schedule in cases(world_size):
        if param.values[0] == "reduce-scatter":
            told = re.search(r"^order of addition   (.*)$", text(schedule, param.values[-1]), flags=re.MULTILINE)
            sums = [
                (added(order_of_addition(schedule, k, part), numbers), ring[k])
                for k in range(world_size)
                for part in range(schedule.parts)
            ]
            same = all(torch.equal(own, expected) for own, expected in sums)
            known = "that of the ring" if same else "not that of the ring: different bits"
            known += ": the same bits" if same and schedule.algorithm != "ring" else ""
            assert told is not None
            assert told.group(1) == known
