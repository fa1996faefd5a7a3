"""Plots of a plan: memory, scaling and bandwidth. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlite.lab.plan.report import Group, by_column, words
from shardlite.lab.plots import EDGES, STYLES, draw_curves, new_figure, save
from shardlite.plan import Cluster, Operation, Planner, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZES = [10 ** (6 + i / 8) for i in range(41)]
"""Numbers of parameters, from a million to a hundred billion."""


def paint(
    planner: Planner, groups: Sequence[Group], cluster: Cluster | None, card: int | None, folder: Path
) -> list[Path]:
    """Write the plots of the groups to a folder and return the paths. Two of the plots require a cluster.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the folder is not writable.
    """
    figures = {"memory": _memory(planner, groups, card)}
    if cluster is not None:
        figures["scaling"] = _scaling(planner, groups, cluster)
        figures["bandwidth"] = _bandwidth(planner, groups[0], cluster)
    return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def _memory(planner: Planner, groups: Sequence[Group], card: int | None) -> Figure:
    """Draw a bar per number of ranks for each group, stacked by purpose, with a table of the parts below."""
    figure, every = new_figure(8, 0.6 + 4.4 * len(groups), len(groups))
    for axes, group in zip(every, groups, strict=True):
        names = [f"{plan.setting.world_size}" for plan in group.plans]
        below = [0.0] * len(names)
        _write_line(axes, 0, "ranks", names)
        bars = [by_column(plan.by_purpose) for plan in group.plans]
        for line, title in enumerate(STYLES):
            sizes = [bar[title] / 1e9 for bar in bars]
            axes.bar(names, sizes, bottom=below, **STYLES[title], **EDGES)
            _write_line(axes, len(STYLES) - line, title, [f"{size:.2f}" for size in sizes])
            below = [a + b for a, b in zip(below, sizes, strict=True)]
        _write_line(axes, len(STYLES) + 1, "peak", [f"{size:.2f}" for size in below])
        axes.set_xticks([])
        if card is not None:
            axes.axhline(card / 1e9, color="black", linestyle="--", linewidth=1.2)
            place: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": 8}
            axes.annotate(f"card, {card / 1e9:g} GB", (1, card / 1e9), (0, 2), ("axes fraction", "data"), **place)
            axes.set_ylim(0, 1.1 * max(card / 1e9, *below))
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_ylabel("GB per rank at the peak", fontsize=9)
        axes.set_title(words(group.setting), fontsize=8, loc="left")
    figure.suptitle(f"{planner.source.name}, {planner.source.words}", fontsize=10)
    return figure


def _write_line(axes: Axes, line: int, title: str, cells: Sequence[str]) -> None:
    """Write a line of the table below the bars, with its title and the style of its part."""
    down = -(10 + 13 * line)  # points
    options: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8, "annotation_clip": False}
    axes.annotate(title, (0, 0), (-22, down), "axes fraction", ha="right", **options)
    for place, cell in enumerate(cells):
        axes.annotate(cell, (place, 0), (0, down), ("data", "axes fraction"), ha="center", **options)
    if title in STYLES:
        box = {"boxstyle": "square,pad=0", **STYLES[title], **EDGES}
        axes.annotate(" " * 6, (0, 0), (-4, down), "axes fraction", ha="right", bbox=box, **options)


def _scaling(planner: Planner, groups: Sequence[Group], cluster: Cluster) -> Figure:
    """Draw efficiencies against the number of ranks, with Amdahl's law and the ideal."""
    figure, every = new_figure(8, 0.6 + 3.0 * len(groups), len(groups))
    for axes, group in zip(every, groups, strict=True):
        ranks = [each.world_size for each in group.curve]
        curves = {
            "same batch on each rank": [100 * each.weak for each in group.curve],
            "same batch on all ranks together": [100 * each.strong for each in group.curve],
            "the same, nothing overlapped (Amdahl's law)": [100 * each.amdahl for each in group.curve],
        }
        axes.set_xscale("log", base=2)
        drawn = {label: (ranks, values) for label, values in curves.items()}
        labels: dict[str, Any] = {"ylim": (0, 112), "ylabel": "scaling efficiency, %", "legend": axes is every[0]}
        draw_curves(axes, drawn, level=("ideal", 100), ticks=ranks, **labels)
        axes.set_title(words(group.setting), fontsize=8, loc="left")
    every[-1].set_xlabel("ranks")
    figure.suptitle(f"{planner.source.name} on {cluster.name}, predicted, not measured", fontsize=10)
    return figure


def _bandwidth(planner: Planner, group: Group, cluster: Cluster) -> Figure:
    """Draw the bandwidth of gathers and reductions against the size of a model with as many units as this model."""
    plan = group.plans[-1]
    ranks, units = plan.setting.world_size, len(plan.budget.units)
    figure, (axes,) = new_figure(8, 4.4)
    itemsizes: dict[Operation, float] = {
        "all-gather": plan.budget.units[-1].full / max(1, planner.numel / units),
        "reduce-scatter": plan.setting.precision.reduce.itemsize,
    }
    curves = {
        f"{operation} of a unit, {ranks} ranks": (
            _SIZES,
            [_rate(cluster, operation, size / units * itemsize, ranks) for size in _SIZES],
        )
        for operation, itemsize in itemsizes.items()
    }
    compute = simulate(plan, cluster).compute
    needed = (plan.sent_by_gathers + plan.sent_by_reductions) / compute / 1e9 if compute else float("nan")
    here = f"{planner.source.name}, {planner.numel / 1e9:.3g}e9"
    axes.axvline(planner.numel, color="#999999", linestyle=":", label=here)
    level = f"needed to hide behind this batch, {needed:.3g} GB/s", needed
    labels: dict[str, Any] = {"xlabel": f"parameters of a model in {units} units", "ylabel": "GB/s sent per rank"}
    draw_curves(axes, curves, level=level, xscale="log", yscale="log", **labels)
    axes.set_title(f"{cluster.name}, predicted, not measured", fontsize=10, loc="left")
    return figure


def _rate(cluster: Cluster, operation: Operation, nbytes: float, ranks: int) -> float:
    """Return the GB per second that a rank sends in one operation on a buffer of `nbytes`."""
    seconds = cluster.seconds(operation, round(nbytes), ranks)
    return nbytes * (ranks - 1) / ranks / seconds / 1e9 if seconds else float("nan")
