"""Pages that show `shardlite plan`: the command prints their lines, and sentences and the picture have its numbers."""

import re

import pytest

from bench import fit_picture
from shardlite.lab.table import RESULTS, read_rows
from tests.support.markdown import ROOT, assert_printed, commands

FIT, PLAN = ((ROOT / "docs" / name).read_text() for name in ("fit.md", "plan.md"))
EXAMPLES = fit_picture.examples(FIT)
QUICK = "plan --model gpt2-xl --batch 1 --ranks 1 --card 12GB --checkpoint with --compute bf16 --in-backward --offload"
SHOWN = commands(FIT) | commands(PLAN)


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=() if each == QUICK else pytest.mark.slow) for each in SHOWN]
)
def test_the_command_prints_what_the_page_shows(command):
    assert_printed(command, SHOWN[command])


def test_each_example_fits_with_offload_only():
    assert [re.findall(r"(\d) x (\d+)GB", headline)[0] for headline in EXAMPLES] == [
        ("1", "12"),
        ("2", "24"),
        ("8", "80"),
    ]
    for headline, (without, with_offload) in EXAMPLES.items():
        card = float(re.findall(r"(\d+)GB", headline)[0])
        on_gpu = sum(nbytes for title, nbytes in with_offload.items() if title != "on host")
        assert on_gpu < 0.9 * card < card < sum(without.values()), headline


def test_sentences_have_the_numbers_of_the_tables():
    on_host = [tables[1]["on host"] for tables in EXAMPLES.values()]
    assert f"needs {on_host[0]:.1f} GB of host memory" in FIT
    assert f"this takes {on_host[0] / 25.1:.1f} s" in FIT
    assert f"two ranks together pin {2 * on_host[1]:.0f} GB" in FIT
    assert f"eight ranks together pin {8 * on_host[2]:.0f} GB" in FIT
    fp32, bf16 = (float(each) for each in re.findall(r"([\d.]+) s per step on dgx-h100", FIT))
    assert f"{fp32 / bf16:.0f} times as long as in bf16" in FIT
    longer = re.findall(r"(\d{4}\.\d) +\d+\.\d +\d+%", FIT)
    assert f"{float(longer[1]) / float(longer[0]) - 1:.1%} longer" in FIT.replace(" %", "%")


def test_the_page_has_the_measured_range():
    rows = read_rows([RESULTS / f"fit-gpt2-{ranks}ranks.jsonl" for ranks in (2, 4)])
    found = [row["pss_vs_limit"] for row in rows]
    assert len(rows) == 6
    assert all(row["kept"] for row in rows)
    assert f"between {min(found):.1%} and {max(found):.1%} of the limit" in " ".join(FIT.split()).replace(" %", "%")


def test_the_picture_has_the_numbers_of_the_page(tmp_path):
    pytest.importorskip("matplotlib", reason="draws")
    drawn = fit_picture.draw(FIT, tmp_path / "fit.svg").read_text()
    assert len(shape_of(drawn)) > 3 * 10
    assert shape_of(drawn) == shape_of(fit_picture.PICTURE.read_text()), "run python -m bench.fit_picture"


def shape_of(picture: str) -> list[str]:
    """Return the outlines of the bars."""
    return re.findall(r'<path d="([^"]*)" clip-path', picture)
