"""Plot the rows of `bench.strategies`, for docs/data-parallelism.md: `python -m bench.strategies.paint`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardlite.lab.table import RESULTS, Row, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#000000", "#e69f00", "#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#0072b2", "#999999", "#7a5195")
"""Colours of Okabe and Ito, and two more. Lines also differ in dashes, so that they are distinct in print."""

_DASHES = ("-", (0, (6, 2)), (0, (1, 2)), "-", (0, (4, 1, 1, 1)), (0, (2, 2)), (0, (8, 4)), (0, (1, 4)), (0, (3, 5)))
_MARKS = {"constant": ("s", ":"), "linear": ("^", "--"), "linear, warm-up": ("o", "-")}


def paint(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the plots for which there are rows. Return their paths.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for bench, name, draw in (
        ("strategies", "strategies-losses.png", _losses),
        ("strategies-batch", "strategies-batch.png", _batches),
    ):
        chosen = [row for row in rows if row["bench"] == bench]
        if chosen:
            draw(chosen, folder / name)
            written.append(folder / name)
    return written


def _losses(rows: Sequence[Row], path: Path) -> None:
    """Plot the losses of each strategy, and their differences from one process."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(8, 6.4), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    alone = rows[0]["losses"]
    for number, row in enumerate(rows):
        style = {"color": _COLOURS[number % len(_COLOURS)], "linestyle": _DASHES[number % len(_DASHES)]}
        steps = range(1, len(row["losses"]) + 1)
        above.plot(steps, row["losses"], label=row["strategy"], linewidth=1.6, **style)
        if number:
            apart = [max(abs(one - other), 1e-6) for one, other in zip(row["losses"], alone, strict=True)]
            below.plot(steps, apart, linewidth=1.2, **style)
    above.set(ylabel="loss, nats per byte", title=f"One model, one data set, {rows[0]['ranks']} ranks")
    below.set(xlabel="step", ylabel="difference from one process,\nnats per byte", yscale="log")
    above.legend(frameon=False, ncols=2, fontsize=9)
    _clear(above, below)
    figure.savefig(path)


def _batches(rows: Sequence[Row], path: Path) -> None:
    """Plot validation losses over the sequences, with a panel for each batch size."""
    from matplotlib.figure import Figure

    smallest, sizes = rows[0], sorted({row["batch"] for row in rows} - {rows[0]["batch"]})
    figure = Figure(figsize=(10, 3.8), dpi=130, layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0], sizes, strict=True):
        axes.plot(smallest["samples"], smallest["losses"], color="black", label=f"batch {smallest['batch']}")
        for row in (row for row in rows if row["batch"] == size):
            mark, dash = _MARKS[row["rule"]]
            colour = _COLOURS[1 + list(_MARKS).index(row["rule"])]
            losses = [loss if math.isfinite(loss) else math.nan for loss in row["losses"]]
            axes.plot(row["samples"], losses, dash, marker=mark, markersize=4, color=colour, label=f"{row['rule']}")
        axes.set(xlabel="sequences", title=f"batch {size}, {row['steps']} steps")
        _clear(axes)
        axes.legend(frameon=False, fontsize=8, title="learning rate", title_fontsize=8)
    figure.axes[0].set_ylabel("validation loss, nats per byte")
    figure.savefig(path)


def _clear(*axes: Axes) -> None:
    for each in axes:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    pages = Path(__file__).parents[2] / "docs"
    for file in (RESULTS / "strategies-gpt-2ranks.jsonl", RESULTS / "strategies-batch.jsonl"):
        for written in paint(read_rows([file]), pages):
            print(f"wrote {written}")
