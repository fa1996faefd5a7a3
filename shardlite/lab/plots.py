"""Plots: figures, curves with a legend, and styles. Needs matplotlib.

Colours are those of Wong 2011 (Nature Methods 8, 441), and two more. Lines also differ in dashes or markers, and areas
in hatches, so that they are distinct in print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#777777", "#7A5195")
MARKERS = "os^Dv<>Ph"
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (8, 4)), (0, (3, 5)))

STYLES: dict[str, dict[str, Any]] = {
    "weights": {"facecolor": "#0072B2", "hatch": ""},
    "optimizer": {"facecolor": "#E69F00", "hatch": "//"},
    "gradients": {"facecolor": "#009E73", "hatch": ".."},
    "buckets": {"facecolor": "#CC79A7", "hatch": "xx"},
    "gathered": {"facecolor": "#56B4E9", "hatch": "\\\\"},
    "other": {"facecolor": "#777777", "hatch": ""},
    "activations": {"facecolor": "#F2F2F2", "hatch": ""},
}
"""Style of each column of a plan, in every plot of memory."""

EDGES: dict[str, Any] = {"edgecolor": "#333333", "linewidth": 0.4}


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure of `width` x `height` inches and its axes, with small labels and without upper or right spines.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # an optional dependency, and slow to import

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    every = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure, every


def draw_curves(
    axes: Axes,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    styles: Sequence[Mapping[str, Any]] | None = None,
    *,
    level: tuple[str, float] | None = None,
    ticks: Sequence[float] = (),
    legend: bool = True,
    **labels: Any,
) -> None:
    """Draw curves by their labels, each given by its x and y values, on a light grid.

    Args:
        axes: where to draw.
        curves: the curves.
        styles: options of each curve; by default colours and dashes in turn.
        level: the label and the value of a horizontal dashed line.
        ticks: the ticks of the x axis, with their values as labels.
        legend: whether the axes have a legend.
        labels: options of `Axes.set`, such as `xlabel`.
    """
    styles = styles or [{"color": c, "linestyle": d} for c, d in zip(COLOURS, DASHES, strict=True)]
    for number, (label, (x, y)) in enumerate(curves.items()):
        axes.plot(x, y, label=label, **{"linewidth": 1.4, **styles[number % len(styles)]})
    if level is not None:
        axes.axhline(level[1], color="#555555", linestyle="--", linewidth=1, label=level[0])
    axes.set(**labels)
    if ticks:
        axes.set_xticks(ticks, [f"{each:g}" for each in ticks])
        axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.6)
    if legend:
        axes.legend(frameon=False, fontsize=8)


def save(figure: Figure, file: Path, *, words: str = "") -> Path:
    """Write a figure below `words`, and return the file. An SVG has no date, so that equal rows give equal files."""
    import matplotlib

    if words:
        figure.suptitle(words, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "shardlite", "hatch.linewidth": 0.5}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return file
