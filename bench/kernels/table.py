"""Tables made of the rows of `bench.kernels`: `python -m bench.kernels.table` prints them in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from bench.support.table import Columns, Row, cells_of, markdown_table, print_tables

_COLUMNS: Columns = {
    "kernel": lambda row: f"{row['system']}: {row['operation']}",
    "format": lambda row: str(row["format"]),
    "B": lambda row: _number(row["bytes_per_element"]),
    "ms": lambda row: _number(row["ms_p50"]) or str(row["note"]),
    "p20 to p80": lambda row: f"{_number(row['ms_p20'])} to {_number(row['ms_p80'])}" if row["rounds"] else "",
    "GB/s": lambda row: f"{row['gbps']:.0f}" if row["gbps"] else "",
    "share": lambda row: f"{row['share']:.2f}" if row["share"] else "",
    "/ raw": lambda row: _number(row["vs_raw"]),
    "/ raw, CPU": lambda row: _number(row["cpu_vs_raw"]),
    "goal": lambda row: f"{row['goal']}: {'yes' if row['reached'] else 'no'}" if row["goal"] else "",
    "error": lambda row: "bits" if row["contract"] == "bits" else _number(row["error"], 2),
}


def render(rows: Sequence[Row]) -> str:
    """One table for each device, number of threads and size, headed by what was measured and where."""
    return "\n\n".join(_render_run(list(run)) for _, run in groupby(rows, key=_run))


def _run(row: Row) -> tuple[str, int, int]:
    return row["device"], row["threads"], row["numel"]


def _render_run(rows: Sequence[Row]) -> str:
    return f"{_heading(rows[0])}\n\n{markdown_table(cells_of(_COLUMNS, rows), words=2)}"


def _heading(row: Row) -> str:
    """What is common to all rows of a run."""
    where = f"on the CPU with {_counted(row['threads'], 'thread')}" if row["device"] == "cpu" else f"on {row['device']}"
    return (
        f"{row['numel']:,} elements {where}; share of {row['ceiling']} in the same rounds, of the time of "
        f"torch._fused_adamw_ (raw), of CPU time too; medians; a load of {row['load']} on {row['machine']}, "
        f"torch {row['torch']}, {row['date']}."
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _number(value: float | None, digits: int = 3) -> str:
    """A few digits, and nothing for nothing."""
    return "" if value is None else f"{value:.{digits}g}" if value < 999.5 else f"{value:.0f}"


if __name__ == "__main__":
    print_tables("bench.kernels.table", "kernels-*.jsonl", render)
