"""The first GPU rows appear on the pages, and sentences that they contradict are removed.

Rows here are made up, and stay in a temporary folder.
"""

import json
import shutil

import pytest

from bench.gpu.land import landed
from bench.gpu.run import PROBES, ROWS, main
from shardlite.lab import table
from shardlite.lab.table import RESULTS, read_rows
from tests.support.markdown import PAGES, ROOT, gpu_has_run, with_new_tables

MACHINE = {"card": "NVIDIA Made-up 9000", "machine": "NVIDIA Made-up 9000; a processor, 16 cores", "torch": "2.11.0"}
MACHINE |= {"python": "3.12.3", "date": "2026-01-02", "dry": False, "bench": "gpu"}
STEP = {"probe": "fake8", "model": "gpt2-xl", "ranks": 8, "words": "GPT-2 XL", "clip": 1.0, "peak_bytes": 9 << 30}
STEP |= {"ms_p20": 100.0, "ms_p80": 140.0, "host_ms_p50": 40.0, "slept_ms": 30.0, "exposed_ms": 2.5}
FOUND = [
    STEP | {"system": "fsdp2", "ms_p50": 130.25, "ms_p50_vs_fsdp2": 1.0},
    STEP | {"system": "exact", "ms_p50": 117.5, "ms_p50_vs_fsdp2": 0.902},
    {"probe": "bits", "kernel": "adamw", "format": "fp32", "error": "AssertionError: 3 sums are wrong"},
    {"bench": "gpu", "dry": False, "probe": "fake8", "status": "ok", "seconds": 99.0, "rows": 2},
]
SENTENCES = ("No GPU has run", "There are no rows yet")


def folder_with(tmp_path, rows):
    """A folder as it comes back."""
    folder = tmp_path / "gpu"
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(row if "status" in row else MACHINE | row) for row in rows]
    (folder / ROWS).write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def results(tmp_path):
    """The results of all benches that there are, less those of GPUs."""
    folder = tmp_path / "results"
    folder.mkdir()
    for file in RESULTS.glob("*.jsonl"):
        if not file.name.startswith("gpu-"):
            shutil.copy(file, folder)
    return folder


def test_rows_land_in_a_file_of_the_card_and_the_day(tmp_path, results):
    file = landed(folder_with(tmp_path, FOUND), results)
    assert file == results / "gpu-made-up-9000-2026-01-02.jsonl"
    assert len(read_rows([file])) == len(FOUND)
    again = [FOUND[2] | {"error": None, "contract": "bits"}]
    assert landed(folder_with(tmp_path, again), results) == file
    rows = read_rows([file])
    assert [row["probe"] for row in rows] == ["fake8", "fake8", "fake8", "bits"]
    assert rows[-1]["contract"] == "bits"


def test_what_is_no_run_on_a_gpu_is_refused(tmp_path, results, refusal):
    with pytest.raises(ValueError, match="dry run, which measures nothing"):
        landed(folder_with(tmp_path, [FOUND[0] | {"dry": True}]), results)
    with pytest.raises(ValueError, match="no row that names a card"):
        landed(folder_with(tmp_path, FOUND[-1:]), results)
    assert "nowhere" in refusal(main, ["--land", str(tmp_path / "nowhere")])
    assert not list(results.glob("gpu-*"))


@pytest.mark.skipif(gpu_has_run(), reason="the sentences went with the first rows")
def test_without_rows_the_pages_say_that_no_gpu_has_run(results):
    for page in (ROOT / "README.md", ROOT / "docs" / "measured.md", ROOT / "docs" / "index.md"):
        text = page.read_text()
        assert "No GPU has run" in text
        assert with_new_tables(text, results).count("No GPU has run") == text.count("No GPU has run")


def test_with_rows_no_page_says_that_no_gpu_has_run(tmp_path, results):
    landed(folder_with(tmp_path, FOUND), results)
    for page in PAGES:
        new = with_new_tables(page.read_text(), results)
        assert not any(sentence in new for sentence in SENTENCES), page.name
        assert with_new_tables(new, results) == new
    new = with_new_tables((ROOT / "docs" / "measured.md").read_text(), results)
    assert "| gpt2-xl | exact | 117.50 | 0.90 |" in new
    assert table.PROBES["fake8"]["words"] in new
    assert "NVIDIA Made-up 9000, torch 2.11.0, 2026-01-02." in new
    assert "AssertionError: 3 sums are wrong" in new


def test_the_page_for_a_gpu_of_your_own_names_every_probe():
    text = (ROOT / "docs" / "gpu.md").read_text()
    for probe in PROBES:
        assert f"| `{probe.name}` | {probe.seconds:g} |" in text
