"""The picture of a step: bytes by purpose, unit by unit, as a stacked area, and the totals of other systems as lines.

Colours and hatches can be told apart in print and by colour-blind readers. Colours are those of Wong 2011 (Nature
Methods 8, 441). Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from shardlite.apps.memory.recorder import BACKWARD, FORWARD, ROOT, Timeline
from shardlite.apps.memory.report import heading
from shardlite.apps.plan.plan import Setting
from shardlite.apps.plan.plots import STYLES
from shardlite.apps.plan.report import COLUMNS, words
from shardlite.apps.plan.source import Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AREAS = ("weights", "optimizer", "other", "gradients", "buckets", "gathered", "activations")
"""Columns of a plan, from the bottom up."""

_NAMES = {
    "weights": "parameters",
    "optimizer": "optimizer state",
    "other": "buffers, staging, chunks of a step",
    "buckets": "gradient buckets",
    "gathered": "gather buffers",
    "activations": "activations, gradients on their way",
}
_READABLE = 30  # phases whose units can be named each


def paint(source: Source, setting: Setting, timelines: Sequence[Timeline], path: Path) -> None:
    """Write a PNG. The first timeline has purposes; of the others the total is drawn.

    Raises:
        OSError: `path` cannot be written.
    """
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(10, 4.8), dpi=130, layout="constrained")
    axes = figure.subplots()
    ours, *others = timelines
    _stack(axes, ours)
    for other in others:
        mib = [total / 2**20 for total in other.totals]
        label = f"{other.system}, all together: at most {other.peak / 2**20:.1f} MiB"
        axes.plot(other.places(), mib, color="black", linewidth=1.2, drawstyle="steps-post", label=label)
    _mark_phases(axes, ours)
    highest = max(each.peak for each in timelines) / 2**20
    axes.set(ylabel="live tensors of rank 0, MiB", ylim=(0, 1.08 * highest), xlim=(0, len(ours.phases)))
    axes.set_xlabel(f"one step: units in the order of their passes (R: root), {_list_of(ours.units)}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
    figure.suptitle(f"{heading(source, setting)}\nShardLite: {words(setting)}", fontsize=9)
    figure.savefig(path, format="png")


def _stack(axes: Axes, ours: Timeline) -> None:
    """Draw an area for each purpose on top of those before."""
    places, below = ours.places(), [0.0] * len(ours.totals)
    for title in _AREAS:
        colour, hatch = STYLES[title]
        sizes = [sum(each.get(purpose, 0) for purpose in COLUMNS[title]) / 2**20 for each in ours.purposes]
        above = [a + b for a, b in zip(below, sizes, strict=True)]
        if any(sizes):
            axes.fill_between(
                places,
                below,
                above,
                step="post",
                label=_NAMES.get(title, title),
                facecolor=colour,
                hatch=hatch,
                edgecolor="#333333",
                linewidth=0.2,
            )
        below = above
    label = f"ShardLite, all together: at most {ours.peak / 2**20:.1f} MiB"
    axes.plot(places, below, color="#D55E00", linewidth=0.8, drawstyle="steps-post", label=label)


def _mark_phases(axes: Axes, ours: Timeline) -> None:
    """Draw the bounds of the units' passes, and name units and passes."""
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
    """Yield the name of each pass, and the numbers of its first phase and of the one after it."""
    start = 0
    for name, phases in groupby(ours.phases, key=lambda phase: phase.name):
        stop = start + len(list(phases))
        yield name, start, stop
        start = stop


def _list_of(units: Sequence[str]) -> str:
    if not units:
        return "no units beside the root"
    return f"0: {units[0]}" if len(units) == 1 else f"0: {units[0]} to {len(units) - 1}: {units[-1]}"
