"""What the documentation says of tests, of files and of code is so."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.markdown import ROOT, assert_links_lead_somewhere, blocks
from tests.support.scripts import run_script

DOCS = sorted((ROOT / "docs").glob("*.md"))
COMPARED = (ROOT / "docs" / "compared.md").read_text()
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
HEADER = ["behaviour", "FSDP2", "DeepSpeed (ZeRO-3)", "ShardLite"]


def sections(path: Path) -> list[tuple[str, str]]:
    """Return the python of each section of a file, as one script: what a section begins, it goes on with."""
    parts = re.split(r"^## (.*)\n", path.read_text(), flags=re.MULTILINE)
    scripts = zip(["", *parts[1::2]], ["\n\n".join(blocks(text, "python")) for text in parts[::2]], strict=True)
    return [(f"{path.stem}: {title}", script) for title, script in scripts if script]


SCRIPTS = dict(each for path in DOCS for each in sections(path))


def rows() -> list[list[str]]:
    """Return the cells of each row of the tables of behaviours."""
    lines = [line for line in COMPARED.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [each for each in cells if each != HEADER and set(each[0]) != {"-"}]


def complaints() -> list[tuple[int, str]]:
    """Return the numbered items, each in one line."""
    text = COMPARED.split("## Seventy-five complaints")[1]
    items = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^### |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    return [(int(number), " ".join(item.split())) for number, item in items]


def limits() -> list[list[str]]:
    """Return the cells of each row of the tables of limits."""
    lines = [line for line in (ROOT / "docs" / "limits.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [each for each in cells if each[0] != "What a program does"]


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


def test_every_limit_has_a_test():
    assert len(limits()) > 25
    for row in limits():
        assert len(row) == 4, row
        assert row[0], row
        assert row[1].endswith("."), row
        assert TEST.search(row[-1]), f"no test shows it: {row[0]}"


def test_every_row_has_a_test_for_what_we_say_of_ourselves():
    assert len(rows()) > 40
    for row in rows():
        assert len(row) == len(HEADER), row
        assert all(row), row
        assert TEST.search(row[-1]), f"no test shows it: {row[0]}"


def test_every_row_has_a_source_for_what_we_say_of_others():
    """Or says that it was tried, or that there is none; only what is the same everywhere needs none."""
    for row in rows():
        for cell in row[1:3]:
            known = (
                "](http" in cell
                or "*tried*" in cell
                or cell == "nothing found"
                or cell.startswith(("PyTorch's", "As "))
            )
            assert known, f"{row[0]}: {cell}"


def test_all_complaints_are_answered():
    numbers, items = zip(*complaints(), strict=True)
    assert list(numbers) == list(range(1, 76))
    for number, item in zip(numbers, items, strict=True):
        assert re.match(r"\[[^\]]+\]\(https://", item), f"{number}: no reference first"
        assert TEST.search(item) or "Does not apply" in item, f"{number}: neither a test nor a reason"


def test_nothing_is_left_to_do():
    """A row or an answer may wait for a test that is being written, but no commit on the main branch does."""
    for path in DOCS:
        assert "TODO" not in path.read_text(), path.name


def test_what_was_tried_can_be_tried():
    assert (ROOT / "bench" / "semantics.py").exists()
    assert "`python -m bench.semantics`" in COMPARED
