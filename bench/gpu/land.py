"""Copy the rows of a run to `bench/results/` and the pages: `python -m bench.gpu --land FOLDER`."""

from __future__ import annotations

import re
from pathlib import Path

from bench.gpu.run import ROWS, WARM_UP, located
from shardlite.lab.table import RESULTS, read_rows, replace_rows


def land(folder: Path, results: Path = RESULTS) -> int:
    """Add the rows of a run to `results`, and regenerate the tables of the pages. Return 1 if the regeneration fails.

    New rows of a probe replace the rows of an earlier run of this probe on the same card and day.

    Args:
        folder: folder of the run, with `rows.jsonl`.
        results: folder of the rows of all benches.

    Raises:
        ValueError: If the folder has no rows of a GPU.
        OSError: If the folder or its file does not exist.
    """
    file = landed(folder, results)
    print(f"rows: {file}", flush=True)
    from bench.__main__ import regenerate

    return regenerate()


def landed(folder: Path, results: Path) -> Path:
    """Add the rows to a file in `results`, and return this file."""
    rows = [row for row in located(read_rows([folder / ROWS])) if row["probe"] != WARM_UP]
    if not any("card" in row for row in rows):
        raise ValueError(f"{folder / ROWS} has no row that names a card: did any probe run?")
    if len({row["card"] for row in rows}) > 1:
        raise ValueError(
            f"{folder / ROWS} has rows of several cards: {', '.join(sorted({row['card'] for row in rows}))}"
        )
    if any(row.get("dry") for row in rows):
        raise ValueError(f"{folder / ROWS} is of a dry run, which measures nothing: run it on a GPU")
    file = results / f"gpu-{_slug(rows[0]['card'])}-{rows[0]['date']}.jsonl"
    replace_rows(file, "probe", {row["probe"] for row in rows}, rows)
    return file


def _slug(card: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia ")).strip("-")
