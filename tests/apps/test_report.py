"""`shardlite report` writes one self-contained page that has every row."""

import json
import re
import sys
from base64 import b64decode
from html import unescape

import pytest

from shardlite.apps.cli import main
from shardlite.apps.report import page
from shardlite.apps.report.cells import heading, texts
from shardlite.apps.report.rows import BENCHES, bench_of, by_bench, by_setting, read_rows
from tests.support.markdown import ROOT

WHERE = {"machine": "a box <of> tests & more", "torch": "2.13.0", "python": "3.11.7", "date": "2026-11-24"}
STEP = {"bench": "step", "model": "gpt", "words": "a GPT", "ranks": 2, "transport": "gloo", **WHERE}
STEPS = [
    {**STEP, "system": "floor", "ms_p20": 90.0, "ms_p50": 100.0, "ms_p80": 110.0, "peak_bytes": None},
    {**STEP, "system": "fsdp2", "ms_p20": 130.0, "ms_p50": 150.4, "ms_p80": 160.0, "peak_bytes": 3 << 20},
    {**STEP, "system": "stage3", "ms_p20": 99.0, "ms_p50": 101.0, "ms_p80": 103.0, "peak_bytes": 2 << 20},
]
UNKNOWN = [
    {"bench": "leaps", **WHERE, "frog": "green <b>", "height_bytes": 1 << 30, "leap_us_p50": 7.5, "command": "leap 1"},
    {"bench": "leaps", **WHERE, "frog": "red", "height_bytes": 2 << 30, "leap_us_p50": None, "command": "leap 1"},
]


@pytest.fixture
def report(tmp_path):
    """Makes the page of some rows with the command."""
    pytest.importorskip("jinja2", reason="the page needs it")
    pytest.importorskip("matplotlib", reason="the plots need it")

    def made(rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["report", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out.html")]) == 0
        return (tmp_path / "out.html").read_text()

    return made


def plots(text):
    """The plots of a page, as SVG."""
    return [b64decode(found).decode() for found in re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', text)]


def cells(text):
    """The cells of all tables behind the contents."""
    return [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", text.split("</nav>")[1])]


def test_a_page_has_question_provenance_command_plot_and_table(report, tmp_path, capsys):
    text = report(STEPS)
    out, err = capsys.readouterr()
    assert out == f"wrote {tmp_path / 'out.html'}: 3 rows\n"
    assert err == "drawing step: 3 rows ...\n"
    assert f"<h2>{BENCHES['step'].question}</h2>" in text
    for words in ("a box &lt;of&gt; tests &amp; more", "torch: 2.13.0", "2026-11-24", "rows.jsonl", "ranks: 2"):
        assert words in text
    assert "python -m bench.step --ranks 2 --model gpt --systems floor fsdp2 stage3</code>" in text
    (svg,) = plots(text)
    for words in ("time, ms", "peak size, MiB", "FSDP2", "ShardLite, stage 3", "#0072b2", "#e69f00"):
        assert words in svg
    assert cells(text) == [
        *("floor: no communication", "90.0", "100", "110", ""),
        *("FSDP2", "130", "150", "160", "3.00"),
        *("ShardLite, stage 3", "99.0", "101", "103", "2.00"),
    ]


def test_rows_of_an_unknown_bench_are_all_shown(report):
    text = report(UNKNOWN)
    assert "What does leaps measure?" in text
    assert "<code>leap 1</code>" in text
    assert "leap time, µs" in plots(text)[0]
    assert "<b>" not in text, "text of a row became markup"
    assert cells(text) == ["green <b>", "1.00", "7.50", "red", "2.00", ""]


def test_lists_are_curves(report):
    curves = {"one process": [3.0, 2.5, 2.25, 2.0, 1.75], "ring": [3.0, 2.5, 2.25, 2.0, 1.5]}
    rows = [{"bench": "strategies", **WHERE, "strategy": name, "losses": each} for name, each in curves.items()]
    text = report(rows)
    for words in ("one process", "ring", ">step<", ">losses<"):
        assert words in plots(text)[0]
    assert "<td>3.00 to 1.75, 5 values</td>" in text


def test_an_earlier_run_of_a_setting_is_folded(report):
    slower = [{**row, "date": "2026-10-01", "ms_p50": 10 * row["ms_p50"]} for row in STEPS]
    newest, earlier = report([*slower, *STEPS]).split("<details><summary>An earlier run, 2026-10-01</summary>")
    assert ">150</td>" in newest
    assert ">1,504</td>" not in newest
    assert ">1,504</td>" in earlier


def test_every_row_that_was_measured_has_a_line(monkeypatch):
    """A row that is alone in its run needs no table."""
    pytest.importorskip("jinja2", reason="the page needs it")
    monkeypatch.setattr(page, "plot", lambda rows, bench: "")
    rows = read_rows([ROOT / "bench" / "results"])
    text = page.page(rows)
    settings = [
        runs for name, found in by_bench(rows).items() for runs in by_setting(found, bench_of(name, found).labels)
    ]
    runs = [run for runs in settings for run in runs]
    assert sum(map(len, runs)) == len(rows)
    assert text.split("</nav>")[1].count("<tr><td") == sum(len(run) for run in runs if len(run) > 1)


def newest_run(name, rows):
    """The newest run of the first setting that has values to draw, or of the first setting."""
    runs = [runs[0] for runs in by_setting(rows, BENCHES[name].labels)]
    drawn = (run for run in runs if any(value in row for row in run for value in BENCHES[name].values))
    return next(drawn, runs[0])


def test_a_run_of_each_bench_is_drawn_below_its_question(report):
    """On a page that fetches nothing."""
    benches = by_bench(read_rows([ROOT / "bench" / "results"]))
    text = report([row for name, rows in benches.items() for row in newest_run(name, rows)])
    assert not re.search(r"<(script|link|iframe)\b|(src|href)=\"(?!#|data:)|url\(|@import", text), "not self-contained"
    sections = dict(re.findall(r"<h2>(.*?)</h2>(.*?)(?=<h2>|$)", unescape(text), flags=re.DOTALL))
    for name in benches:
        assert len(plots(sections[BENCHES[name].question])) == bool(BENCHES[name].values), name


def test_rows_of_other_settings_are_not_compared_and_older_ones_come_later():
    old = [{**row, "date": "2026-10-01", "file": "old"} for row in STEPS]
    new = [{**row, "file": "new"} for row in STEPS]
    other = [{**row, "ranks": 4, "file": "new"} for row in STEPS]
    bf16 = [{**row, "precision": "bf16", "file": "new"} for row in STEPS]
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


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{", r"rows.jsonl, line 2: not JSON in UTF-8 \(Expecting property name"),
        (b"\xff{}", r"rows.jsonl, line 2: not JSON in UTF-8 \('utf-8' codec can't decode"),
        (b"[1]", "rows.jsonl, line 2: expected a JSON object with the strings bench, machine, torch, date"),
        (b'{"bench": "step", "machine": "m", "date": 3}', "line 2: expected a JSON object with the strings bench,"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, refusal, line, complaint):
    (tmp_path / "rows.jsonl").write_bytes(json.dumps(STEPS[0]).encode() + b"\n" + line)
    assert re.search(complaint, refusal(main, ["report", str(tmp_path), "--out", str(tmp_path / "out.html")]))
    assert not (tmp_path / "out.html").exists()


def test_without_rows_there_is_no_page(tmp_path, refusal):
    for missing in (tmp_path, tmp_path / "nothing.jsonl"):
        assert missing.name in refusal(main, ["report", str(missing), "--out", str(tmp_path / "out.html")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("package", "name"), [("jinja2", "Jinja2"), ("matplotlib", "matplotlib")])
def test_a_package_that_is_missing_is_named_with_the_remedy(tmp_path, monkeypatch, refusal, package, name):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "rows.jsonl").write_text(json.dumps(STEPS[0]))
    printed = refusal(main, ["report", str(tmp_path), "--out", str(tmp_path / "out.html")])
    assert f"report needs {name}, which is not installed; pip install 'shardlite[demo]'" in printed


def test_the_place_of_the_page_is_checked_first(tmp_path, refusal):
    for out, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "out.html", "there is no folder")):
        told = refusal(main, ["report", "--out", str(out)])
        assert words in told
        assert "drawing" not in told
