"""Plots of memory: bars by purpose, bytes against the number of ranks, and one step as stacked areas. Needs matplotlib.

Colours are those of Wong 2011 (Nature Methods 8, 441). Hatches and markers can be told apart in print. A purpose has
the colour that it has in the plots of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlite.apps.memory.measure import Row
from shardlite.apps.memory.table import heading, model_stem, run_stem, runs
from shardlite.apps.memory.timeline import BACKWARD, FORWARD, ROOT, Timeline
from shardlite.apps.plan.plan import Setting
from shardlite.apps.plan.plots import EDGES, STYLES, plain
from shardlite.apps.plan.report import COLUMNS, words
from shardlite.apps.plan.source import Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#777777")
_MARKERS = "os^Dv<>Ph"

_OWN_PARTS = ("weights", "optimizer", "gradients", "buckets", "gathered")
_PURPOSES = {**{COLUMNS[title][0]: STYLES[title] for title in _OWN_PARTS}, "idle shared memory": ("#D55E00", "++")}
_OTHERS, _NO_ACCOUNT = "other purposes", "tensors of systems without memory()"
_ON_THEIR_WAY, _NOT_IN_TENSORS = "activations, gradients not in a bucket", "not in tensors"
_PARTS = {
    **_PURPOSES,
    _OTHERS: STYLES["other"],
    _NO_ACCOUNT: ("#BBBBBB", ""),
    _ON_THEIR_WAY: STYLES["activations"],
    _NOT_IN_TENSORS: ("#333333", ""),
}
"""Colour and hatch of each part of a bar, from left to right."""

_NO_TENSORS = ("mailboxes", "idle shared memory")
"""Purposes of memory that no tensor has."""

_NUMBERED = 0.05
"""The shortest part that has space for its number, as a fraction of the longest bar."""

_DARK = ("#0072B2", "#009E73", "#333333")
"""Colours on which numbers are white."""

_AREAS = ("weights", "optimizer", "other", "gradients", "buckets", "gathered", "activations")
"""Columns of a plan from the bottom up, as a timeline stacks them."""

_READABLE = 30  # phases whose units can be named each


def paint(rows: Sequence[Row], folder: Path, *, kind: str = "png") -> list[Path]:
    """Write the plots of some rows to a folder, and return their paths: bars for each run, lines for each model.

    Args:
        rows: rows of any number of models, ranks and systems.
        folder: created if it does not exist.
        kind: `png` or `svg`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the folder is not writable.
    """
    import matplotlib  # optional: fail before anything is written

    folder.mkdir(parents=True, exist_ok=True)
    measured = [row for row in rows if "error" not in row]
    written = []
    with matplotlib.rc_context({"svg.hashsalt": "footprint", "hatch.linewidth": 0.5}):
        for run in runs(measured):
            written.append(folder / f"{run_stem(run[0])}.{kind}")
            _paint_bars(run, written[-1])
        for _, group in groupby(measured, key=lambda row: row["model"]):
            model = [row for row in group if not row["system"].startswith("activations")]
            if any("predicted_bytes" in row for row in model):
                written.append(folder / f"{model_stem(model[0])}.{kind}")
                _paint_ranks(model, written[-1])
    return written


def paint_timeline(source: Source, setting: Setting, ours: Timeline, theirs: Timeline, path: Path) -> None:
    """Write a PNG of one step: ShardLite's bytes by purpose, and FSDP2's in all.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: `path` is not writable.
    """
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(10, 4.8), dpi=130, layout="constrained")
    axes = figure.subplots()
    _stack(axes, ours)
    _draw_total(axes, "ShardLite", ours, color="#D55E00", linewidth=0.8)
    _draw_total(axes, "FSDP2", theirs, color="black", linewidth=1.2)
    _mark_phases(axes, ours)
    highest = max(ours.peak, theirs.peak) / 2**20
    axes.set(ylabel="live tensors of rank 0, MiB", ylim=(0, 1.08 * highest), xlim=(0, len(ours.phases)))
    axes.set_xlabel(f"one step: units in the order of their passes (R: root), {_list_of(ours.units)}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
    figure.suptitle(f"{heading(source, setting)}\nShardLite: {words(setting)}", fontsize=9)
    figure.savefig(path, format="png")


def _paint_bars(rows: Sequence[Row], file: Path) -> None:
    """Draw a bar for each system in MiB: its tensors at their peak by purpose, then what else the process held."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.6 + 0.3 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    left, names = [0.0] * len(rows), [row["system"] for row in rows]
    sizes = {part: [_part(row, part) / 2**20 for row in rows] for part in _PARTS}
    longest = max(map(sum, zip(*sizes.values(), strict=True)))
    for part, (colour, hatch) in _PARTS.items():
        if any(sizes[part]):
            axes.barh(names, sizes[part], 0.76, left=left, label=part, color=colour, hatch=hatch, **EDGES)
        for place, (start, size) in enumerate(zip(left, sizes[part], strict=True)):
            if size >= _NUMBERED * longest:
                _number(axes, start + size / 2, place, size, colour)
        left = [before + size for before, size in zip(left, sizes[part], strict=True)]
    for place, size in enumerate(left):
        axes.annotate(f"{size:.0f}", (size, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.06 * longest)
    axes.set_xlabel("MiB per rank at the peak of a step", fontsize=8)
    axes.set_title(f"{rows[0]['words']}, {rows[0]['ranks']} ranks", fontsize=9, loc="left")
    plain(axes)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    figure.savefig(file, metadata=_dateless(file))


def _number(axes: Axes, middle: float, place: int, size: float, colour: str) -> None:
    """Write a number into its part of a bar, on a box that hides the hatch."""
    box = {"boxstyle": "square,pad=0.15", "facecolor": colour, "linewidth": 0}
    ink = "white" if colour in _DARK else "black"
    axes.text(middle, place, f"{size:.0f}", ha="center", va="center", fontsize=7, color=ink, bbox=box)


def _part(row: Row, part: str) -> int:
    """Return the bytes of one part of a bar."""
    held: dict[str, int] = row["purposes"]
    idle = sum(held.get(each, 0) for each in _NO_TENSORS)
    if part == _NOT_IN_TENSORS:
        return max(0, int(row.get("pss_bytes", 0)) - int(row["tensor_bytes"]) - idle)
    if part in (_NO_ACCOUNT, _ON_THEIR_WAY):
        tensors = int(row["tensor_bytes"]) - sum(held.values()) + idle
        return tensors if part == (_ON_THEIR_WAY if held else _NO_ACCOUNT) else 0
    if part == _OTHERS:
        return sum(nbytes for purpose, nbytes in held.items() if purpose not in _PURPOSES)
    return held.get(part, 0)


def _paint_ranks(rows: Sequence[Row], file: Path) -> None:
    """Draw peak tensor bytes against ranks, measured as points and predicted as lines. ShardLite has its own panel."""
    from matplotlib.figure import Figure

    names = dict.fromkeys((not row["purposes"], row["system"]) for row in rows)
    panels = [[name for other, name in names if other is kind] for kind in (True, False)]
    panels = list(filter(None, panels))
    figure = Figure(figsize=(4.2 * len(panels) + 0.6, 4.6), dpi=150, layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, systems in zip(every, panels, strict=True):
        for i, system in enumerate(systems):
            _draw_system(axes, [row for row in rows if row["system"] == system], i)
        axes.set_xlabel("ranks", fontsize=8)
        axes.set_xscale("log")
        ticks = sorted({row["ranks"] for row in rows})
        axes.set_xticks(ticks, [str(each) for each in ticks])
        axes.minorticks_off()
        axes.grid(color="#dddddd", linewidth=0.6)
        plain(axes)
        axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    every[0].set_ylim(0, 1.08 * max(row["tensor_bytes"] for row in rows) / 2**20)
    every[0].set_ylabel("MiB in tensors per rank at the peak of a step", fontsize=8)
    figure.suptitle(f"{rows[0]['words']}: points are measured, lines are predicted", fontsize=9)
    figure.savefig(file, metadata=_dateless(file))


def _draw_system(axes: Axes, rows: Sequence[Row], place: int) -> None:
    """Draw one system. Points of the first are largest, so that points at the same place can be told apart."""
    colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
    rows = sorted(rows, key=lambda row: int(row["ranks"]))
    measured = [row["tensor_bytes"] / 2**20 for row in rows]
    points = {"markersize": max(3, 9 - place), "markerfacecolor": "none", "label": rows[0]["system"]}
    axes.plot([row["ranks"] for row in rows], measured, marker, color=colour, **points)
    known = [row for row in rows if "predicted_bytes" in row]
    predicted = [row["predicted_bytes"] / 2**20 for row in known]
    axes.plot([row["ranks"] for row in known], predicted, color=colour, linewidth=0.9)


def _dateless(file: Path) -> dict[str, None]:
    """Return metadata without the date of an SVG, so that equal rows give equal files."""
    return {"Date": None} if file.suffix == ".svg" else {}


def _stack(axes: Axes, ours: Timeline) -> None:
    """Draw an area for each purpose on top of those before."""
    places, below = ours.places(), [0.0] * len(ours.totals)
    for title in _AREAS:
        label = _ON_THEIR_WAY if title == "activations" else ", ".join(COLUMNS[title])
        colour, hatch = STYLES[title]
        sizes = [sum(each.get(purpose, 0) for purpose in COLUMNS[title]) / 2**20 for each in ours.purposes]
        above = [a + b for a, b in zip(below, sizes, strict=True)]
        if any(sizes):
            style: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": "#333333", "linewidth": 0.2}
            axes.fill_between(places, below, above, step="post", label=label, **style)
        below = above


def _draw_total(axes: Axes, name: str, timeline: Timeline, **style: Any) -> None:
    mib = [total / 2**20 for total in timeline.totals]
    label = f"{name}, all together: at most {timeline.peak / 2**20:.1f} MiB"
    axes.plot(timeline.places(), mib, drawstyle="steps-post", label=label, **style)


def _mark_phases(axes: Axes, ours: Timeline) -> None:
    """Draw the boundaries of phases, and the names of units and passes."""
    every = -(-len(ours.phases) // _READABLE)
    names = ["R" if phase.unit is ROOT else f"{phase.unit}" for phase in ours.phases]
    names = ["" if phase.name not in (FORWARD, BACKWARD) else n for n, phase in zip(names, ours.phases, strict=True)]
    shown = range(0, len(names), every)
    axes.set_xticks([i + 0.5 for i in shown], [names[i] for i in shown], fontsize=8)
    axes.tick_params(axis="x", length=0)
    for i in range(1, len(names)):
        axes.axvline(i, color="#999999", linewidth=0.4, linestyle=":")
    for name, start, stop in _passes(ours):
        axes.axvline(stop, color="#333333", linewidth=0.9)
        axes.annotate(
            name, ((start + stop) / 2, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=9
        )


def _passes(ours: Timeline) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each pass, the number of its first phase, and that of the phase after it."""
    start = 0
    for name, phases in groupby(ours.phases, key=lambda phase: phase.name):
        stop = start + len(list(phases))
        yield name, start, stop
        start = stop


def _list_of(units: Sequence[str]) -> str:
    if not units:
        return "no units but the root"
    return f"0: {units[0]}" if len(units) == 1 else f"0: {units[0]} to {len(units) - 1}: {units[-1]}"
