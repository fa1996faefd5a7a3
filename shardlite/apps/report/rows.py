"""Reading rows, and finding those that belong together.

A row is what a bench has measured of one system. Rows with the same setting (bench, model, ranks, machine, ...) are
compared with each other; those of them that were measured on one day, in one file, are a run.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Run = list[Row]

FILE = "file"
"""The key under which a row says which file it was read from."""

NEEDED = ("bench", "machine", "torch", "date")
"""Keys that every row has."""

PROVENANCE = ("machine", "torch", "python", "triton", "cuda", "date", FILE)
"""When, where and with what a row was measured."""

NOISE = ("rounds", "load", "verified")
"""What may differ from row to row or from day to day without being another setting."""

SETTINGS = (
    *("model", "words", "training", "parameters", "operation", "cluster", "mode", "device", "ranks", "world_size"),
    *("threads", "transport", "precision", "accumulation", "clip", "numel", "order", "optimizer", "units", "batch"),
    *("context", "steps", "budget_bytes", "within", "malloc", "busy", "probe", "dry"),
)
"""What was run, most telling first. Rows are compared if they agree in these, except in those that label a row."""

TOLD_ELSEWHERE = ("bench", "command", "suite")
"""Keys of rows that are neither a column nor a fact: the page has a section for each bench, and shows the command."""

_DEFAULTS: Row = {"precision": "fp32", "accumulation": 1}
"""Settings of rows that do not name them."""


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Return the rows of files, and of all `.jsonl` files of folders, in the order of their names.

    Raises:
        ValueError: a line is no row (the message names file and line), or there is no row at all.
        OSError: a file cannot be read.
    """
    named = list(paths)
    files = [file for path in named for file in _files(path)]
    rows = [row for file in files for row in _rows_of(file)]
    if not rows:
        raise ValueError(f"no rows in {', '.join(map(str, named))}; a bench writes them (python -m bench.step --help)")
    return rows


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.jsonl"), key=lambda file: file.stem) if path.is_dir() else [path]


def _rows_of(file: Path) -> list[Row]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as wrong:
        raise ValueError(f"{file}: not a file of rows, which is text in UTF-8 ({wrong.reason})") from None
    lines = enumerate(text.splitlines(), 1)
    return [{**_row(line, f"{file}, line {number}"), FILE: file.name} for number, line in lines if line.strip()]


def _row(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as wrong:
        raise ValueError(f"{place}: not JSON ({wrong.msg} at column {wrong.colno})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place}: a row is a JSON object, got {type(row).__name__}")
    missing = [key for key in NEEDED if not isinstance(row.get(key), str)]
    if missing:
        raise ValueError(f"{place}: a row names its {', '.join(NEEDED)}; {', '.join(missing)} is not there as a string")
    return row


def by_bench(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each bench."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["bench"], []).append(row)
    return found


def by_setting(rows: Iterable[Row], labels: Collection[str]) -> list[list[Run]]:
    """Return, for each setting, its runs, newest first. `labels` are keys that tell rows of one run apart."""
    keys = [key for key in ("machine", *SETTINGS) if key not in labels]
    settings: dict[str, dict[tuple[str, ...], Run]] = {}
    for row in rows:
        setting = json.dumps([row.get(key, _DEFAULTS.get(key)) for key in keys])
        run = (row["date"], row["torch"], row[FILE])
        settings.setdefault(setting, {}).setdefault(run, []).append(row)
    return [[run for _, run in sorted(runs.items(), reverse=True)] for runs in settings.values()]


def flat(row: Row) -> Row:
    """Return a row in which entries of objects have keys of their own: `{"a.b": 1}` of `{"a": {"b": 1}}`."""
    out: Row = {}
    for key, value in row.items():
        out |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    return out


def keys_of(rows: Sequence[Row]) -> list[str]:
    """Return the keys of which some row has a value, in the order in which rows name them."""
    return list(dict.fromkeys(key for row in rows for key, value in row.items() if value is not None))
