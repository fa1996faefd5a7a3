"""The page: for each bench a question, and for each run where it was measured, a plot, a table and the command.

The page refers to no other file and has no program; its style follows the reader's light or dark setting.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from shardlite.apps.options import check_file
from shardlite.apps.report.benches import BENCHES, Bench, bench_of
from shardlite.apps.report.cells import numbers
from shardlite.apps.report.plots import COLOURS, caption, plot
from shardlite.apps.report.rows import Row, Run, by_bench, by_setting, read_rows
from shardlite.apps.report.tables import Column, columns, facts, names_of, provenance

_TITLE = "What was measured"
_LONG = 12
"""Rows from which on a table is folded."""


def write_report(paths: Sequence[Path], out: Path, *, progress: Callable[[str], None] = lambda words: None) -> int:
    """Write a page of the rows of files and folders, and return the number of rows.

    Args:
        paths: files with one JSON object a line, or folders of such files (`*.jsonl`).
        out: the HTML file.
        progress: is called with a few words before each part of the work.

    Raises:
        ValueError: a line is no row, or there is none. The message names file and line.
        OSError: a file cannot be read, or there cannot be one at `out`.
        ModuleNotFoundError: matplotlib is not installed.

    Example::

        write_report([Path("bench/results")], Path("report.html"))
    """
    check_file("--out", out)
    rows = read_rows(paths)
    out.write_text(page(rows, progress=progress), encoding="utf-8")
    return len(rows)


def page(rows: Sequence[Row], *, progress: Callable[[str], None] = lambda words: None) -> str:
    """Return the page of some rows, known benches first."""
    found = by_bench(rows)
    names = sorted(found, key=lambda name: (list(BENCHES).index(name) if name in BENCHES else len(BENCHES), name))
    sections = []
    for name in names:
        progress(f"drawing {name}: {len(found[name])} rows")
        sections.append(_section(name, found[name]))
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    colours = "".join(f"--{name}: {colour}; " for name, colour in COLOURS.items())
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>ShardLite: {_TITLE.lower()}</title>",
            f"<style>:root {{ {colours}}}\n{style}</style></head><body>",
            f"<header><p class=brand>ShardLite</p><h1>{_TITLE}</h1>{_summary(rows)}</header>",
            f"<main>{_contents([(name, found[name]) for name in names])}",
            *sections,
            "</main></body></html>\n",
        ]
    )


def _summary(rows: Sequence[Row]) -> str:
    """Return one paragraph on all rows."""
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    versions = sorted({row["torch"] for row in rows})
    dates = sorted({row["date"] for row in rows})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    words = f"{len(rows):,} rows, on {'; '.join(machines)}, with PyTorch {', '.join(versions)}, {days}."
    words += "" if any(row["bench"] == "gpu" for row in rows) else " No row is of a GPU."
    reading = "Times are medians. Each section names the machine, the versions and the command that repeats it."
    return f"<p class=lead>{escape(words)} {reading}</p>"


def _contents(found: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """Return the table of contents, with the most telling number of a bench beside its question."""
    lines = []
    for name, rows in found:
        bench = bench_of(name, rows)
        last = max(row["date"] for row in rows)
        cells = f"<td>{_headline(bench, rows)}</td><td class=n>{len(rows)}</td><td class=n>{escape(last)}</td>"
        lines.append(f'<tr><td><a href="#{_anchor(name)}">{escape(bench.question)}</a></td>{cells}</tr>')
    head = "<tr><th>question</th><th>in short</th><th class=n>rows</th><th class=n>newest</th></tr>"
    return f"<nav><table class=contents><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table></nav>"


def _headline(bench: Bench, rows: Sequence[Row]) -> str:
    if bench.headline is None:
        return ""
    wanted = bench.headline.where.items()
    values = numbers([row.get(bench.headline.key) for row in rows if wanted <= row.items()])
    if not values:
        return ""
    low, high = (f"{end(values):.2g}" if end(values) < 0.1 else f"{end(values):.2f}" for end in (min, max))
    return f"<b>{low if low == high else f'{low} to {high}'}</b> {escape(bench.headline.words)}"


def _section(name: str, rows: Sequence[Row]) -> str:
    """Return the section of one bench."""
    bench = bench_of(name, rows)
    settings = by_setting(rows, bench.labels)
    titles = names_of([runs[0] for runs in settings], bench)
    parts = [f"<section id={_anchor(name)}><h2>{escape(bench.question)}</h2>"]
    parts += [f"<p>{escape(bench.words)}</p>"] if bench.words else []
    for place, (title, runs) in enumerate(zip(titles, settings, strict=True)):
        newest, *earlier = runs
        about = facts(newest, [each[0] for each in settings], bench)
        parts.append(f"<article><h3>{escape(title or name)}</h3>")
        parts.append(_run(newest, bench, about, title, f"{_anchor(name)}-{place}"))
        for number, run in enumerate(earlier):
            summary = f"<summary>An earlier run, {escape(run[0]['date'])}</summary>"
            inner = _run(run, bench, [], title, f"{_anchor(name)}-{place}-{number}")
            parts.append(f"<details>{summary}{inner}</details>")
        parts.append("</article>")
    return "\n".join([*parts, "</section>"])


def _run(run: Run, bench: Bench, about: Sequence[str], title: str, name: str) -> str:
    """Return where a run was measured, what is so for all of its rows, the plot, the table and the command."""
    parts = [f"<p class=where>{_items(provenance(run))}</p>"]
    if about:
        parts.append(f"<p class=facts>{_items(about)}</p>")
    svg = plot(run, bench, name)
    if svg:
        label = escape(f"{bench.question} {title}", quote=True)
        words = caption(run, bench)
        below = f"<figcaption>{escape(words)}</figcaption>" if words else ""
        svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
        parts.append(f"<figure>{svg}{below}</figure>")
    parts.append(_table(columns(run, bench), len(run)))
    command = _command(bench, run)
    if command:
        parts.append(f"<p class=command>Repeat it: <code>{escape(command)}</code></p>")
    return "\n".join(parts)


def _items(words: Sequence[str]) -> str:
    return " ".join(f"<span>{escape(each)}</span>" for each in words)


def _table(found: Sequence[Column], rows: int) -> str:
    """Return a table. A long one is folded."""
    kinds = ["<{0} class=n>" if column.is_number else "<{0}>" for column in found]
    head = "".join(f"{kind.format('th')}{escape(column.title)}</th>" for kind, column in zip(kinds, found, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f"{kind.format('td')}{escape(column.cells[i])}</td>" for kind, column in zip(kinds, found, strict=True)
        )
        + "</tr>"
        for i in range(rows)
    )
    table = f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    return f"<details><summary>Table of {rows} rows</summary>{table}</details>" if rows > _LONG else table


def _command(bench: Bench, run: Run) -> str:
    """Return the command with the values of the run's rows, without options of which the rows do not have a value."""

    def option(found: re.Match[str]) -> str:
        rows = [row for row in run if found["key"] in row]
        values = dict.fromkeys("none" if row[found["key"]] is None else str(row[found["key"]]) for row in rows)
        return f"{found['name']} {shlex.join(values)}" if values else ""

    return re.sub(r"(?P<name> --[\w-]+) \{(?P<key>\w+)\}", option, bench.command)


def _anchor(name: str) -> str:
    """Return a bench's name as an identifier."""
    return "".join(each if each.isascii() and each.isalnum() else "-" for each in name)
