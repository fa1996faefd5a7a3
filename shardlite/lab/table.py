"""Rows in files, and their tables. `tables.json` describes columns; `bench.step` defines the keys of rows.

    python -m shardlite.lab.table bench/results/step-gpt-2ranks.jsonl --select bench=step model=gpt ranks=2

prints the table of the matching rows: those of the newest run of `python -m bench` that has any, or of the named files.
`python -m bench` writes the rows of all benches to one file, `MACHINE-DATE.jsonl`. The term `clip=none` matches rows
without clipping.

A key contains the unit of its values (`cpu_ms_p50`, `peak_bytes`). `_vs_` denotes a ratio (`ms_vs_ddp`). `names.json`
has the names of systems, words and units.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from string import Formatter
from typing import Any

Row = dict[str, Any]
Columns = Mapping[str, str]
"""The template of each column's cells, see `filled`. A column whose name begins with `?` is left out if it is empty."""

RESULTS = Path(__file__).parents[2] / "bench" / "results"

_NAMES = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
_BINARY = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))

_DESCRIBED = json.loads(Path(__file__).with_name("tables.json").read_text(encoding="utf-8"))
TABLES: Mapping[str, Mapping[str, Any]] = _DESCRIBED["tables"]
"""For each value of the key `bench`: `columns`, the `head` above a table, and the keys `by` which rows are divided."""

PROBES: Mapping[str, Mapping[str, Any]] = _DESCRIBED["gpu"]
"""For each probe of one GPU: `heading`, `words` and `columns`. Rows that lack the first column are not in the table."""

PROBES_OF_RANKS: Mapping[str, Mapping[str, Any]] = _DESCRIBED["gpu-ranks"]
"""For each module of probes of several GPUs: `words` and `columns`."""

RENDERERS = {
    "step": "bench.step:render_runs",
    "footprint": "shardlite.lab.memory.text:as_markdown",
    "ring": "bench.ring.run:render_speedups",
    "scale": "bench.scale.results:render",
    "kernels": "shardlite.lab.table:differences",
    "formats": "shardlite.lab.table:differences",
    "gpu": "bench.gpu.results:render",
    "gpu-ranks": "bench.gpu.results:render_ranks",
    "optimizers-losses": "bench.optimizers.losses:render",
    "optimizers-sweep": "bench.optimizers.sweep:table",
    "strategies-accumulation": "bench.strategies.run:render_accumulation",
    "strategies-batch": "bench.strategies.run:render_batches",
}
"""For some values of `bench`, the function that renders rows. For all other values, `TABLES` has the table."""

_DATE = re.compile(r"-(\d{4}-\d\d-\d\d)\.jsonl$")

DEFAULTS: Row = {"precision": "fp32", "accumulation": 1, "clip": None}
"""Values to assume if a row lacks these keys."""


class NoRowsError(ValueError):
    """Raised if no row has the requested values."""


def read_rows(files: Iterable[Path]) -> list[Row]:
    """Return all rows of the files, sorted by file name."""
    return [json.loads(line) for file in sorted(files) for line in file.read_text().splitlines() if line.strip()]


def write_rows(rows: Sequence[Row], file: Path) -> None:
    """Write rows to a file, one JSON object per line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def replace_rows(file: Path, key: str, runs: Container[str], rows: Sequence[Row]) -> None:
    """Replace the rows of a file whose `key` is in `runs`. The file is replaced atomically, with one rename."""
    others = [row for row in read_rows([file]) if row.get(key) not in runs] if file.exists() else []
    beside = file.with_suffix(".new")
    write_rows([*others, *rows], beside)
    beside.replace(file)


def report(rows: Sequence[Row], file: Path) -> None:
    """Write rows to a file, and print them and their table, if there is one for their bench."""
    write_rows(rows, file)
    print(*map(json.dumps, rows), sep="\n")
    if rows[0]["bench"] in {*TABLES, *RENDERERS}:
        print(f"\n{render(rows)}", flush=True)


# ---- selection ------------------------------------------------------------------------------------------------------


def rows_for(words: Sequence[str], folder: Path = RESULTS, root: Path = RESULTS.parents[1]) -> list[Row]:
    """Return the rows that are selected by the words of a command.

    Args:
        words: words that end in `.jsonl` are files, relative to `root`; `KEY=VALUE` are terms that rows must match.
            Other words are ignored.
        folder: folder of the runs of `python -m bench`.
        root: root of the repository.

    Raises:
        NoRowsError: No row matches.
    """
    terms = dict(word.split("=", 1) for word in words if "=" in word)
    files = [root / word for word in words if word.endswith(".jsonl")]
    candidates = [*([file] for file in runs(folder) if terms), files]
    for each in candidates:
        if found := [row for row in read_rows(each) if matches(row, terms)]:
            return found
    raise NoRowsError(f"no row in {', '.join(map(str, files)) or folder} matches {terms}")


def runs(folder: Path = RESULTS) -> list[Path]:
    """Return the files of `python -m bench`, newest first."""
    dated = [(found[1], file) for file in folder.glob("*.jsonl") if (found := _DATE.search(file.name))]
    return [file for _, file in sorted(dated, reverse=True)]


def matches(row: Row, terms: dict[str, str]) -> bool:
    """Return whether a row has the values of the terms, compared as text."""
    values = {**DEFAULTS, **row}
    return all(str(values.get(key)).lower() == value.lower() for key, value in terms.items())


# ---- tables ---------------------------------------------------------------------------------------------------------


def render(rows: Sequence[Row]) -> str:
    """Return the tables of rows, bench by bench in a fixed order.

    Raises:
        ValueError: There is no table for rows of the first row's bench.
    """
    benches = [bench for bench in {**TABLES, **RENDERERS} if any(row["bench"] == bench for row in rows)]
    if rows[0]["bench"] not in benches:
        known = ", ".join({**RENDERERS, **TABLES})
        raise ValueError(f"there is no table for rows of {rows[0]['bench']!r}; choose rows of {known}")
    return "\n\n".join(_render(bench, [row for row in rows if row["bench"] == bench]) for bench in benches)


def _render(bench: str, rows: Sequence[Row]) -> str:
    if bench in RENDERERS:
        module, _, name = RENDERERS[bench].partition(":")
        table: str = getattr(import_module(module), name)(rows)
        return table
    head, by, words = (TABLES[bench].get(key, other) for key, other in (("head", ""), ("by", ()), ("words", 1)))
    runs = (list(run) for _, run in groupby(rows, key=lambda row: [row[key] for key in by]))
    heads = f"{head}; {{machine}}, torch {{torch}}, {{date}}.\n\n" * bool(head)
    return "\n\n".join(f"{filled(heads, run[0])}{table_of(TABLES[bench]['columns'], run, words=words)}" for run in runs)


class _Template(Formatter):
    """Formats `{KEY:FORMAT UNIT}` as the value of a row's key in a unit. `{KEY|OTHER}` takes the first there is."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        found = (kwargs.get(key) for key in field_name.split("|"))
        return next(value for value in found if value is not None and value != []), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        how, _, unit = format_spec.partition(" ")
        if how in _FORMATS:
            return _FORMATS[how](value)
        return format(value * _FACTORS[unit] if unit in _FACTORS else value / _DIVISORS[unit] if unit else value, how)


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "name": lambda value: system_name(value),
    "yes": lambda value: "yes" if value else "no",
    "pairs": lambda value: ", ".join(f"{name} {count:g}" for name, count in value.items()),
    "range": lambda value: f"{min(value):.2f} to {max(value):.2f}",
}
_FACTORS = {"percent": 100}
_DIVISORS = {"MB": 1e6, "million": 1e6, **{name: size for size, name in _BINARY}}


def filled(template: str, row: Row) -> str:
    """Return a template with the values of a row, or an empty string if the row lacks one of them."""
    try:
        return _Template().vformat(template, (), row)
    except StopIteration:
        return ""


def table_of(columns: Columns, rows: Sequence[Row], *, words: int = 1) -> str:
    """Return a Markdown table of rows. If a row has an `error`, the last column has it."""
    if any("error" in row for row in rows):
        columns = {**columns, "failed": "{error_text}"}
        rows = [{**row, "error_text": _escaped(row.get("error", "")) or None} for row in rows]
    return markdown_table(cells_of(columns, rows), words=words)


def cells_of(columns: Columns, rows: Sequence[Row]) -> list[list[str]]:
    """Return the header and the cells of each row."""
    cells = {name: [filled(template, row) for row in rows] for name, template in columns.items()}
    kept = {name.removeprefix("?"): each for name, each in cells.items() if name[0] != "?" or any(each)}
    return [list(kept), *map(list, zip(*kept.values(), strict=True))]


def _escaped(error: object) -> str:
    text = str(error).replace("|", "/").replace("`", "'").replace("\n", " ")
    return f"`{text}`" if text else ""


def where(row: Row) -> str:
    """Return the machine, PyTorch version and date of a row."""
    return f"{row['machine']}, torch {row['torch']}, {row['date']}"


def markdown_table(cells: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Return a Markdown table. The first line is the header. The first `words` columns are aligned left."""
    header, *body = cells
    rule = [*["---"] * words, *["---:"] * (len(header) - words)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *body])


def differences(rows: Sequence[Row]) -> str:
    """Return an aligned table of the keys whose values differ between rows. Works for rows of any bench."""
    keys = dict.fromkeys(key for row in rows for key in row)
    values = {key: [row.get(key) for row in rows] for key in keys}
    columns = [[heading(key, each), *texts(key, each)] for key, each in values.items() if len(set(map(str, each))) > 1]
    return aligned(list(zip(*columns, strict=True)))


def aligned(rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Return rows of cells as text. The first `words` columns are left-aligned, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


# ---- keys and values as text ----------------------------------------------------------------------------------------


def title(key: str) -> str:
    """Return the name of a key without its unit: `"CPU time"` for `"cpu_ms_p50"`."""
    words = key.removesuffix("_p50").replace("_vs_", "_/_").replace(".", "_:_").split("_")
    return " ".join(_NAMES["words"].get(word, word) for word in words).replace(" :", ":")


def unit(key: str, values: Sequence[Any]) -> tuple[float, str]:
    """Return the divisor of the shown values, and the name of their unit. Counts and ratios have an empty name."""
    words = key.partition(".")[0].split("_")
    if "vs" in words:
        return 1, ""
    if {"bytes", "nbytes"} & set(words):
        most = max(map(abs, filter(is_number, values)), default=0)
        return next((each for each in _BINARY if most >= each[0]), (1, "bytes"))
    return 1, next((_NAMES["units"][word] for word in words if word in _NAMES["units"]), "")


def heading(key: str, values: Sequence[Any]) -> str:
    """Return the title of a key, with the unit in which `texts` shows the values."""
    return ", ".join(filter(None, (title(key), unit(key, values)[1])))


def texts(key: str, values: Sequence[Any]) -> list[str]:
    """Return the values under a key as text, all in the same unit and with three digits."""
    scale = unit(key, values)[0]
    return [_text(key, value, scale) for value in values]


def quantity(key: str, value: Any) -> str:
    """Return a value with its unit."""
    return f"{texts(key, [value])[0]} {unit(key, [value])[1]}".strip()


def is_number(value: Any) -> bool:
    """Return whether a value is a number. `True` and `False` are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def system_name(name: str) -> str:
    """Return the name of a system in plots and tables."""
    return str(_NAMES["systems"].get(name, name))


def _text(key: str, value: Any, scale: float) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, list):
        return f"{texts(key, value[:1])[0]} to {texts(key, value[-1:])[0]}, {len(value)} values" if value else ""
    if not is_number(value):
        return system_name(str(value)) if key == "system" else str(value)
    if isinstance(value, int) and scale == 1:
        return f"{value:,}"
    scaled = value / scale
    return f"{scaled:,.0f}" if abs(scaled) >= 99.95 else f"{scaled:#.3g}"


def main() -> None:
    """Print the tables of the given files, of the selected rows, or of all rows of `bench.step`."""
    parser = argparse.ArgumentParser(prog="python -m shardlite.lab.table", description=main.__doc__)
    parser.add_argument("files", nargs="*", help="files of rows, one JSON object per line")
    words = "values that rows must have; the newest run with such rows is used"
    parser.add_argument("--select", nargs="+", default=[], metavar="KEY=VALUE", help=words)
    options = parser.parse_args()
    files = options.files or ([] if options.select else sorted(map(str, RESULTS.glob("step-*.jsonl"))))
    try:
        print(render(rows_for([*files, *options.select], root=Path())))
    except (ValueError, OSError) as wrong:
        parser.error(str(wrong))


if __name__ == "__main__":
    main()
