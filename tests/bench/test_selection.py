"""Tables are made of the rows of the newest run that has them."""

import json

import pytest

from shardlite.lab import table as selection
from shardlite.lab.table import read_rows


def write(file, **keys):
    file.write_text(json.dumps({"bench": "step", "model": "gpt", "ranks": 2, **keys}) + "\n")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "step-gpt-2ranks.jsonl", named=True)
    write(tmp_path / "a-machine-2026-11-23.jsonl", ranks=4, clip=1.0)
    write(tmp_path / "b-machine-2026-11-22.jsonl", day=22)
    write(tmp_path / "a-machine-2026-11-21.jsonl", day=21)
    return tmp_path


def selected(folder, *words):
    return selection.rows_for(words, folder, folder)


def test_the_newest_run_that_has_such_rows_is_taken(folder):
    assert selected(folder, "step-gpt-2ranks.jsonl", "bench=step", "ranks=2")[0]["day"] == 22
    assert selected(folder, "bench=step", "ranks=4", "clip=1.0")[0]["clip"] == 1.0
    assert [file.name[-8:-6] for file in selection.runs(folder)] == ["23", "22", "21"]


def test_rows_without_a_setting_have_the_usual_one(folder):
    assert selected(folder, "bench=step", "clip=none", "precision=fp32", "accumulation=1")[0]["day"] == 22


def test_nothing_selected_is_an_error(folder):
    with pytest.raises(ValueError, match=r"no row in .*step-gpt-2ranks.jsonl matches .*mlp"):
        selected(folder, "step-gpt-2ranks.jsonl", "model=mlp")


@pytest.mark.parametrize("bench", sorted(selection.RENDERERS))
def test_each_renderer_exists(bench):
    module, _, name = selection.RENDERERS[bench].partition(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))


def test_the_command_prints_a_table(capsys, monkeypatch):
    file = selection.RESULTS / "step-mlp-2ranks-tree.jsonl"
    monkeypatch.setattr("sys.argv", ["table", str(file)])
    selection.main()
    ddp = next(row for row in read_rows([file]) if row["system"] == "ddp")
    assert f"| DDP | {ddp['ms_p50']:.0f} |" in capsys.readouterr().out
