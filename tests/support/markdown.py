"""Reading the documentation: its blocks of code, its links, and its tables of measured rows.

    python -m tests.support.markdown

writes each table of the pages anew from the rows that it names:

    <!-- rows: COMMAND -->TABLE<!-- end of rows -->           there must be rows
    <!-- rows if any: COMMAND -->TABLE<!-- end of rows -->    without rows nothing stands there
    <!-- until gpu -->WORDS<!-- end -->                       goes for good with the first results of a GPU
"""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

from shardlite.cli import main as shardlite
from shardlite.lab import table as selection

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_TABLE = re.compile(
    r"(?P<open><!-- rows(?P<optional> if any)?: )(?P<source>[^\n]*?)(?P<begin> -->\n)(?P<table>.*?)"
    r"(?=<!-- end of rows -->)",
    re.DOTALL,
)
_UNTIL = re.compile(r"<!-- until gpu -->.*?<!-- end -->\n?", re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """Return what is between fences of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> dict[str, str]:
    """Return the lines that a page shows below each command `$ shardlite ...`."""
    found = (re.match(r"\$ shardlite (.*)\n((?s:.*))", block) for block in blocks(text, "console"))
    return {each[1]: each[2] for each in found if each is not None}


def assert_printed(command: str, shown: str) -> None:
    """Run a command of `shardlite`, and check that it prints the lines that a page shows."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert shardlite(command.split()) == 0
    printed = [line.rstrip() for line in out.getvalue().splitlines()]
    for line in shown.splitlines():
        assert line.rstrip() in printed, line


def cells(text: str) -> list[list[str]]:
    """Return the cells of each row of the tables in a text, without their headers."""
    lines = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    rules = {number for number, line in enumerate(lines) if re.fullmatch(r"\|( ?:?-+:? ?\|)+", line)}
    headers = {number - 1 for number in rules}
    return [
        [cell.strip() for cell in line[1:].removesuffix("|").split(" | ")]
        for number, line in enumerate(lines)
        if line.startswith("|") and number not in rules | headers
    ]


def links(text: str) -> list[str]:
    """Return what inline links lead to, without the place in it; links to a place in the same file are left out."""
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose)


def assert_links_lead_somewhere(path: Path) -> None:
    """Check those that lead to a file."""
    for target in links(path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), f"{path.name}: {target}"


# ---- tables of rows -------------------------------------------------------------------------------------------------


def tables(text: str) -> list[tuple[str, str]]:
    """Return the source and the content of each table that is made from rows, but for those without rows."""
    found = [(each, each["table"].strip()) for each in _TABLE.finditer(text)]
    return [(each["source"], table) for each, table in found if table or not each["optional"]]


def with_new_tables(text: str, results: Path = selection.RESULTS) -> str:
    """Return a page with each table made anew, and without the words that rows of a GPU contradict."""

    def renewed(found: re.Match[str]) -> str:
        table = made(found["source"], results) if not found["optional"] else made_if_any(found["source"], results)
        return f"{found['open']}{found['source']}{found['begin']}\n{table}\n\n" if table else _emptied(found)

    text = _TABLE.sub(renewed, text)
    return _UNTIL.sub("", text) if gpu_has_run(results) else text


def gpu_has_run(folder: Path = selection.RESULTS) -> bool:
    """Return whether the folder has a result of `bench.gpu`: the bits of a kernel, or a time."""
    rows = selection.read_rows(folder.glob("gpu-*.jsonl"))
    return any("error" not in row and ("contract" in row or "ms_p50" in row) for row in rows)


def _emptied(found: re.Match[str]) -> str:
    return f"{found['open']}{found['source']}{found['begin']}"


def made_if_any(source: str, results: Path = selection.RESULTS) -> str:
    """Return the table of a source, or nothing without rows."""
    try:
        return made(source, results)
    except selection.NoRowsError:
        return ""


def made(source: str, results: Path = selection.RESULTS) -> str:
    """Return the table that `COMMAND FILE ...` prints, with some systems only if it ends in `, only: SYSTEM, ...`."""
    if "shardlite.lab.slower" in source:  # it chooses among all rows
        from shardlite.lab import slower

        return slower.table()

    if "shardlite.lab.links" in source:  # it has no rows
        from shardlite.lab import links

        return links.table()

    command, _, systems = source.partition(", only: ")
    rows = selection.rows_for(command.split(), results)
    if systems:
        rows = [row for row in rows if row["system"] in systems.split(", ")]
    return selection.render(rows)


def main() -> None:
    """Do what the docstring of the module says."""
    for page in PAGES:
        text = page.read_text()
        new = with_new_tables(text)
        if new != text:
            page.write_text(new)
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
