"""Statements of the documentation about tests, files and code are true."""

import ast
import re
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from tests.support.markdown import PAGES, ROOT, assert_links_lead_somewhere, blocks, cells, made, tables
from tests.support.ranks.scripts import run_script

DOCS = sorted((ROOT / "docs").glob("*.md"))
COMPARED = (ROOT / "docs" / "compared.md").read_text()
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
HEADER = ["", "behaviour", "FSDP2", "DeepSpeed (ZeRO-3)", "ShardLite"]
PROGRAMS, COMPLAINTS = COMPARED.split("## Training programs")[1].split("## Seventy-five complaints")
ITEM = re.compile(r"^(\d+)\. (.*?)(?=^\d+\. |^### |\Z)", flags=re.DOTALL | re.MULTILINE)
UNWANTED = re.compile(
    r"somebody|whoever|as good as|let this be|take note of|said of|there and back|\btells\b", re.IGNORECASE
)


def sections(path: Path) -> list[tuple[str, str]]:
    """Return the python of each section of a file, as one script: what a section begins, it goes on with."""
    parts = re.split(r"^## (.*)\n", path.read_text(), flags=re.MULTILINE)
    scripts = zip(["", *parts[1::2]], ["\n\n".join(blocks(text, "python")) for text in parts[::2]], strict=True)
    return [(f"{path.stem}: {title}", script) for title, script in scripts if script]


SCRIPTS = dict(each for path in DOCS for each in sections(path) if path.stem != "index")


def items(text: str) -> list[tuple[int, str]]:
    """Return the numbered items, each in one line."""
    return [(int(number), " ".join(item.split())) for number, item in ITEM.findall(text)]


def limits() -> list[list[str]]:
    """Return the cells of each row of the tables of limits."""
    return cells((ROOT / "docs" / "limits.md").read_text())


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    assert_links_lead_somewhere(path)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(path):
    text = path.read_text()
    for file in re.findall(r"\btests/[\w/]+\.py", text):
        assert (ROOT / file).exists(), f"{path.name} names {file}, which does not exist"
    for file, name in TEST.findall(text):
        assert name in names_in(file), f"{path.name} names {file}::{name}, which does not exist"


@pytest.mark.parametrize("title", SCRIPTS)
def test_python_blocks_run_on_two_ranks(cluster, tmp_path, title):
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[title])
    run_script(cluster, script, warnings="default")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_programs_import_no_laboratory(path):
    code = "\n".join(blocks(path.read_text(), "python"))
    assert "shardlite.lab" not in code
    assert not re.search(r"^(from|import) bench\b", code, flags=re.MULTILINE)


def test_writers_that_are_named_take_the_values_of_a_step():
    code = [cell.strip("`") for row in cells((ROOT / "docs" / "logging.md").read_text()) for cell in row[2:]]
    writer, run = mock.Mock(), mock.Mock()
    for call in code:
        if "step)" in call or "step=step" in call:
            exec(call, {"values": {"loss": 2.5, "norm": 1.0}, "step": 3, "writer": writer, "run": run})
    assert writer.add_scalar.call_args_list == [mock.call("loss", 2.5, 3), mock.call("norm", 1.0, 3)]
    assert run.log.call_args_list == [mock.call({"loss": 2.5, "norm": 1.0}, step=3)]


def test_every_limit_has_a_reason_a_remedy_and_a_test():
    assert len(limits()) > 25
    for row in limits():
        assert len(row) == 5, row
        assert all(row), row
        assert row[1].endswith("."), row
        assert row[2].endswith("."), row
        assert TEST.search(row[-1]), f"no test shows it: {row[0]}"


def test_every_trick_says_how_and_has_a_test():
    for row in cells((ROOT / "docs" / "tricks.md").read_text()):
        assert len(row) == 4, row
        assert all(row), row
        assert row[1].startswith(("Works", "Refused")), row
        assert TEST.search(row[-1]), f"no test shows it: {row[0]}"


def test_every_row_has_a_test_for_what_we_say_of_ourselves():
    rows, notes = cells(PROGRAMS), items(PROGRAMS)
    assert len(rows) > 40
    assert [int(row[0]) for row in rows] == [number for number, _ in notes] == list(range(1, len(rows) + 1))
    for row, (_, note) in zip(rows, notes, strict=True):
        assert len(row) == len(HEADER), row
        assert all(row), row
        assert TEST.search(note), f"no test shows it: {row[1]}"
    assert PROGRAMS.count("| " + " | ".join(HEADER[1:]) + " |") == PROGRAMS.count("\n### ")


def test_every_row_has_a_source_for_what_we_say_of_others():
    """Or says that it was tried, or that there is none; only what is the same everywhere needs none."""
    for row in cells(PROGRAMS):
        for cell in row[2:4]:
            known = (
                "](http" in cell
                or "*tried*" in cell
                or cell == "nothing found"
                or cell.startswith(("PyTorch's", "As "))
            )
            assert known, f"{row[1]}: {cell}"


def test_all_complaints_are_answered():
    numbers, answers = zip(*items(COMPLAINTS), strict=True)
    assert list(numbers) == list(range(1, 76))
    for number, item in zip(numbers, answers, strict=True):
        assert re.match(r"\[[^\]]+\]\(https://", item), f"{number}: no reference first"
        assert TEST.search(item) or "Does not apply" in item, f"{number}: neither a test nor a reason"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_made_from_the_rows(path):
    for source, table in tables(path.read_text()):
        assert table == made(source), f"{path.name}: run `python -m tests.support.markdown`"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_cell_holds_one_sentence(path):
    for row in cells(path.read_text()):
        for cell in row:
            words = re.sub(r"`[^`]*`|\([^()]*\)", "x", re.sub(r"\]\([^)]*\)", "]", cell))
            assert not re.search(r"[.!?] +[A-Z]", words), f"{path.name}: {cell}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_language_is_plain(path):
    found = UNWANTED.search(path.read_text())
    assert found is None, f"{path.name}: {found}"


def test_nothing_is_left_to_do():
    """A row or an answer may wait for a test that is being written, but no commit on the main branch does."""
    for path in DOCS:
        assert "TODO" not in path.read_text(), path.name
