"""Read rows, group them by bench and setting, and look up how a bench is shown.

A row is a measurement of one system by a bench. Rows are comparable if they have the same setting (model, ranks,
machine, ...). A run consists of the comparable rows of one file and day. `benches.json` describes the known benches.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Run = list[Row]

NEEDED = ("bench", "machine", "torch", "date")
"""Keys that each row must have."""

SETTINGS = (
    *("model", "words", "training", "parameters", "operation", "cluster", "mode", "device", "ranks", "world_size"),
    *("threads", "transport", "precision", "accumulation", "clip", "numel", "order", "optimizer", "units", "batch"),
    *("context", "steps", "budget_bytes", "within", "malloc", "busy", "probe", "dry"),
)
"""Keys of a setting, the most important first. Keys that label the rows of a bench are not part of its
settings."""

_DEFAULTS: Row = {"precision": "fp32", "accumulation": 1}
"""Values that are assumed for settings that a row lacks."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How the rows of one bench are shown."""

    question: str
    about: str = ""
    """How to read the numbers."""

    command: str = ""
    """Command that repeats a run. In an option `--name {key}`, `{key}` is replaced by the values of the run's rows."""

    labels: Sequence[str] = ("system",)
    """Keys that distinguish the rows of a run."""

    values: Sequence[str] = ()
    """Keys that are plotted."""

    axis: str = ""
    """The key on the horizontal axis of a line plot. If empty, bars are drawn. The values of the key may be
    lists.
    """

    hidden: Collection[str] = ()
    """Keys that the table omits."""


_DESCRIBED = json.loads(Path(__file__).with_name("benches.json").read_text())
BENCHES = {name: Bench(**described) for name, described in _DESCRIBED.items()}


def bench_of(name: str, rows: Sequence[Row]) -> Bench:
    """Return the description of a bench. For an unknown bench, medians and sizes are plotted."""
    values = [key for key in rows[0] if key.endswith(("_p50", "_bytes")) and key not in SETTINGS]
    unknown = Bench(question=f"What does {name} measure?", command=str(rows[0].get("command", "")), values=values)
    return BENCHES.get(name, unknown)


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """Return the rows of files, and of all `.jsonl` files in folders in the order of the file names.

    Raises:
        ValueError: a line is not a row (the message names file and line), or there are no rows.
        OSError: a file cannot be read.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    lines = [(file, place) for file in files for place in enumerate(file.read_bytes().splitlines(), 1)]
    rows = [_row(file, number, line) for file, (number, line) in lines if line.strip()]
    if not rows:
        raise ValueError(f"no rows in {', '.join(map(str, paths))}; write some with a bench (python -m bench.step)")
    return rows


def _row(file: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError as wrong:
        raise ValueError(f"{file}, line {number}: not JSON in UTF-8 ({wrong})") from None
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in NEEDED):
        raise ValueError(f"{file}, line {number}: expected a JSON object with the strings {', '.join(NEEDED)}")
    return {**row, "file": file.name}


def by_bench(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each bench. Known benches come first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["bench"], []).append(row)
    return dict(sorted(found.items(), key=lambda item: [*BENCHES, item[0]].index(item[0])))


def by_setting(rows: Iterable[Row], labels: Collection[str]) -> list[list[Run]]:
    """Return the runs of each setting, newest run first. `labels` are the keys that distinguish the rows of a run."""
    settings: dict[str, dict[tuple[str, ...], Run]] = {}
    for row in rows:
        setting = json.dumps([row.get(key, _DEFAULTS.get(key)) for key in ("machine", *SETTINGS) if key not in labels])
        run = (row["date"], row["torch"], row["file"])
        settings.setdefault(setting, {}).setdefault(run, []).append(row)
    return [[run for _, run in sorted(runs.items(), reverse=True)] for runs in settings.values()]


def flat(row: Row) -> Row:
    """Flatten the objects in a row: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    out: Row = {}
    for key, value in row.items():
        out |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    return out
