"""Tables of the rows of `bench.strategies`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shardlite.lab.table import Columns, Row, cells_of, markdown_table, where

_COLUMNS: Columns = {
    "strategy": lambda row: str(row["strategy"]),
    "bytes sent": lambda row: str(row["formula"]),
    "formula, KiB": lambda row: _kib(row["formula_bytes"]),
    "counted, KiB": lambda row: _kib(row["sent_bytes"]),
    "step, ms": lambda row: f"{row['ms_p50']:.0f}",
    "p20 to p80": lambda row: f"{row['ms_p20']:.0f} to {row['ms_p80']:.0f}",
    "held, MiB": lambda row: f"{row['held_bytes'] / 2**20:.1f}",
    "peak, MiB": lambda row: f"{row['peak_bytes'] / 2**20:.1f}",
    "largest difference": lambda row: f"{row['largest_difference']:.4f}",
}


def render(rows: Sequence[Row]) -> str:
    """Return a table for each number of ranks, a table of batch sizes, and a sentence on accumulation."""
    made = {"strategies": _strategies, "strategies-batch": _batches, "strategies-accumulation": _accumulation}
    runs = groupby(rows, key=lambda row: (row["bench"], row.get("ranks")))
    return "\n\n".join(made[bench](list(run)) for (bench, _), run in runs)


def _strategies(rows: Sequence[Row]) -> str:
    first = rows[0]
    heading = (
        f"{first['words']}; {first['ranks']} ranks over gloo, {first['threads']} thread each; medians of "
        f"{first['steps']} interleaved steps; {where(first)}."
    )
    return f"{heading}\n\n{markdown_table(cells_of(_COLUMNS, rows), words=2)}"


def _batches(rows: Sequence[Row]) -> str:
    rules = list(dict.fromkeys(row["rule"] for row in rows if row["batch"] > rows[0]["batch"]))
    losses = {(row["batch"], row["rule"]): f"{row['losses'][-1]:.3f}" for row in rows}
    smallest = losses[rows[0]["batch"], rows[0]["rule"]]  # all rules coincide at the smallest batch
    cells = [["batch", "steps", *rules]]
    for batch, steps in {row["batch"]: row["steps"] for row in rows}.items():
        of_rules = [smallest if batch == rows[0]["batch"] else losses.get((batch, rule), "") for rule in rules]
        cells.append([str(batch), str(steps), *of_rules])
    first = rows[0]
    return (
        f"Validation loss after {first['samples'][-1]} sequences, nats per byte; {first['words']}; {where(first)}.\n\n"
        f"{markdown_table(cells, words=0)}"
    )


def _accumulation(rows: Sequence[Row]) -> str:
    row = rows[0]
    return (
        f"Relative error of the gradient: {row['accumulated_off_by']:.1e} for {row['micro_batches']} micro-batches, "
        f"{row['large_batch_off_by']:.1e} for one batch of {row['batch']}; {where(row)}."
    )


def _kib(nbytes: int) -> str:
    return f"{nbytes / 2**10:.0f}"
