"""Rows as tables: the cells, what is common to a run, and text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from shardlite.apps.footprint.measure import Row

_MALLOC = {"returns": "malloc returns large blocks", "default": "malloc as it is by default"}

_COLUMNS: dict[str, Callable[[Row], str]] = {
    "system": lambda row: str(row["system"]),
    "step, MiB": lambda row: _mib(row["pss_bytes"]),
    "/ FSDP2's": lambda row: f"{row['pss_vs_fsdp2']:.2f}" if "pss_vs_fsdp2" in row else "",
    "tensors, MiB": lambda row: _mib(row["tensor_bytes"]),
    "predicted, MiB": lambda row: _mib(row["predicted_bytes"]) if "predicted_bytes" in row else "",
    "measured / predicted": lambda row: f"{ratio(row):.3f}" if "predicted_bytes" in row else "",
    "between steps, MiB": lambda row: _mib(row["between_bytes"]),
    "made, MiB": lambda row: _mib(row["made_bytes"]),
    "wrapping, MiB": lambda row: _mib(row["wrap_peak_bytes"]),
    "unexplained": lambda row: f"{100 * row['unexplained']:+.1f} %" if "unexplained" in row else "",
}

_NEEDED = {
    "predicted, MiB": "predicted_bytes",
    "measured / predicted": "predicted_bytes",
    "/ FSDP2's": "pss_vs_fsdp2",
    "unexplained": "unexplained",
}
"""Columns that a table has only if one of its rows has the key."""


def ratio(row: Row) -> float:
    """Return measured bytes in tensors as a multiple of the predicted ones."""
    return float(row["tensor_bytes"]) / float(row["predicted_bytes"])


def runs(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield rows that differ in the system only, those that were measured first."""
    for _, run in groupby(rows, key=lambda row: (row["model"], row["ranks"], row.get("malloc"), row.get("busy"))):
        yield sorted(run, key=lambda row: "error" in row)


def model_stem(row: Row) -> str:
    """Return the name of a file of all rows of a model, without its ending: `footprint-gpt2`."""
    return "footprint-" + "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in row["model"])


def run_stem(row: Row) -> str:
    """Return the name of a file of the run of a row, without its ending: `footprint-gpt2-2ranks-busy`."""
    ways = ["default-malloc"] * (row.get("malloc") == "default") + ["busy"] * bool(row.get("busy"))
    return "-".join([model_stem(row), f"{row['ranks']}ranks", *ways])


def cells(run: Sequence[Row]) -> list[list[str]]:
    """Return the names of the columns, and the cells of each system that was measured."""
    measured = [row for row in run if "error" not in row]
    keys = {key for row in measured for key in row}
    columns = {name: cell for name, cell in _COLUMNS.items() if _NEEDED.get(name, "system") in keys}
    return [list(columns), *([cell(row) for cell in columns.values()] for row in measured)]


def heading(row: Row) -> str:
    """Say what is common to all rows of a run."""
    beside = f", {row['busy']} busy loops beside" * bool(row["busy"])
    return (
        f"{row['words']} per rank, {row['parameters'] / 1e6:.1f}M parameters; {row['ranks']} CPU ranks{beside}; "
        f"{_MALLOC[row['malloc']]}; {row['machine']}, torch {row['torch']}, {row['date']}."
    )


def failures(run: Sequence[Row]) -> list[str]:
    """Return a line for each system that failed."""
    return [f"{row['system']} failed: {row['error'].splitlines()[0]}" for row in run if "error" in row]


def text(rows: Sequence[Row]) -> str:
    """Format all runs for a terminal."""
    return "\n\n".join(_text(run) for run in runs(rows))


def _text(run: Sequence[Row]) -> str:
    if "error" in run[0]:  # then no system was measured
        return "\n".join([f"{run[0]['model']}, {run[0]['ranks']} CPU ranks", *failures(run)])
    table = cells(run)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *others in table:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *numbers]))
    return "\n".join([heading(run[0]), "", *lines, *failures(run)])


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f}"
