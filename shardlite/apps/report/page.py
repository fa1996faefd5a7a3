"""Make the page: a question for each bench, and for each run its provenance, a plot, a table and its command.

The template `page.html` defines the layout. The page is self-contained. Jinja2 and matplotlib are required.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardlite.apps.options import check_file
from shardlite.apps.report.cells import heading, is_number, quantity, texts, title
from shardlite.apps.report.plots import plot
from shardlite.apps.report.rows import SETTINGS, Bench, Row, Run, bench_of, by_bench, by_setting, flat, read_rows

_PROVENANCE = ("machine", "torch", "python", "triton", "cuda", "date", "file")
_IN_WORDS = ("model", "parameters", "optimizer")  # keys whose values the text under the key `words` includes
# Keys whose values are shown without the key.
_PLAIN = ("words", "machine", "date", "file", "operation", "optimizer", "training")


def write_report(paths: Sequence[Path], out: Path, *, progress: Callable[[str], None] = lambda words: None) -> int:
    """Write a page of the rows of files and folders, and return the number of rows.

    Args:
        paths: files with one JSON object per line, or folders of such files (`*.jsonl`).
        out: the HTML file.
        progress: function that is called with a few words before each bench.

    Raises:
        ValueError: a line is not a row, or there are no rows. The message names file and line.
        OSError: a file cannot be read, or `out` cannot be written.
        ModuleNotFoundError: Jinja2 or matplotlib is not installed.

    Example::

        write_report([Path("bench/results")], Path("report.html"))
    """
    check_file("--out", out)
    rows = read_rows(paths)
    out.write_text(page(rows, progress=progress), encoding="utf-8")
    return len(rows)


def page(rows: Sequence[Row], *, progress: Callable[[str], None] = lambda words: None) -> str:
    """Return the rows as an HTML page. Known benches come first."""
    from jinja2 import Template  # an optional dependency

    sections = []
    for name, found in by_bench(rows).items():
        progress(f"drawing {name}: {len(found)} rows")
        sections.append(_section(name, found))
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return str(Template(template, autoescape=True).render(rows=rows, sections=sections))


def _section(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the section of one bench: the runs of each setting. Titles show the keys that differ between settings."""
    bench = bench_of(name, rows)
    settings = by_setting(rows, bench.labels)
    firsts = [runs[0][0] for runs in settings]
    differing = [key for key in SETTINGS if key not in {*bench.labels, *_IN_WORDS} and _differ(firsts, key)]
    titles = [", ".join(_phrases(row, differing)) for row in firsts]
    found = [(title, [_run(run, bench) for run in runs]) for title, runs in zip(titles, settings, strict=True)]
    return {"bench": bench, "settings": found, "rows": len(rows), "newest": max(row["date"] for row in rows)}


def _run(run: Run, bench: Bench) -> dict[str, Any]:
    """Return the content of a run for the template.

    Keys whose values differ between the rows are columns of the table. Other keys are listed above the table.
    """
    rows = [flat(row) for row in run]
    hidden = {"bench", "command", "suite", *bench.hidden}
    found = dict.fromkeys([*_PROVENANCE, *(key for row in rows for key in row)])
    keys = [key for key in found if key.partition(".")[0] not in hidden]
    differing = [key for key in keys if _differ(rows, key)]
    return {
        "facts": _phrases(rows[0], [key for key in keys if key not in differing]),
        "columns": [_column(rows, key) for key in differing],
        "plot": plot(rows, bench),
        "rows": run,
        "command": _command(bench, run),
    }


def _differ(rows: Sequence[Row], key: str) -> bool:
    return any(row.get(key) != rows[0].get(key) for row in rows)


def _phrases(row: Row, keys: Sequence[str]) -> list[str]:
    """Return the values of keys as text. Skip empty values."""
    shown = [key for key in keys if row.get(key) not in (None, "")]
    return [f"{'' if key in _PLAIN else f'{title(key)}: '}{quantity(key, row[key])}" for key in shown]


def _column(rows: Sequence[Row], key: str) -> dict[str, Any]:
    """Return the title and the cells of a column."""
    values = [row.get(key) for row in rows]
    numeric = all(value is None or is_number(value) for value in values)
    return {"title": heading(key, values), "cells": texts(key, values), "numeric": numeric}


def _command(bench: Bench, run: Run) -> str:
    """Return the command with the values of the run's rows. Omit options for which no row has a value."""

    def option(found: re.Match[str]) -> str:
        rows = [row for row in run if found["key"] in row]
        values = dict.fromkeys("none" if row[found["key"]] is None else str(row[found["key"]]) for row in rows)
        return f"{found['name']} {shlex.join(values)}" if values else ""

    return re.sub(r"(?P<name> --[\w-]+) \{(?P<key>\w+)\}", option, bench.command)
