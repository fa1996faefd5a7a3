"""Select the rows of a table, from the newest run of `python -m bench` that has matching rows, or from named files.

    python -m shardlite.lab.table bench/results/step-gpt-2ranks.jsonl --select bench=step model=gpt ranks=2

prints the table of the matching rows. `python -m bench` writes the rows of all benches to one file,
`MACHINE-DATE.jsonl`. If no such file has the rows of a table, the page names the file of a single bench instead. The
term `clip=none` matches rows without clipping.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from shardlite.lab.table import RESULTS, Row, read_rows

RENDERERS = {
    "step": "shardlite.lab.table:render",
    "footprint": "bench.footprint.run:render",
    "ring": "bench.ring.run:render_speedups",
    "scale": "bench.scale.table:render",
    "host": "bench.host:render",
    "host-fake": "bench.host:render",
    "host-block": "bench.host:render",
    "checkpoint": "bench.faults.checkpoint:render",
    "kernels": "shardlite.lab.table:differences",
    "optimizers": "bench.optimizers.run:render",
    "gpu": "bench.gpu.table:render",
    "gpu-ranks": "bench.gpu.several.table:render",
    "notice": "bench.faults.notice:render",
    "restart": "bench.faults.restart:render",
    "optimizers-losses": "bench.optimizers.losses:render",
    "optimizers-sweep": "bench.optimizers.sweep:table",
    **dict.fromkeys(("strategies", "strategies-batch", "strategies-accumulation"), "bench.strategies.run:render"),
}
"""For each value of the key `bench`, the function that renders the rows as a table."""

_DATE = re.compile(r"-(\d{4}-\d\d-\d\d)\.jsonl$")

_DEFAULTS: Row = {"precision": "fp32", "accumulation": 1, "clip": None}
"""Values to assume if a row lacks these keys."""


class NoRowsError(ValueError):
    """Raised if no row has the requested values."""


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


def gpu_has_run(folder: Path = RESULTS) -> bool:
    """Return whether the folder has a result of `bench.gpu`: the bits of a kernel, or a time."""
    rows = read_rows(folder.glob("gpu-*.jsonl"))
    return any("error" not in row and ("contract" in row or "ms_p50" in row) for row in rows)


def runs(folder: Path = RESULTS) -> list[Path]:
    """Return the files of `python -m bench`, newest first."""
    dated = [(found[1], file) for file in folder.glob("*.jsonl") if (found := _DATE.search(file.name))]
    return [file for _, file in sorted(dated, reverse=True)]


def matches(row: Row, terms: dict[str, str]) -> bool:
    """Return whether a row has the values of the terms, compared as text."""
    values = {**_DEFAULTS, **row}
    return all(str(values.get(key)).lower() == value.lower() for key, value in terms.items())


def render(rows: Sequence[Row]) -> str:
    """Return the table of rows of one bench.

    Raises:
        ValueError: There is no table for rows of this bench.
    """
    bench = rows[0]["bench"]
    if bench not in RENDERERS:
        raise ValueError(f"there is no table for rows of {bench!r}; choose rows of {', '.join(RENDERERS)}")
    module, _, name = RENDERERS[bench].partition(":")
    table: str = getattr(import_module(module), name)(rows)
    return table


def main() -> None:
    """Print the tables of the given files, of the selected rows, or of all rows of `bench.step`."""
    parser = argparse.ArgumentParser(prog="python -m shardlite.lab.table", description=main.__doc__)
    parser.add_argument("files", nargs="*", help="files of rows, one JSON object per line")
    parser.add_argument(
        "--select",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="values that rows must have; the newest run with such rows is used",
    )
    options = parser.parse_args()
    files = options.files or ([] if options.select else sorted(map(str, RESULTS.glob("step-*.jsonl"))))
    try:
        print(render(rows_for([*files, *options.select], root=Path())))
    except (ValueError, OSError) as wrong:
        parser.error(str(wrong))


if __name__ == "__main__":
    main()
