"""`shardlite report` writes one page of rows: nothing is lost, nothing is fetched, and a browser shows it."""

import json
import re
from html import unescape
from pathlib import Path

import pytest

from shardlite.apps.cli import main
from shardlite.apps.report.benches import BENCHES, bench_of
from shardlite.apps.report.cells import heading, texts
from shardlite.apps.report.page import write_report
from shardlite.apps.report.rows import by_bench, by_setting, read_rows
from shardlite.apps.report.tables import columns, facts
from tests.support.browser import browse, needs_browser
from tests.support.markdown import ROOT

WHERE = {"machine": "a box <of> tests & more", "torch": "2.13.0", "python": "3.11.7", "date": "2026-11-24"}
STEP = {"bench": "step", "model": "gpt", "words": "a GPT", "ranks": 2, "transport": "gloo", **WHERE}
STEPS = [
    {**STEP, "system": "floor", "ms_p20": 90.0, "ms_p50": 100.0, "ms_p80": 110.0, "peak_bytes": None},
    {**STEP, "system": "fsdp2", "ms_p20": 130.0, "ms_p50": 150.5, "ms_p80": 160.0, "peak_bytes": 3 << 20},
    {**STEP, "system": "stage3", "ms_p20": 99.0, "ms_p50": 101.0, "ms_p80": 103.0, "peak_bytes": 2 << 20},
]
UNKNOWN = [
    {"bench": "leaps", **WHERE, "frog": "green <b>", "height_bytes": 1 << 30, "leap_us_p50": 7.5, "command": "leap 1"},
    {"bench": "leaps", **WHERE, "frog": "red", "height_bytes": 2 << 30, "leap_us_p50": None, "command": "leap 1"},
]


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def report(folder: Path, rows: list) -> str:
    """The page of some rows, by the command."""
    file = write(folder / "rows.jsonl", rows)
    assert main(["report", str(file), "--out", str(folder / "out.html")]) == 0
    return (folder / "out.html").read_text()


def test_a_page_has_question_place_command_plot_and_table(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the plots need it")
    text = report(tmp_path, STEPS)
    out, err = capsys.readouterr()
    assert out == f"wrote {tmp_path / 'out.html'}: 3 rows\n"
    assert err == "drawing step: 3 rows ...\n"
    assert f"<h2>{BENCHES['step'].question}</h2>" in text
    for words in ("a box &lt;of&gt; tests &amp; more", "PyTorch 2.13.0", "Python 3.11.7", "2026-11-24", "rows.jsonl"):
        assert words in text
    assert "python -m bench.step --ranks 2 --model gpt --systems floor fsdp2 stage3" in text
    (svg,) = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    for words in ("time, ms", "peak, MiB", "FSDP2", "ShardLite, stage 3", "var(--blue)", "var(--orange)"):
        assert words in svg
    cells = re.findall(r"<td[^>]*>(.*?)</td>", text.split("</figure>")[1])
    assert cells == [
        *("floor: no communication", "100", "90 to 110", ""),
        *("FSDP2", "150", "130 to 160", "3.00"),
        *("ShardLite, stage 3", "101", "99 to 103", "2.00"),
    ]


def test_a_first_row_without_the_number_has_no_bar(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need it")
    text = report(tmp_path, [{**STEP, "system": "ddp", "note": "it was not timed"}, *STEPS])
    (svg,) = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert "FSDP2" in svg
    assert "it was not timed" in text


def test_rows_of_an_unknown_bench_are_all_shown(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need it")
    text = report(tmp_path, UNKNOWN)
    assert "What does leaps measure?" in text
    assert "<code>leap 1</code>" in text
    assert "leap, µs" in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)[0]
    assert "<b>" not in text.split("<main>")[1], "text of a row became markup"
    assert [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", text.split("</figure>")[1])] == [
        *("green <b>", "1.00", "7.50"),
        *("red", "2.00", ""),
    ]


def test_lists_are_curves(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need it")
    curves = {"one process": [3.0, 2.5, 2.25, 2.0, 1.75], "ring": [3.0, 2.5, 2.25, 2.0, 1.5]}
    rows = [{"bench": "strategies", **WHERE, "strategy": name, "losses": each} for name, each in curves.items()]
    text = report(tmp_path, rows)
    (svg,) = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    for words in ("one process", "ring", ">step<", ">loss<"):
        assert words in svg
    assert "<td>3.00 to 1.75, 5 values</td>" in text


def test_an_earlier_run_is_folded(tmp_path):
    """Under the newest one of the same setting."""
    pytest.importorskip("matplotlib", reason="the plots need it")
    slower = [{**row, "date": "2026-10-01", "ms_p50": 10 * row["ms_p50"]} for row in STEPS]
    newest, earlier = report(tmp_path, [*slower, *STEPS]).split(
        "<details><summary>An earlier run, 2026-10-01</summary>"
    )
    assert ">150</td>" in newest
    assert ">1,505</td>" not in newest
    assert ">1,505</td>" in earlier


def test_the_contents_have_one_number_of_a_bench(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need it")
    rows = [{**row, "ms_p50": 1, "above_floor_vs_fsdp2": ratio} for row, ratio in zip(STEPS, (0, 1, 0.25), strict=True)]
    text = report(tmp_path, [*rows, {**rows[2], "ranks": 4, "above_floor_vs_fsdp2": 0.125}])
    contents = re.search("<nav>.*?</nav>", text)[0]
    assert "<b>0.12 to 0.25</b> of the time that FSDP2 adds to a step, at stage 3" in contents
    assert '<a href="#step">' in contents
    assert "<section id=step>" in text


def test_every_row_that_was_measured_has_a_line():
    """In the table of its run, whichever bench wrote it."""
    rows = read_rows([ROOT / "bench" / "results"])
    lines = 0
    for name, found in by_bench(rows).items():
        bench = bench_of(name, found)
        for runs in by_setting(found, bench.labels):
            for run in runs:
                table = columns(run, bench)
                assert table, f"{name}: a table without columns"
                assert {len(column.cells) for column in table} == {len(run)}
                lines += len(run)
    assert lines == len(rows)


def test_rows_of_other_settings_are_not_compared_and_older_ones_come_later():
    old = [{**row, "date": "2026-10-01", "file": "old"} for row in STEPS]
    new = [{**row, "file": "new"} for row in STEPS]
    other = [{**row, "ranks": 4, "file": "new"} for row in STEPS]
    bf16 = [{**row, "precision": "bf16", "file": "new"} for row in STEPS]
    assert by_setting([*old, *other, *new, *bf16], ("system",)) == [[new, old], [other], [bf16]]


def test_what_is_the_same_in_all_rows_is_said_once():
    rows = [{**row, "file": "f", "threads": 1, "steps": 5} for row in STEPS]
    assert facts(rows, [rows], BENCHES["step"]) == ["2 ranks", "1 thread", "over gloo", "steps: 5"]
    titles = [column.title for column in columns(rows, BENCHES["step"])]
    assert titles == ["system", "time, ms", "p20 to p80", "peak, MiB"]


@pytest.mark.parametrize(
    ("key", "values", "title", "shown"),
    [
        ("cpu_ms_p50", [1010.4, 842.0, None], "CPU time, ms", ["1,010", "842", ""]),
        ("peak_bytes", [5 << 30, 1 << 30], "peak, GiB", ["5.00", "1.00"]),
        ("ms_vs_ddp", [0.954, 2.0], "time / DDP's", ["0.95", "2.00"]),
        ("main_us_per_unit_p50", [7.125], "main thread per unit, µs", ["7.12"]),
        ("ms_p50", [0.21, 204.6], "time, ms", ["0.21", "205"]),
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
        ("{", r"rows.jsonl, line 2: not JSON \(Expecting property name enclosed in double quotes at column 2\)"),
        ("[1]", "rows.jsonl, line 2: a row is a JSON object, got list"),
        ('{"bench": "step", "machine": "m", "date": 3}', "line 2: .* torch, date is not there as a string"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, capsys, line, complaint):
    file = write(tmp_path / "rows.jsonl", STEPS[:1])
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), "--out", str(tmp_path / "out.html")])
    assert ended.value.code == 2
    assert re.search(complaint, capsys.readouterr().err)
    assert not (tmp_path / "out.html").exists()


def test_without_rows_there_is_no_page(tmp_path, capsys):
    for missing in (tmp_path, tmp_path / "nothing.jsonl"):
        with pytest.raises(SystemExit):
            main(["report", str(missing), "--out", str(tmp_path / "out.html")])
        assert missing.name in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_text_is_named(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path), "--out", str(tmp_path / "out.html")])
    assert "rows.jsonl: not a file of rows, which is text in UTF-8" in capsys.readouterr().err


def test_the_place_of_the_page_is_checked_first(tmp_path, capsys):
    for out, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "out.html", "there is no folder")):
        with pytest.raises(SystemExit):
            main(["report", "--out", str(out)])
        told = capsys.readouterr().err
        assert words in told
        assert "drawing" not in told


def test_every_bench_that_has_rows_has_a_question():
    assert by_bench(read_rows([ROOT / "bench" / "results"])).keys() <= BENCHES.keys()


def check_self_contained(text: str) -> None:
    """Check that a page fetches nothing, and that its plots do not get into each other's way."""
    assert not re.search(r"<(script|link|img|iframe)\b|(src|href)=\"(?!#)|url\((?!#)|@import", text), (
        "not self-contained"
    )
    ids = re.findall(r'\bid="?([^\s">]+)', text)
    assert len(ids) == len(set(ids)), "plots share an identifier"


def test_a_run_of_each_bench_is_drawn_below_its_question(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need it")
    benches = by_bench(read_rows([ROOT / "bench" / "results"]))
    newest = [by_setting(rows, BENCHES[name].labels)[0][0] for name, rows in benches.items()]
    text = report(tmp_path, [row for run in newest for row in run])
    check_self_contained(text)
    sections = dict(re.findall(r"<h2>(.*?)</h2>(.*?)(?=<h2>|$)", unescape(text), flags=re.DOTALL))
    for name in benches:
        plots = re.findall(r"<svg.*?</svg>", sections[BENCHES[name].question], flags=re.DOTALL)
        assert len(plots) == bool(BENCHES[name].values), name
        assert all("fill: var(--" in plot for plot in plots), name


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_the_report_of_all_rows_light_and_dark(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="matplotlib brings it")
    page = tmp_path / "report.html"
    rows = read_rows([ROOT / "bench" / "results"])
    assert write_report([ROOT / "bench" / "results"], page) == len(rows)
    text = page.read_text()
    check_self_contained(text)
    dom = browse(page, "--dump-dom")
    for name in by_bench(rows):
        assert f"<h2>{BENCHES[name].question}</h2>" in dom, f"rows of {name} are shown without a question of their own"
    assert dom.count("<svg") == text.count("<svg") > 20
    for scheme, paper in ((1, (255, 255, 255)), (0, (20, 24, 29))):
        browse(page, f"--screenshot={tmp_path / 'seen.png'}", f"--blink-settings=preferredColorScheme={scheme}")
        seen = image.open(tmp_path / "seen.png").convert("RGB")
        counts = {colour: count for count, colour in seen.getcolors(maxcolors=1 << 24)}
        assert max(counts, key=counts.__getitem__) == paper
        bars = [colour for colour, count in counts.items() if count > 2000 and max(colour) - min(colour) > 90]
        assert len(bars) >= 3, "ShardLite, FSDP2 and DDP have a colour each"
