"""Copy the rows of a run to `bench/results/` and the pages: `python -m bench.gpu --land PATH`."""

from __future__ import annotations

import json
import re
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.run import FORMAT, MOST_RANKS, ROWS, WARM_UP, located, probes_on
from shardlite.lab.table import RESULTS, Row, read_rows, replace_rows

_WORDS = {"bench", "card", "date", "probe", "status"}

_ENDED = ("ok", "failed", "ended after")
"""Beginning of the status of a probe that reached its time limit."""


def land(path: Path, results: Path = RESULTS) -> int:
    """Add the rows of a run to `results`, and regenerate the tables of the pages. Return 1 if the regeneration fails.

    New rows of a probe replace the rows of an earlier run of this probe on the same card and day. The rows of a run on
    several GPUs replace those of an earlier run of the same machine and day.

    Args:
        path: folder of the run, with `rows.jsonl`, or its archive.
        results: folder of the rows of all benches.

    Raises:
        ValueError: If there are no rows of a GPU, or a run on several GPUs is incomplete, of another format, or of no
            clean commit.
        OSError: If the folder or file does not exist.
    """
    file = landed(path, results)
    print(f"rows: {file}", flush=True)
    from bench.__main__ import regenerate

    return regenerate()


def landed(path: Path, results: Path) -> Path:
    """Add the rows to a file in `results`, and return this file."""
    rows = [row for row in located(_rows_of(path)) if row["probe"] != WARM_UP]
    if any(row.get("dry") for row in rows):
        raise ValueError(f"{path} is of a dry run, which measures nothing: run it on a GPU")
    if not any("card" in row for row in rows):
        raise ValueError(f"{path} has no row that names a card: did any probe run?")
    if len({row["card"] for row in rows}) > 1:
        raise ValueError(f"{path} has rows of several cards: {', '.join(sorted({row['card'] for row in rows}))}")
    card, date, probes = _slug(rows[0]["card"]), str(rows[0].get("date")), {row["probe"] for row in rows}
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise ValueError(f"{path} has rows of the day {date!r}: expected YEAR-MONTH-DAY")
    if {row["bench"] for row in rows} == {"gpu"}:
        file = results / f"gpu-{card}-{date}.jsonl"
    else:
        file = results / f"gpu-{_checked(rows, path)}x-{card}-{date}.jsonl"
        if file.exists() and {row["machine"] for row in read_rows([file])} != {row["machine"] for row in rows}:
            raise ValueError(
                f"{file.name} has rows of another machine with these GPUs: rename that file, then land again"
            )
    replace_rows(file, "probe", probes, rows)
    return file


def _rows_of(path: Path) -> list[Row]:
    """Return the rows of a folder or an archive."""
    if path.is_dir():
        return read_rows([path / ROWS])
    try:
        with tarfile.open(path) as archive:
            member = archive.extractfile(ROWS)
            lines = member.read().decode().splitlines() if member else []
        rows = [json.loads(line) for line in lines if line.strip()]
        if not all(isinstance(row, dict) and row.keys() >= {"bench", "probe"} for row in rows):
            raise ValueError("a row has no probe")
        if not all(isinstance(row[name], str) for row in rows for name in _WORDS & row.keys()):
            raise ValueError(f"one of {', '.join(sorted(_WORDS))} of a row is no string")
    except (tarfile.TarError, zlib.error, EOFError, KeyError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not an archive of `python -m bench.gpu`: {error}") from error
    return rows


def _checked(rows: Sequence[Row], path: Path) -> int:
    """Check the rows of a run on several GPUs, and return the number of GPUs."""
    origin = next((row for row in rows if row["probe"] == "run"), {})
    benches, ranks, version = {row["bench"] for row in rows}, origin.get("ranks"), origin.get("format")
    if benches != {"gpu-ranks"} or version != FORMAT or ranks not in range(2, MOST_RANKS + 1):
        raise ValueError(
            f"{path} has rows of {', '.join(map(str, benches))} in format {version} on {ranks} GPUs, not of gpu-ranks "
            f"in format {FORMAT} on 2 to {MOST_RANKS}: land it with the checkout that wrote it"
        )
    if not origin.get("commit"):
        raise ValueError(f"{path} names no commit: run in a clone of the repository, with git installed")
    if not origin.get("clean"):
        raise ValueError(f"{path} is of a checkout with changed files: commit or stash them, and run again")
    ended = {row["probe"] for row in rows if row.get("status", "").startswith(_ENDED)}
    if missing := [probe.name for probe in probes_on(ranks) if probe.name not in ended]:
        raise ValueError(
            f"{path} is incomplete: these probes did not run: {', '.join(missing)}. Run without --only, to the end"
        )
    return int(ranks)


def _slug(card: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia ")).strip("-")
