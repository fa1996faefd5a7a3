"""The table of the rows of `bench.ring`."""

from __future__ import annotations

from collections.abc import Sequence

from shardlite.lab.table import Row, markdown_table, where

_SHOWN = (2**12, 2**20, 2**24, 2**26)
"""Sizes in the table, in bytes."""


def render_speedups(rows: Sequence[Row]) -> str:
    """Return the table of speedups over gloo, with 2 and with 4 ranks."""
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
        f"{first['threads']} thread per rank; {where(first)}."
    )
    return f"{heading}\n\n{markdown_table(cells)}"


def size_words(nbytes: int) -> str:
    """Return a size in its largest unit."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"
