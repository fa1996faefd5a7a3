"""Plots of a run as SVG that is part of a page: its text is text, and the page's style sets its colours.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart. Bars have names, lines also have markers,
and parts of bars hatches, so that colours are not needed in print. Needs matplotlib.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from shardlite.apps.report.benches import Bench
from shardlite.apps.report.cells import heading, is_number, numbers, row_name, texts, title, unit
from shardlite.apps.report.rows import Row, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _RULE, _PAPER = "#101112", "#d0d1d2", "#fefdfc"  # stand for the page's own
COLOURS = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "pink": "#cc79a7",
    "sky": "#56b4e9",
    "red": "#d55e00",
    "yellow": "#f0e442",
    "grey": "#8c8c8c",
    "pale": "#c4c4c4",
}
"""By the names under which a page's style may set others: `--blue`."""

_SERIES = ("blue", "orange", "green", "pink", "sky", "red", "grey")
_MARKERS, _DASHES = ("o", "s", "^", "D", "v", "P", "X"), ("-", "--", "-.", ":", "-", "--", "-.")
_HATCHES = ("", "//", "\\\\", "xx", "--", "||", "++")  # dots would take megabytes
_PURPOSES = ("parameters", "optimizer state", "gradients", "gradient buckets", "gather buffers", "idle shared memory")
"""In the colours of `_SERIES`, which are those of the pictures of a plan."""

_PART_COLOURS = (*_SERIES[:-1], "yellow")
_FEW = 12
"""Places on an axis that all have a tick."""

_VISIBLE = 0.01
"""The least part of the longest bar that has a colour of its own."""

_OURS = re.compile(r"(?i)shardlite|stage\d|p2p|collectives|tree|in_backward|bf16|compact|save|async_save|int8|split24")
_FAMILIES = {"fsdp": "orange", "ddp": "green", "zero": "green"}
_WIDTH = 8.6  # inches

_FAMILY_WORDS = {"blue": "ShardLite", "orange": "FSDP", "green": "DDP", "grey": "others"}


def caption(run: Run, bench: Bench) -> str:
    """Return what colours and lines of bars mean."""
    if bench.axis or not any(_bars(run, bench, key) for key in bench.values):
        return ""
    colours = {_colour(row) for row in run if "system" in row and not bench.parts}
    words = [f"{colour.capitalize()}: {name}." for colour, name in _FAMILY_WORDS.items() if colour in colours]
    stems = [key.removesuffix("_p50") for key in bench.values if key.endswith("_p50") and not bench.parts]
    if any(f"{stem}_p20" in row for stem in stems for row in run):
        words.append("Thin lines: p20 to p80.")
    if any(row.get("system") == bench.reference for row in run):
        words.append(f"Dashed: the {bench.reference}.")
    return " ".join(words)


def plot(run: Run, bench: Bench, name: str) -> str:
    """Return the plot of a run as an `<svg>` element, or nothing if there is nothing to plot.

    Args:
        run: rows that are compared.
        bench: says what is plotted.
        name: without spaces; identifiers inside begin with it, so that plots of one page do not share any.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib import rc_context  # optional, and slow to import
    from matplotlib.figure import Figure

    values = [key for key in bench.values if (_series(run, bench, key) if bench.axis else _bars(run, bench, key))]
    if not values:
        return ""
    with rc_context(_style(name)):
        figure = Figure(layout="constrained")
        if bench.axis:
            _lines(figure, run, bench, values[0])
        elif bench.parts:
            _stack(figure, run, bench, values[0])
        else:
            _panels(figure, run, bench, values)
        return _element(figure, name)


def _style(name: str) -> Any:
    """Return matplotlib's settings: text stays text, and what the page colours has the colours that stand for it."""
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(inked, _INK),
        "grid.color": _RULE,
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 8.5,
        "font.sans-serif": ["DejaVu Sans"],
        "hatch.linewidth": 0.5,
    }


def _panels(figure: Figure, run: Run, bench: Bench, values: Sequence[str]) -> None:
    """Draw a panel of bars for each key. Keys of a single row with one unit share a panel, with a bar for each."""
    units = {unit(key, [run[0][key]])[1] for key in values} if len(run) == 1 else set()
    if len(values) > 1 and len(units) == 1 and "" not in units:
        run = [{"name": title(key), values[0]: run[0][key]} for key in values]
        bench, values = Bench(question=bench.question, labels=("name",)), values[:1]
    panels = [_bars(run, bench, key) for key in values]
    names = list(dict.fromkeys(name for panel in panels for name, _, _ in panel))
    every = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    figure.set_size_inches(_WIDTH, 0.75 + 0.24 * len(names))
    for axes, key, panel in zip(every, values, panels, strict=True):
        scale = unit(key, [value for _, value, _ in panel])[0]
        for name, value, row in panel:
            axes.barh(names.index(name), value / scale, height=0.72, color=COLOURS[_colour(row)])
            _whisker(axes, names.index(name), key, row, scale)
        _name_bars(axes, names, {name: value for name, value, _ in panel}, key)
        reference = [value for _, value, row in panel if row.get("system") == bench.reference]
        if reference:
            axes.axvline(reference[0] / scale, color=_INK, linestyle="--", linewidth=0.8)
        axes.set_xlabel(heading(key, [value for _, value, _ in panel]))
        _plain(axes)


def _bars(run: Run, bench: Bench, key: str) -> list[tuple[str, float, Row]]:
    """Return name, value and row of each bar. An object has a bar for each of its numbers."""
    labels = [each for each in bench.labels if any(row.get(each) != run[0].get(each) for row in run)]
    if len(run) == 1:
        labels = [each for each in bench.labels if each in run[0]]
    bars: list[tuple[str, float, Row]] = []
    for row in run:
        name = ", ".join(row_name(each, row[each]) for each in labels if row.get(each) not in (None, ""))
        value = row.get(key)
        if isinstance(value, dict):
            bars += [(f"{name}, {inner}", each, row) for inner, each in value.items() if is_number(each)]
        elif is_number(value):
            bars.append((name, value, row))  # type: ignore[arg-type]  # `is_number` narrows nothing
    return bars


def _whisker(axes: Axes, place: int, key: str, row: Row, scale: float) -> None:
    """Draw a line from p20 to p80 over a bar that is a median."""
    stem = key.removesuffix("_p50")
    ends = numbers([row.get(f"{stem}_p20"), row.get(f"{stem}_p80")])
    if stem != key and len(ends) == 2:
        axes.plot([end / scale for end in ends], [place, place], color=_INK, linewidth=1.0)


def _name_bars(axes: Axes, names: Sequence[str], values: Mapping[str, float], key: str) -> None:
    """Write the names of bars at their left, and values at the right end of the panel."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    for name, text in zip(values, texts(key, list(values.values())), strict=True):
        place = (1.0, names.index(name))
        axes.annotate(text, place, (4, 0), ("axes fraction", "data"), textcoords="offset points", va="center")


def _stack(figure: Figure, run: Run, bench: Bench, key: str) -> None:
    """Draw bars of parts, and the rest of each value in grey."""
    panel = _bars(run, bench, key)
    figure.set_size_inches(_WIDTH, 1.0 + 0.26 * len(panel))
    axes = figure.subplots()
    scale = unit(key, [value for _, value, _ in panel])[0]
    most = max(value for _, value, _ in panel)
    inside = [_parts(row, bench) for _, _, row in panel]
    found = dict.fromkeys(name for parts in inside for name, size in parts.items() if size > _VISIBLE * most)
    left = [0.0] * len(panel)
    for name in sorted(found, key=_place):
        sizes = [parts.get(name, 0) / scale for parts in inside]
        colour, hatch = COLOURS[_PART_COLOURS[_place(name) % 7]], _HATCHES[_place(name) % 7]
        axes.barh(
            range(len(panel)), sizes, 0.72, left=left, color=colour, hatch=hatch, edgecolor=_PAPER, lw=0, label=name
        )
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    rest = [max(0.0, value / scale - before) for (_, value, _), before in zip(panel, left, strict=True)]
    axes.barh(range(len(panel)), rest, 0.72, left=left, color=COLOURS["pale"], label="the rest")
    _name_bars(axes, [name for name, _, _ in panel], {name: value for name, value, _ in panel}, key)
    axes.set_xlabel(heading(key, [value for _, value, _ in panel]))
    figure.legend(loc="outside upper center", ncols=4, frameon=False, handlelength=1.6, columnspacing=1.4)
    _plain(axes)


def _place(name: str) -> int:
    """Return the place of a purpose, which has one colour in all plots."""
    return _PURPOSES.index(name) if name in _PURPOSES else len(_PURPOSES)


def _parts(row: Row, bench: Bench) -> dict[str, float]:
    found: Any = row.get(bench.parts)
    return {name: size for name, size in found.items() if is_number(size)} if isinstance(found, dict) else {}


def _lines(figure: Figure, run: Run, bench: Bench, key: str) -> None:
    """Draw a line for each series over the axis, which is logarithmic if few places are on it, and none is 0."""
    figure.set_size_inches(_WIDTH, 3.2)
    axes = figure.subplots()
    series = _series(run, bench, key)
    colours = _series_colours([row for row, _ in series.values()])
    places = sorted({x for _, points in series.values() for x, _ in points})
    few = len(places) <= _FEW
    for number, ((name, (_, points)), colour) in enumerate(zip(series.items(), colours, strict=True)):
        marker, dashes = _MARKERS[number % 7] if few else "", _DASHES[number % 7]
        axes.plot(
            *zip(*points, strict=True), dashes, color=colour, marker=marker, markersize=4.5, linewidth=1.6, label=name
        )
    heights = [y for _, points in series.values() for _, y in points if y > 0]
    if heights and max(heights) > 10 * min(heights):
        axes.set_yscale("log")
    elif few:
        axes.set_ylim(bottom=0)
    if few:
        if places[0] > 0:
            axes.set_xscale("log", base=2)
        axes.set_xticks(places, [_tick(bench.axis, each) for each in places])
    axes.minorticks_off()
    axes.set_xlabel(title(bench.axis))
    axes.set_ylabel(heading(key, numbers([row.get(key) for row in run])))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="y", linewidth=0.5)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.spines[["top", "right"]].set_visible(False)


def _series(run: Run, bench: Bench, key: str) -> dict[str, tuple[Row, list[tuple[float, float]]]]:
    """Return, by name, a row of each series and its points in the order of the axis."""
    labels = [each for each in bench.labels if each != bench.axis]
    found: dict[str, tuple[Row, list[tuple[float, float]]]] = {}
    for row in run:
        name = " ".join(row_name(each, row[each]) for each in labels if row.get(each) not in (None, ""))
        points = _points(row.get(bench.axis), row.get(key))
        if points:
            found.setdefault(name, (row, []))[1].extend(points)
    return {name: (row, sorted(points)) for name, (row, points) in found.items()}


def _points(place: Any, value: Any) -> list[tuple[float, float]]:
    """Return the points of a row: one, or one for each item of a list, numbered from 1 if no places are known."""
    values = value if isinstance(value, list) else [value]
    numbered = range(1, len(values) + 1) if isinstance(value, list) else [place]
    pairs = zip(place if isinstance(place, list) else numbered, values, strict=False)
    return [(x, y) for x, y in pairs if is_number(x) and is_number(y)]


def _tick(key: str, value: float) -> str:
    scale, name = unit(key, [value])
    return f"{value / scale:g} {name}".strip()


def _series_colours(rows: Sequence[Row]) -> list[str]:
    """Return a colour for each series: that of its family, or the next one that is free."""
    taken: list[str] = []
    for row in rows:
        own = [_colour(row)] if "system" in row else []
        free = [colour for colour in (*own, *_SERIES) if colour not in taken]
        taken.append(free[0] if free else "grey")
    return [COLOURS[colour] for colour in taken]


def _colour(row: Row) -> str:
    """Return the colour of a system's family."""
    system = row.get("system")
    if system is None or _OURS.match(str(system)):
        return "blue"
    return next((colour for family, colour in _FAMILIES.items() if str(system).lower().startswith(family)), "grey")


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="x", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_xlim(left=0)


def _element(figure: Figure, name: str) -> str:
    """Return a figure as an element whose colours and identifiers are the page's."""
    file = StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->|\s+xmlns(:\w+)?=\"[^\"]*\"", "", file.getvalue(), flags=re.DOTALL
    )
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    for variable, colour in {**COLOURS, "ink": _INK, "rule": _RULE, "paper": _PAPER}.items():
        svg = svg.replace(colour, f"var(--{variable})")
    return re.sub(r"\n\s*", "\n", svg).strip()
