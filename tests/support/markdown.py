"""Reading the documentation: its blocks of code, its links, and its tables of measured rows.

    python -m tests.support.markdown

writes each table of the pages anew from the rows that it names.
"""

import re
from pathlib import Path

from bench.support import selection

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_TABLE = re.compile(
    r"(?<=<!-- rows: )(?P<source>[^\n]*?)(?= -->)(?P<begin> -->\n)(?P<table>.*?)(?=<!-- end of rows -->)", re.DOTALL
)


def blocks(text: str, language: str) -> list[str]:
    """Return what is between fences of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


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
    """Return the source and the content of each table that is made from rows."""
    return [(found["source"], found["table"].strip()) for found in _TABLE.finditer(text)]


def with_new_tables(text: str) -> str:
    """Return a page with each table made anew."""
    return _TABLE.sub(lambda found: f"{found['source']}{found['begin']}\n{made(found['source'])}\n\n", text)


def made(source: str) -> str:
    """Return the table that `COMMAND FILE ...` prints, with some systems only if it ends in `, only: SYSTEM, ...`."""
    if "bench.support.losses" in source:  # it chooses among all rows
        from bench.support import losses

        return losses.table()

    command, _, systems = source.partition(", only: ")
    rows = selection.rows_for(command.split())
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
