"""Plots of a plan. Colours and hatches are distinguishable in print and for colour-blind readers. Needs matplotlib.

Colours are those of Wong 2011 (Nature Methods 8, 441).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlite.apps.plan.clusters import Cluster
from shardlite.apps.plan.plan import Planner, RankPlan
from shardlite.apps.plan.report import COLUMNS, Group, words
from shardlite.apps.plan.simulate import simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {
    "weights": ("#0072B2", ""),
    "optimizer": ("#E69F00", "//"),
    "gradients": ("#009E73", ".."),
    "buckets": ("#CC79A7", "xx"),
    "gathered": ("#56B4E9", "\\\\"),
    "other": ("#777777", ""),
    "activations": ("#F2F2F2", ""),
}
"""Colour and hatch of each column of a plan, in every picture of memory."""

EDGES: dict[str, Any] = {"edgecolor": "#333333", "linewidth": 0.4}
_LINES = (("#0072B2", "-", "o"), ("#D55E00", "-.", "s"), ("#009E73", "--", "^"), ("#000000", ":", ""))
_SIZES = [10 ** (6 + i / 8) for i in range(41)]
"""Parameters: a million to a hundred billion."""


def paint(
    planner: Planner, groups: Sequence[Group], cluster: Cluster | None, card: int | None, folder: Path
) -> list[Path]:
    """Write the plots of the groups to a folder, and return their paths: memory, and with a cluster two more.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the folder cannot be written to.
    """
    import matplotlib.figure  # noqa: F401  # optional: fail before anything is written

    folder.mkdir(parents=True, exist_ok=True)
    written = [_memory(planner, groups, card, folder / "memory.png")]
    if cluster is not None:
        written.append(_scaling(planner, groups, cluster, folder / "scaling.png"))
        written.append(_bandwidth(planner, groups[0], cluster, folder / "bandwidth.png"))
    return written


def _memory(planner: Planner, groups: Sequence[Group], card: int | None, path: Path) -> Path:
    """Draw a bar per number of ranks, stacked by purpose, for each group, with a table of its parts below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 + 4.4 * len(groups)), dpi=130, layout="constrained")
    every = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, group in zip(every, groups, strict=True):
        names = [f"{plan.setting.world_size}" for plan in group.plans]
        below = [0.0] * len(names)
        _number(axes, 0, "ranks", names)
        for line, (title, purposes) in enumerate(COLUMNS.items()):
            sizes = [sum(plan.by_purpose.get(each, 0) for each in purposes) / 1e9 for plan in group.plans]
            colour, hatch = STYLES[title]
            axes.bar(names, sizes, bottom=below, color=colour, hatch=hatch, **EDGES)
            _number(axes, len(COLUMNS) - line, title, [f"{size:.2f}" for size in sizes])
            below = [a + b for a, b in zip(below, sizes, strict=True)]
        _number(axes, len(COLUMNS) + 1, "peak", [f"{size:.2f}" for size in below])
        axes.set_xticks([])
        if card is not None:
            axes.axhline(card / 1e9, color="black", linestyle="--", linewidth=1.2, label=f"card, {card / 1e9:g} GB")
            axes.legend(frameon=False, fontsize=8, loc="upper right")
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_ylabel("GB per rank at the peak", fontsize=9)
        axes.set_title(words(group.setting), fontsize=8, loc="left")
        plain(axes)
    figure.suptitle(f"{planner.source.name}, {planner.source.words}", fontsize=10)
    figure.savefig(path)
    return path


def _number(axes: Axes, line: int, title: str, cells: Sequence[str]) -> None:
    """Write a line of the table below the bars, with its title and the colour of a part."""
    down = -(10 + 13 * line)  # points
    options: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8, "annotation_clip": False}
    axes.annotate(title, (0, 0), (-22, down), "axes fraction", ha="right", **options)
    for place, cell in enumerate(cells):
        axes.annotate(cell, (place, 0), (0, down), ("data", "axes fraction"), ha="center", **options)
    if title in STYLES:
        colour, hatch = STYLES[title]
        box = {"boxstyle": "square,pad=0", "facecolor": colour, "hatch": hatch, **EDGES}
        axes.annotate(" " * 6, (0, 0), (-4, down), "axes fraction", ha="right", bbox=box, **options)


def _scaling(planner: Planner, groups: Sequence[Group], cluster: Cluster, path: Path) -> Path:
    """Draw efficiencies against the number of ranks, with Amdahl's law and the ideal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 + 3.0 * len(groups)), dpi=130, layout="constrained")
    every = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, group in zip(every, groups, strict=True):
        ranks = [each.world_size for each in group.curve]
        curves = {
            "same batch on each rank": [each.weak for each in group.curve],
            "same batch on all ranks together": [each.strong for each in group.curve],
            "the same, nothing overlapped (Amdahl's law)": [each.amdahl for each in group.curve],
            "ideal": [1.0] * len(ranks),
        }
        for (label, values), (colour, style, marker) in zip(curves.items(), _LINES, strict=True):
            shown = [100 * value for value in values]
            axes.plot(ranks, shown, color=colour, linestyle=style, marker=marker or None, markersize=5, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [f"{each}" for each in ranks])
        axes.set(ylim=(0, 112), ylabel="scaling efficiency, %")
        axes.set_title(words(group.setting), fontsize=8, loc="left")
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        plain(axes)
    every[-1].set_xlabel("ranks")
    every[0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.suptitle(f"{planner.source.name} on {cluster.name}, predicted, not measured", fontsize=10)
    figure.savefig(path)
    return path


def _bandwidth(planner: Planner, group: Group, cluster: Cluster, path: Path) -> Path:
    """Draw the bandwidth that gathers and reductions reach against the size of a model in as many units as this one."""
    from matplotlib.figure import Figure

    plan = group.plans[-1]
    ranks, units = plan.setting.world_size, len(plan.budget.units)
    figure = Figure(figsize=(8, 4.4), dpi=130, layout="constrained")
    axes = figure.subplots()
    itemsize = plan.budget.units[-1].full / max(1, planner.numel / units)
    for (name, nbytes), (colour, style, _) in zip(
        (("all-gather", itemsize), ("reduce-scatter", plan.setting.precision.reduce.itemsize)), _LINES, strict=False
    ):
        reached = [_rate(cluster, name, size / units * nbytes, ranks) for size in _SIZES]
        axes.plot(_SIZES, reached, color=colour, linestyle=style, label=f"{name} of a unit, {ranks} ranks")
    needed = _needed(plan, cluster)
    axes.axhline(needed, color="black", linestyle="--", label=f"needed to hide behind this batch, {needed:.3g} GB/s")
    axes.axvline(
        planner.numel, color="#999999", linestyle=":", label=f"{planner.source.name}, {planner.numel / 1e9:.3g}e9"
    )
    axes.set(xscale="log", yscale="log", xlabel=f"parameters of a model in {units} units", ylabel="GB/s sent per rank")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(f"{cluster.name}, predicted, not measured", fontsize=10, loc="left")
    plain(axes)
    figure.savefig(path)
    return path


def _rate(cluster: Cluster, operation: str, nbytes: float, ranks: int) -> float:
    """Return the GB per second that a rank sends in one operation on a buffer of `nbytes`."""
    seconds = cluster.seconds(operation, round(nbytes), ranks)  # type: ignore[arg-type]
    return nbytes * (ranks - 1) / ranks / seconds / 1e9 if seconds else float("nan")


def _needed(plan: RankPlan, cluster: Cluster) -> float:
    """Return the GB per second that a rank must send for communication to take as long as computation."""
    compute = simulate(plan, cluster).compute
    return (plan.sent_by_gathers + plan.sent_by_reductions) / compute / 1e9 if compute else float("nan")


def plain(axes: Axes) -> None:
    """Hide the upper and right spines, and use small tick labels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
