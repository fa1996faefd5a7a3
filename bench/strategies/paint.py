"""Plot the rows of `bench.strategies`, for docs/data-parallelism.md: `python -m bench.strategies.paint`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlite.lab.plots import COLOURS, DASHES, draw_curves, new_figure, save
from shardlite.lab.table import RESULTS, Row, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKS = {"constant": ("s", ":"), "linear": ("^", "--"), "linear, warm-up": ("o", "-")}


def paint(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the plots for which there are rows. Return their paths.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    plots = {"strategies": ("strategies-losses.png", _losses), "strategies-batch": ("strategies-batch.png", _batches)}
    found = {bench: [row for row in rows if row["bench"] == bench] for bench in plots}
    return [save(draw(found[bench]), folder / name) for bench, (name, draw) in plots.items() if found[bench]]


def _losses(rows: Sequence[Row]) -> Figure:
    """Plot the losses of each strategy, and their differences from one process."""
    figure, (above, below) = new_figure(8, 6.4, rows=2, sharex=True, height_ratios=(3, 2))
    alone, steps = rows[0]["losses"], range(1, len(rows[0]["losses"]) + 1)
    apart = {
        row["strategy"]: (steps, [max(abs(one - other), 1e-6) for one, other in zip(row["losses"], alone, strict=True)])
        for row in rows[1:]
    }
    styles = [{"color": colour, "linestyle": dash} for colour, dash in zip(COLOURS, DASHES, strict=True)]
    title = f"One model, one data set, {rows[0]['ranks']} ranks"
    draw_curves(above, {r["strategy"]: (steps, r["losses"]) for r in rows}, ylabel="loss, nats per byte", title=title)
    labels = {"xlabel": "step", "ylabel": "difference from one process,\nnats per byte", "yscale": "log"}
    draw_curves(below, apart, [*styles[1:], styles[0]], legend=False, **labels)
    return figure


def _batches(rows: Sequence[Row]) -> Figure:
    """Plot validation losses over the sequences, with a panel for each batch size."""
    smallest, sizes = rows[0], sorted({row["batch"] for row in rows} - {rows[0]["batch"]})
    figure, every = new_figure(10, 3.8, columns=len(sizes), sharey=True)
    for axes, size in zip(every, sizes, strict=True):
        shown = [row for row in rows if row["batch"] == size]
        styles: list[Mapping[str, Any]] = [{"color": "black"}]
        for row in shown:
            mark, dash = _MARKS[row["rule"]]
            colour = COLOURS[list(_MARKS).index(row["rule"])]
            styles.append({"marker": mark, "linestyle": dash, "markersize": 4, "color": colour})
        curves = {f"batch {smallest['batch']}": (smallest["samples"], smallest["losses"])}
        for row in shown:
            curves[row["rule"]] = row["samples"], [x if math.isfinite(x) else math.nan for x in row["losses"]]
        draw_curves(axes, curves, styles, xlabel="sequences", title=f"batch {size}, {shown[-1]['steps']} steps")
    every[0].set_ylabel("validation loss, nats per byte")
    return figure


if __name__ == "__main__":
    pages = Path(__file__).parents[2] / "docs"
    for file in (RESULTS / "strategies-gpt-2ranks.jsonl", RESULTS / "strategies-batch.jsonl"):
        for written in paint(read_rows([file]), pages):
            print(f"wrote {written}")
