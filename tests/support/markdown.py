"""Reading the documentation: its blocks of code, its links, and its tables of measured rows.

    python -m tests.support.markdown

writes each table of the pages anew from the rows that it names. `--collectives FILE` prints the table of collectives.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from bench.support.table import Row, markdown_table, read_rows

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_TABLE = re.compile(
    r"(?<=<!-- rows: )(?P<source>[^\n]*?)(?= -->)(?P<begin> -->\n)(?P<table>.*?)(?=<!-- end of rows -->)", re.DOTALL
)
_BUFFERS = {2**12: "4 KiB", 2**20: "1 MiB", 2**24: "16 MiB", 2**26: "64 MiB"}


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

    from bench import footprint, host
    from bench.faults import checkpoint, notice, restart
    from bench.strategies import table as strategies
    from bench.support import table

    command, _, systems = source.partition(", only: ")
    rows = read_rows(ROOT / file for file in re.findall(r"\S+\.jsonl", command))
    if systems:
        rows = [row for row in rows if row["system"] in systems.split(", ")]
    render = {
        "bench.support.table": table.render,
        "bench.faults.checkpoint": checkpoint.render,
        "bench.faults.notice": notice.render,
        "bench.faults.restart": restart.render,
        "bench.footprint": footprint.render,
        "bench.host": host.render,
        "bench.strategies.table": strategies.render,
        "tests.support.markdown": collectives,
    }
    return render[command.split()[2]](rows)


def collectives(rows: Sequence[Row]) -> str:
    """Return the table of how many times as long gloo takes, at 2 and at 4 ranks."""
    took = [row for row in rows if row["bench"] == "ring"]
    header = ["collective", "transport", *(f"{size}, {ranks} ranks" for size in _BUFFERS.values() for ranks in (2, 4))]
    cells = [header]
    for operation in ("reduce-scatter", "all-gather", "all-reduce"):
        for transport, algorithm in (("shared_memory", "direct"), ("p2p", "ring")):
            ours = {
                (row["nbytes"], row["ranks"]): row["speedup"]
                for row in took
                if (row["operation"], row["transport"], row["algorithm"]) == (operation, transport, algorithm)
            }
            speedups = (f"{ours[nbytes, ranks]:.1f}" for nbytes in _BUFFERS for ranks in (2, 4))
            cells.append([operation, f"`{transport}`", *speedups])
    first = took[0]
    heading = (
        f"Medians of interleaved calls on fp32 buffers, `shared_memory` by `direct`, `p2p` by `ring`; "
        f"{first['threads']} thread per rank; {first['machine']}, torch {first['torch']}, {first['date']}."
    )
    return f"{heading}\n\n{markdown_table(cells)}"


def main() -> None:
    """Do what the docstring of the module says."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.markdown", description="Write the tables anew.")
    parser.add_argument("--collectives", type=Path, metavar="FILE", help="only print the table of these rows")
    options = parser.parse_args()
    if options.collectives is not None:
        print(collectives(read_rows([options.collectives])))
        return
    for page in PAGES:
        text = page.read_text()
        new = with_new_tables(text)
        if new != text:
            page.write_text(new)
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
