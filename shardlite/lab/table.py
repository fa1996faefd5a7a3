"""Rows in files, and their tables. `shardlite.lab.table` selects rows; `bench.step` defines the keys.

A key contains the unit of its values (`cpu_ms_p50`, `peak_bytes`). `_vs_` denotes a ratio (`ms_vs_ddp`). `names.json`
has the names of systems, words and units.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Columns = Mapping[str, Callable[[Row], str]]

RESULTS = Path(__file__).parents[2] / "bench" / "results"

_NAMES = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
_BINARY = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))

_COLUMNS: Columns = {
    "system": lambda row: system_name(row["system"]),
    "step, ms": lambda row: f"{row['ms_p50']:.0f}",
    "p20 to p80": lambda row: f"{row['ms_p20']:.0f} to {row['ms_p80']:.0f}",
    "per second": lambda row: f"{row['per_second']:.0f}",
    "CPU, ms": lambda row: f"{row['cpu_ms_p50']:.0f}",
    "above floor, ms": lambda row: number(row, "ms_above_floor", 0),
    "above / FSDP2's": lambda row: number(row, "above_floor_vs_fsdp2", 2),
    "step / DDP's": lambda row: number(row, "ms_vs_ddp", 2),
    "peak, MiB": lambda row: _mebibytes(row, 0),
    "held, MiB": lambda row: _mebibytes(row, row["activation_bytes"]),
    "held / FSDP2's": lambda row: number(row, "held_vs_fsdp2", 2),
}


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


def render(rows: Sequence[Row]) -> str:
    """Return one table for each model and number of ranks, with a heading.

    For a run with several settings, the table shows throughput, with one column per setting.
    """
    runs = [list(run) for _, run in groupby(rows, key=_run)]
    return "\n\n".join((_render_settings if _settings(run)[1:] else _render_run)(run) for run in runs)


def where(row: Row) -> str:
    """Return the machine, PyTorch version and date of a row."""
    return f"{row['machine']}, torch {row['torch']}, {row['date']}"


def number(row: Row, key: str, digits: int) -> str:
    """Format a number, or return an empty string if the row lacks the key."""
    return "" if row.get(key) is None else f"{row[key]:.{digits}f}"


def _mebibytes(row: Row, less: int) -> str:
    return "" if row["peak_bytes"] is None else f"{(row['peak_bytes'] - less) / 2**20:.0f}"


def _run(row: Row) -> tuple[object, ...]:
    return row["model"], row["ranks"], row["transport"], row["machine"], row["date"]


def _settings(rows: Sequence[Row]) -> list[str]:
    """Return the settings of the rows in words."""
    return list(dict.fromkeys(map(_setting, rows)))


def _setting(row: Row) -> str:
    count, clip = row.get("accumulation", 1), row.get("clip")
    words = [row.get("precision", "fp32"), f"{count} micro-batches" if count > 1 else "", "clipped" if clip else ""]
    return ", ".join(filter(None, words))


def _render_settings(rows: list[Row]) -> str:
    rates = {(row["system"], _setting(row)): f"{row['per_second']:.0f}" for row in rows}
    found = _settings(rows)
    cells = [["system", *found]]
    for system in dict.fromkeys(row["system"] for row in rows):
        cells.append([system_name(system), *(rates.get((system, setting), "") for setting in found)])
    first = rows[0]
    optimizer = first["optimizer"].partition(", no clipping")[0]
    heading = (
        f"{first['item'].capitalize()} per second of {first['ranks']} ranks together; {first['words']} per rank and "
        f"micro-batch, {first['parameters'] / 1e6:.1f}M parameters; units: {first['units']}; {optimizer}; "
        f"over {first['transport']}, {first['threads']} thread each; medians of {first['rounds']} interleaved steps; "
        f"{where(first)}."
    )
    return f"{heading}\n\n{markdown_table(cells)}"


def _render_run(rows: list[Row]) -> str:
    known = {name: cell for name, cell in _COLUMNS.items() if name != "per second" or "per_second" in rows[0]}
    cells = cells_of(known, rows)
    cells[0] = [f"{rows[0]['item']}/s" if name == "per second" else name for name in cells[0]]
    return f"{_heading(rows[0])}\n\n{markdown_table(cells)}"


def _heading(row: Row) -> str:
    """Return the heading of a run."""
    count = row.get("accumulation", 1)
    batches = f" in each of {count} micro-batches" if count > 1 else ""
    compute = ", computing in bf16" if row.get("precision") == "bf16" else ""
    return (
        f"{row['words']} per rank{batches}, {row['parameters'] / 1e6:.1f}M parameters in fp32{compute}; "
        f"units: {row['units']}; "
        f"{row['optimizer']}; {row['ranks']} ranks over {row['transport']}, {row['threads']} thread each; "
        f"medians of {row['rounds']} interleaved steps; {where(row)}."
    )


def cells_of(columns: Columns, rows: Sequence[Row]) -> list[list[str]]:
    """Return the header and the cells of each row."""
    return [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]


def markdown_table(cells: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Return a Markdown table. The first line is the header. The first `words` columns are aligned left."""
    header, *body = cells
    rule = [*["---"] * words, *["---:"] * (len(header) - words)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *body])


def titled(heading: str, columns: Columns, rows: Sequence[Row], *, words: int = 1) -> str:
    """Return a table of rows with a heading, followed by the machine, the PyTorch version and the date."""
    return f"{heading}; {where(rows[0])}.\n\n{markdown_table(cells_of(columns, rows), words=words)}"


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
