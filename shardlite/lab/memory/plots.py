"""Plots of memory: bars by purpose, bytes against the number of ranks, and one step as stacked areas. Needs matplotlib.

Colours are those of Wong 2011 (Nature Methods 8, 441). In print, hatches and markers remain distinguishable. Each
purpose has the same style as in the plots of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlite.lab.memory.recorder import Row
from shardlite.lab.memory.text import heading, model_stem, run_stem, runs
from shardlite.lab.memory.timeline import BACKWARD, FORWARD, ROOT, Timeline
from shardlite.lab.plan.report import COLUMNS, by_column, words
from shardlite.lab.plots import COLOURS, EDGES, MARKERS, STYLES, new_figure, save
from shardlite.plan import Setting, Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_IDLE, _OTHERS, _NO_ACCOUNT = "idle shared memory", "other purposes", "tensors of systems without memory()"
_ON_THEIR_WAY, _NOT_IN_TENSORS = "activations, gradients not in a bucket", "not in tensors"
_PARTS: dict[str, dict[str, Any]] = {
    **{COLUMNS[title][0]: STYLES[title] for title in ("weights", "optimizer", "gradients", "buckets", "gathered")},
    _IDLE: {"facecolor": "#D55E00", "hatch": "++"},
    _OTHERS: STYLES["other"],
    _NO_ACCOUNT: {"facecolor": "#BBBBBB", "hatch": ""},
    _ON_THEIR_WAY: STYLES["activations"],
    _NOT_IN_TENSORS: {"facecolor": "#333333", "hatch": ""},
}
"""Style of each part of a bar, from left to right."""

_NUMBERED = 0.05
"""The shortest part that has space for its number, as a fraction of the longest bar."""

_DARK = ("#0072B2", "#009E73", "#333333")
"""Colours on which numbers are white."""

_AREAS = ("weights", "optimizer", "other", "gradients", "buckets", "gathered", "activations")
"""Columns of a plan in the order in which a timeline stacks them, from the bottom up."""

_READABLE = 30  # maximum number of phases in which each unit is named


def paint(rows: Sequence[Row], folder: Path, *, kind: str = "png") -> list[Path]:
    """Write the plots of rows to a folder: bars for each run, and lines for each model. Return the paths of the plots.

    Args:
        rows: rows of any number of models, ranks and systems.
        folder: the folder, which is created if it does not exist.
        kind: `png` or `svg`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the folder is not writable.
    """
    measured = [row for row in rows if "error" not in row]
    written = [save(_draw_bars(run), folder / f"{run_stem(run[0])}.{kind}") for run in runs(measured)]
    for _, group in groupby(measured, key=lambda row: row["model"]):
        model = [row for row in group if not row["system"].startswith("activations")]
        if any("predicted_bytes" in row for row in model):
            written.append(save(_draw_ranks(model), folder / f"{model_stem(model[0])}.{kind}"))
    return written


def paint_timeline(source: Source, setting: Setting, ours: Timeline, theirs: Timeline, path: Path) -> None:
    """Write a PNG of one step: ShardLite's bytes by purpose, and FSDP2's total.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: `path` is not writable.
    """
    figure, (axes,) = new_figure(10, 4.8)
    _stack(axes, ours)
    _draw_total(axes, "ShardLite", ours, color="#D55E00", linewidth=0.8)
    _draw_total(axes, "FSDP2", theirs, color="black", linewidth=1.2)
    _mark_phases(axes, ours)
    highest = max(ours.peak, theirs.peak) / 2**20
    axes.set(ylabel="live tensors of rank 0, MiB", ylim=(0, 1.08 * highest), xlim=(0, len(ours.phases)))
    axes.set_xlabel(f"one step: units in the order of their passes (R: root), {_list_of(ours.units)}", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
    figure.suptitle(f"{heading(source, setting)}\nShardLite: {words(setting)}", fontsize=9)
    figure.savefig(path, format="png")


def _draw_bars(rows: Sequence[Row]) -> Figure:
    """Draw a bar in MiB for each system: first its tensors by purpose at their peak, then other process memory."""
    figure, (axes,) = new_figure(8, 1.6 + 0.3 * len(rows))
    left, names, bars = [0.0] * len(rows), [row["system"] for row in rows], list(map(_parts, rows))
    longest = max(sum(bar.values()) for bar in bars) / 2**20
    for part, style in _PARTS.items():
        sizes = [bar.get(part, 0) / 2**20 for bar in bars]
        if any(sizes):
            axes.barh(names, sizes, 0.76, left=left, label=part, **style, **EDGES)
        for place, (start, size) in enumerate(zip(left, sizes, strict=True)):
            if size >= _NUMBERED * longest:
                _number(axes, start + size / 2, place, size, style["facecolor"])
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    for place, size in enumerate(left):
        axes.annotate(f"{size:.0f}", (size, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.06 * longest)
    axes.set_xlabel("MiB per rank at the peak of a step", fontsize=8)
    axes.set_title(f"{rows[0]['words']}, {rows[0]['ranks']} ranks", fontsize=9, loc="left")
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    return figure


def _number(axes: Axes, middle: float, place: int, size: float, colour: str) -> None:
    """Write a number into its part of a bar, on a box that covers the hatch."""
    box = {"boxstyle": "square,pad=0.15", "facecolor": colour, "linewidth": 0}
    ink = "white" if colour in _DARK else "black"
    axes.text(middle, place, f"{size:.0f}", ha="center", va="center", fontsize=7, color=ink, bbox=box)


def _parts(row: Row) -> dict[str, int]:
    """Return the bytes of each part of a bar."""
    held, tensors = row["purposes"], int(row["tensor_bytes"])
    outside = {name: held.get(name, 0) for name in ("mailboxes", _IDLE)}  # purposes of memory that is not in tensors
    parts = {part: held.get(part, 0) for part in _PARTS}
    parts[_OTHERS] = sum(held.values()) - sum(parts.values())
    parts[_ON_THEIR_WAY if held else _NO_ACCOUNT] = tensors - sum(held.values()) + sum(outside.values())
    parts[_NOT_IN_TENSORS] = max(0, int(row.get("pss_bytes", 0)) - tensors - sum(outside.values()))
    return parts


def _draw_ranks(rows: Sequence[Row]) -> Figure:
    """Draw peak tensor bytes against ranks: points are measured, lines are predicted. ShardLite has its own panel."""
    names = dict.fromkeys((not row["purposes"], row["system"]) for row in rows)
    panels = [[name for other, name in names if other is kind] for kind in (True, False)]
    panels = list(filter(None, panels))
    figure, every = new_figure(4.2 * len(panels) + 0.6, 4.6, columns=len(panels), sharey=True)
    for axes, systems in zip(every, panels, strict=True):
        for i, system in enumerate(systems):
            _draw_system(axes, [row for row in rows if row["system"] == system], i)
        axes.set_xlabel("ranks", fontsize=8)
        axes.set_xscale("log")
        ticks = sorted({row["ranks"] for row in rows})
        axes.set_xticks(ticks, [str(each) for each in ticks])
        axes.minorticks_off()
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    every[0].set_ylim(0, 1.08 * max(row["tensor_bytes"] for row in rows) / 2**20)
    every[0].set_ylabel("MiB in tensors per rank at the peak of a step", fontsize=8)
    figure.suptitle(f"{rows[0]['words']}: points are measured, lines are predicted", fontsize=9)
    return figure


def _draw_system(axes: Axes, rows: Sequence[Row], place: int) -> None:
    """Draw one system. Later systems have smaller points, so that points at the same position remain visible."""
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    rows = sorted(rows, key=lambda row: int(row["ranks"]))
    measured = [row["tensor_bytes"] / 2**20 for row in rows]
    points = {"markersize": max(3, 9 - place), "markerfacecolor": "none", "label": rows[0]["system"]}
    axes.plot([row["ranks"] for row in rows], measured, marker, color=colour, **points)
    known = [row for row in rows if "predicted_bytes" in row]
    predicted = [row["predicted_bytes"] / 2**20 for row in known]
    axes.plot([row["ranks"] for row in known], predicted, color=colour, linewidth=0.9)


def _stack(axes: Axes, ours: Timeline) -> None:
    """Draw an area for each purpose, stacked on the areas before it."""
    places, below, samples = ours.places(), [0.0] * len(ours.totals), list(map(by_column, ours.purposes))
    for title in _AREAS:
        label = _ON_THEIR_WAY if title == "activations" else ", ".join(COLUMNS[title])
        sizes = [sample[title] / 2**20 for sample in samples]
        above = [a + b for a, b in zip(below, sizes, strict=True)]
        if any(sizes):
            style: dict[str, Any] = {**STYLES[title], **EDGES, "linewidth": 0.2}
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
    start = 0
    for name, phases in groupby(ours.phases, key=lambda phase: phase.name):
        stop = start + len(list(phases))
        middle = (start + stop) / 2, 1.0
        axes.axvline(stop, color="#333333", linewidth=0.9)
        axes.annotate(name, middle, xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=9)
        start = stop


def _list_of(units: Sequence[str]) -> str:
    if not units:
        return "no units but the root"
    return f"0: {units[0]}" if len(units) == 1 else f"0: {units[0]} to {len(units) - 1}: {units[-1]}"
