"""The facts of a run and the columns of its table: keys with one value are facts, the others are columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardlite.apps.report.benches import Bench
from shardlite.apps.report.cells import QUANTILES, heading, is_number, texts, title, unit
from shardlite.apps.report.rows import NOISE, PROVENANCE, SETTINGS, TOLD_ELSEWHERE, Row, Run, flat, keys_of

_LOW, _MEDIAN, _HIGH = QUANTILES

_COUNTED = {
    "ranks": "rank",
    "world_size": "rank",
    "threads": "thread",
    "numel": "element",
    "parameters": "parameter",
    "busy": "busy loop",
}
_PHRASES = {"transport": "over {}", "device": "on {}", "accumulation": "{} batches per step"}
_VERSIONS = {"torch": "PyTorch {}", "python": "Python {}", "triton": "Triton {}", "cuda": "CUDA {}"}


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    cells: list[str]
    is_number: bool


def provenance(run: Run) -> list[str]:
    """Return machine, versions, date and file of a run."""
    found = []
    for key in PROVENANCE:
        values = dict.fromkeys(str(row[key]) for row in run if row.get(key) is not None)
        found += [_VERSIONS.get(key, "{}").format(value) for value in values]
    return found


def names_of(settings: Sequence[Run], bench: Bench) -> list[str]:
    """Return, for a run of each setting, a name that tells it from the others."""
    varies = _varying([run[0] for run in settings], bench)
    if "words" in varies:
        varies = [key for key in varies if key not in ("model", "parameters", "units")]
    told = [[_phrase(key, run[0][key]) for key in varies if run[0].get(key) is not None] for run in settings]
    names = [", ".join(filter(None, each)) for each in told]
    return [name or str(run[0].get("words", "")) for name, run in zip(names, settings, strict=True)]


def facts(run: Run, settings: Sequence[Run], bench: Bench) -> list[str]:
    """Return what is so for all rows of a run, and is neither in its name nor in `provenance`."""
    rows = [flat(row) for row in run]
    told = {*PROVENANCE, *TOLD_ELSEWHERE, *bench.labels, *_hidden(bench)}
    if len(settings) == 1 or "words" in _varying([each[0] for each in settings], bench):
        told |= {"words", "model"}
    told |= set(_varying([each[0] for each in settings], bench))
    keys = [key for key in keys_of(rows) if _base(key) not in told and _is_fact(rows, key)]
    first = [key for key in SETTINGS if key in keys]
    return list(filter(None, (_phrase(key, rows[0][key]) for key in dict.fromkeys([*first, *keys]))))


def columns(run: Run, bench: Bench) -> list[Column]:
    """Return the columns of a run's table: labels first, then what differs between rows."""
    rows = [flat(row) for row in run]
    present = keys_of(rows)
    left_out = {*PROVENANCE, *TOLD_ELSEWHERE, *bench.labels, *_hidden(bench), *NOISE}
    named = [key for key in bench.labels if key in present]
    labels = [key for key in named if len(rows) == 1 or key == "system" or not _is_fact(rows, key)]
    others = [key for key in present if _base(key) not in left_out and not _is_fact(rows, key)]
    made = [_column(rows, key) for key in labels]
    for key in others:
        if key.endswith((_LOW, _HIGH)) and key[: -len(_LOW)] + _MEDIAN in others:
            continue
        made.append(_column(rows, key))
        stem = key.removesuffix(_MEDIAN)
        if stem != key and stem + _LOW in others and stem + _HIGH in others:
            made.append(_range(rows, stem))
    return made


def _column(rows: Sequence[Row], key: str) -> Column:
    values = [row.get(key) for row in rows]
    are_numbers = all(value is None or is_number(value) for value in values)
    return Column(heading(key, values), texts(key, values), are_numbers)


def _range(rows: Sequence[Row], stem: str) -> Column:
    """Return the column of what lies between the 20th and the 80th percentile."""
    both = [row.get(stem + end) for end in (_LOW, _HIGH) for row in rows]
    shown = texts(stem + _MEDIAN, both)
    ends = zip(shown[: len(rows)], shown[len(rows) :], strict=True)
    return Column("p20 to p80", [f"{low} to {high}" if low and high else "" for low, high in ends], True)


def _is_fact(rows: Sequence[Row], key: str) -> bool:
    """Return whether a key has the same value in all rows. Of a single row only settings are facts."""
    if len(rows) == 1:
        return key in SETTINGS or key in NOISE
    return all(row.get(key) == rows[0].get(key) for row in rows)


def _varying(rows: Sequence[Row], bench: Bench) -> list[str]:
    """Return the settings in which rows differ."""
    keys = [key for key in ("machine", *SETTINGS) if key not in bench.labels]
    return [key for key in keys if any(row.get(key) != rows[0].get(key) for row in rows)]


def _phrase(key: str, value: object) -> str:
    """Return a setting in words; nothing for one that is off."""
    if key == "busy" and not value:
        return ""
    if key in _PHRASES:
        return _PHRASES[key].format(value)
    text = texts(key, [value])[0]
    if key in _COUNTED:
        return f"{text} {_COUNTED[key]}{'' if value == 1 else 's'}"
    if key in ("words", "machine", "operation", "optimizer", "training"):
        return text
    return f"{title(key)}: {text} {unit(key, [value])[1]}".rstrip()


def _hidden(bench: Bench) -> Collection[str]:
    return {*bench.hidden, bench.parts} if bench.parts else bench.hidden


def _base(key: str) -> str:
    """Return the key of the object that a flat key lies in."""
    return key.partition(".")[0]
