"""Tables of the rows of `bench.optimizers`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shardlite.lab.cells import system_name
from shardlite.lab.table import Columns, Row, cells_of, markdown_table, where

_COLUMNS: Columns = {
    "system": lambda row: system_name(row["system"]),
    "step, ms": lambda row: f"{row['ms_p50']:.0f}",
    "p20 to p80": lambda row: f"{row['ms_p20']:.0f} to {row['ms_p80']:.0f}",
    "above floor, ms": lambda row: _number(row, "ms_above_floor", 0),
    "above / FSDP2's": lambda row: _number(row, "above_floor_vs_fsdp2", 2),
    "above / DDP's": lambda row: _number(row, "above_floor_vs_ddp", 2),
    "CPU, ms": lambda row: f"{row['cpu_ms_p50']:.0f}",
    "CPU above floor, ms": lambda row: _number(row, "cpu_ms_above_floor", 0),
    "CPU above / FSDP2's": lambda row: _number(row, "cpu_above_floor_vs_fsdp2", 2),
    "sent by the optimizer, MiB": lambda row: f"{row['optimizer_bytes'] / 2**20:.1f}",
    "peak, MiB": lambda row: "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
}


def render(rows: Sequence[Row]) -> str:
    """Return a table for each model and number of ranks."""
    runs = groupby(rows, key=lambda row: (row["model"], row["ranks"], row["date"]))
    return "\n\n".join(_render_run(list(run)) for _, run in runs)


def _render_run(rows: list[Row]) -> str:
    first = rows[0]
    heading = (
        f"{first['words']} per rank, {first['parameters'] / 1e6:.1f}M parameters in fp32; {first['optimizer']}; "
        f"{first['ranks']} ranks, {first['threads']} thread each; medians of {first['rounds']} interleaved steps; "
        f"{where(first)}."
    )
    return f"{heading}\n\n{markdown_table(cells_of(_COLUMNS, rows))}"


def _number(row: Row, key: str, digits: int) -> str:
    return "" if row.get(key) is None else f"{row[key]:.{digits}f}"
