"""Plots of a run, as SVG in a `data:` URL. matplotlib is required.

Systems of a family have the same colour. The colours are those of Okabe and Ito, which colour-blind readers can
distinguish.
"""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from typing import Any

from shardlite.apps.report.cells import heading, is_number, quantity, texts, title, unit
from shardlite.apps.report.rows import Bench, Row, Run

_BLUE, _ORANGE, _GREEN, _GREY = "#0072b2", "#e69f00", "#009e73", "#8c8c8c"
_FAMILIES = {"fsdp": _ORANGE, "ddp": _GREEN, "zero": _GREEN, "floor": _GREY, "plain": _GREY, "deepspeed": _GREY}
_SERIES = (_BLUE, _ORANGE, _GREEN, "#cc79a7", "#56b4e9", "#d55e00", _GREY)
_MARKERS = "os^DvPX"


def plot(rows: Run, bench: Bench) -> str:
    """Return the plot of flat rows as a `data:` URL, or an empty string if there are no numbers to plot.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib import rc_context  # an optional dependency, and slow to import
    from matplotlib.figure import Figure

    values = [key for key in bench.values if any(_points(row, bench.axis, key) for row in rows)]
    if not values:
        return ""
    file = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "shardlite", "font.size": 8.5}):
        figure = Figure(figsize=(8.6, 3.2 if bench.axis else 0.75 + 0.24 * len(rows)), layout="constrained")
        draw, shown = (_lines, values[:1]) if bench.axis else (_bars, values)
        for axes, key in zip(figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown, strict=True):
            draw(axes, rows, bench, key)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{b64encode(file.getvalue()).decode()}"


def _bars(axes: Any, rows: Run, bench: Bench, key: str) -> None:
    """Draw a bar for each row. The first row is at the top."""
    values = [row[key] if is_number(row.get(key)) else None for row in rows]
    scale = unit(key, values)[0]
    bars = axes.barh(range(len(rows)), [(value or 0) / scale for value in values], color=list(map(_family, rows)))
    axes.bar_label(bars, texts(key, values), padding=4)
    axes.set_yticks(range(len(rows)), [_name(row, rows, bench) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.2 * max(bar.get_width() for bar in bars) or 1)
    axes.set_xlabel(heading(key, values))


def _lines(axes: Any, rows: Run, bench: Bench, key: str) -> None:
    """Draw a line for each series. The horizontal axis is logarithmic if it has few values and all are positive."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(_name(row, rows, bench), []).extend(_points(row, bench.axis, key))
    places, heights = zip(*(point for points in series.values() for point in points), strict=True)
    few = len(set(places)) <= 12  # if there are few values, each value gets a tick
    for number, (name, points) in enumerate(series.items()):
        style = {"color": _SERIES[number % 7], "marker": _MARKERS[number % 7] if few else ""}
        axes.plot(*zip(*sorted(points), strict=True), label=name, **style)
    if min(heights) > 0 and max(heights) > 10 * min(heights):
        axes.set_yscale("log")
    if few:
        axes.set_xscale("log" if min(places) > 0 else "linear")
        axes.set_xticks(places, [quantity(bench.axis, x) for x in places])
        axes.minorticks_off()
    axes.set_xlabel(title(bench.axis))
    axes.set_ylabel(heading(key, heights))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _name(row: Row, rows: Run, bench: Bench) -> str:
    """Return the name of a row in a plot: the labels that differ between the rows."""
    labels = [key for key in bench.labels if key != bench.axis and row.get(key) not in (None, "")]
    differing = [key for key in labels if any(other.get(key) != row[key] for other in rows)] or labels
    return ", ".join(
        f"{title(key)} {row[key]}" if is_number(row[key]) else texts(key, [row[key]])[0] for key in differing
    )


def _points(row: Row, axis: str, key: str) -> list[tuple[float, float]]:
    """Return the points of a row: one point, or a point for each item of a list.

    If the row has no list under `axis`, the items of a list are numbered from 1.
    """
    value, place = row.get(key), row.get(axis, 0)
    values = value if isinstance(value, list) else [value]
    counted = range(1, len(values) + 1) if isinstance(value, list) else [place]
    places = place if isinstance(place, list) else counted
    return [(x, y) for x, y in zip(places, values, strict=False) if is_number(x) and is_number(y)]


def _family(row: Row) -> str:
    """Return the colour of a system's family. ShardLite's colour is the default."""
    system = str(row.get("system", "")).lower()
    return next((colour for family, colour in _FAMILIES.items() if system.startswith(family)), _BLUE)
