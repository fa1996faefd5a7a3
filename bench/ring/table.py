"""Tables made of the rows of `bench.ring`: `python -m bench.ring.table` prints them in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from bench.support.table import Columns, Row, cells_of, markdown_table, print_tables

_SHOWN = (2**12, 2**20, 2**24, 2**26)
"""Sizes in the table of the README."""

_COLUMNS: Columns = {
    "buffer": lambda row: size_words(row["nbytes"]),
    "by": lambda row: f"{row['transport']} {row['algorithm']}".strip(),
    "ms": lambda row: f"{row['ms_p50']:.3g}",
    "p20 to p80": lambda row: f"{row['ms_p20']:.3g} to {row['ms_p80']:.3g}",
    "CPU, ms": lambda row: f"{row['cpu_ms_p50']:.3g}",
    "algbw, GB/s": lambda row: f"{row['algbw_gbps']:.3g}",
    "busbw, GB/s": lambda row: f"{row['busbw_gbps']:.3g}",
    "peer's / this": lambda row: f"{row['speedup']:.2f}",
    "of CPU": lambda row: f"{row['cpu_speedup']:.2f}",
    "messages": lambda row: "" if row["messages"] is None else str(row["messages"]),
    "model, ms": lambda row: "" if row["predicted_ms"] is None else f"{row['predicted_ms']:.3g}",
    "off by": lambda row: "" if row["predicted_ms"] is None else f"{row['prediction_error']:+.0%}",
    "goal": lambda row: "" if row["goal"] is None else f"{row['goal']:g}: {'yes' if row['reached'] else 'no'}",
}


def render(rows: Sequence[Row]) -> str:
    """One table for each number of ranks and operation, headed by what was measured and where; then the links."""
    times = [row for row in rows if row["bench"] == "ring"]
    links = [row for row in rows if row["bench"] == "ring-fit"]
    tables = [_render_run(list(run)) for _, run in groupby(times, key=lambda row: (row["ranks"], row["operation"]))]
    return "\n\n".join([*tables, *map(_link_words, links)])


def render_speedups(rows: Sequence[Row]) -> str:
    """Return the table of how many times as long the peer takes, at 2 and at 4 ranks."""
    took = [row for row in rows if row["bench"] == "ring"]
    header = ["collective", "transport", *(f"{size_words(size)}, {ranks} ranks" for size in _SHOWN for ranks in (2, 4))]
    cells = [header]
    for operation in ("reduce-scatter", "all-gather", "all-reduce"):
        for transport, algorithm in (("shared_memory", "direct"), ("p2p", "ring")):
            ours = {
                (row["nbytes"], row["ranks"]): row["speedup"]
                for row in took
                if (row["operation"], row["transport"], row["algorithm"]) == (operation, transport, algorithm)
            }
            speedups = (f"{ours[nbytes, ranks]:.1f}" for nbytes in _SHOWN for ranks in (2, 4))
            cells.append([operation, f"`{transport}`", *speedups])
    first = took[0]
    heading = (
        f"Medians of interleaved calls on fp32 buffers, `shared_memory` by `direct`, `p2p` by `ring`; "
        f"{first['threads']} thread per rank; {first['machine']}, torch {first['torch']}, {first['date']}."
    )
    return f"{heading}\n\n{markdown_table(cells)}"


def size_words(nbytes: int) -> str:
    """Bytes in the largest unit that they fill."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def _render_run(rows: Sequence[Row]) -> str:
    return f"{_heading(rows[0])}\n\n{markdown_table(cells_of(_COLUMNS, rows), words=2)}"


def _heading(row: Row) -> str:
    """What is common to all rows of a table."""
    return (
        f"**{row['operation']}**, fp32, {row['ranks']} ranks, {row['threads']} thread each; medians of interleaved "
        f"calls, on the slowest rank; a load of {row['load']} on {row['machine']}, torch {row['torch']}, {row['date']}."
    )


def _link_words(row: Row) -> str:
    hands = "overlap" if row["overlaps"] else "do not overlap"
    time = "processor time" if row["key"].startswith("cpu") else "time"
    return (
        f"{row['transport']}, {row['ranks']} ranks, {time}: alpha {1e6 * row['alpha']:.3g} us, overhead "
        f"{1e6 * row['overhead']:.3g} us per message, beta {1e9 * row['beta']:.3g} and gamma {1e9 * row['gamma']:.3g} "
        f"ns per byte, which {hands}; off by {row['error_p50']:.0%} at the median, {row['error_max']:.0%} at most."
    )


if __name__ == "__main__":
    print_tables("bench.ring.table", "ring-*.jsonl", render)
