"""The table and the figure of the rows of `bench.scale`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.scale.simulated import HERE
from shardlite.lab.plots import COLOURS, MARKERS, draw_curves, new_figure, save
from shardlite.lab.table import Row, markdown_table, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEAD = ("scaling", "ranks", "step, ms", "simulated, ms", "simulated / measured", "efficiency", "simulated")
_SHOWN = (1, 8, 64, 512, 4096)
"""Numbers of ranks in the table of a named cluster."""


def render(rows: Sequence[Row]) -> str:
    """Return a table of measured and simulated rows of this machine, and a table for each other cluster."""
    rows = [row for row in rows if row["bench"] == "scale"]
    tables = [_render_here([row for row in rows if row["cluster"] == HERE])]
    for cluster in dict.fromkeys(row["cluster"] for row in rows if row["cluster"] != HERE):
        tables.append(_render_cluster([row for row in rows if row["cluster"] == cluster]))
    return "\n\n".join(tables)


def _render_here(rows: Sequence[Row]) -> str:
    simulated = {(row["mode"], row["ranks"]): row for row in rows if row["kind"] == "simulated"}
    lines = []
    for row in (each for each in rows if each["kind"] == "measured"):
        beside = simulated[row["mode"], row["ranks"]]
        lines.append(
            [
                row["mode"],
                str(row["ranks"]),
                f"{row['ms_p50']:.0f}",
                f"{beside['ms_p50']:.0f}",
                f"{beside['simulated_vs_measured']:.2f}",
                _percent(row),
                _percent(beside),
            ]
        )
    first = rows[0]
    heading = (
        f"ShardLite, stage 3; {first['words']} per rank in weak scaling, for all ranks in strong scaling; "
        f"medians of {first['rounds']} steps; {where(first)}."
    )
    lines.sort(key=lambda line: (line[0] != "weak", int(line[1])))
    return f"{heading}\n\n{markdown_table([_HEAD, *lines])}"


def _render_cluster(rows: Sequence[Row]) -> str:
    lines = []
    for ranks in _SHOWN:
        weak, strong = (
            next((row for row in rows if (row["mode"], row["ranks"]) == (mode, ranks)), None)
            for mode in ("weak", "strong")
        )
        if weak and strong:
            cells = (f"{weak['ms_p50']:.0f}", f"{strong['ms_p50']:.0f}", _percent(weak), _percent(strong))
            lines.append([str(ranks), *cells])
    head = ["ranks", "weak: step, ms", "strong: step, ms", "weak: efficiency", "strong: efficiency"]
    heading = f"Simulated on `{rows[0]['cluster']}`, not measured: {rows[0]['words']} in weak scaling."
    return f"{heading}\n\n{markdown_table([head, *lines])}"


def _percent(row: Row) -> str:
    return f"{100 * row['efficiency']:.0f} %"


def paint(rows: Sequence[Row], path: Path) -> None:
    """Plot efficiency over the number of ranks. Measured points are filled, simulated points are open.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        OSError: If `path` cannot be written.
    """
    figure, both = new_figure(9, 4.2, columns=2, sharey=True)
    for axes, mode in zip(both, ("weak", "strong"), strict=True):
        _paint_mode(axes, [row for row in rows if row["bench"] == "scale" and row["mode"] == mode])
        axes.set_title({"weak": "same batch on each rank", "strong": "same batch on all ranks"}[mode], fontsize=10)
    both[0].set_ylabel("scaling efficiency, %")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    save(figure, path)


def _paint_mode(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw the curves of one mode."""
    curves, styles = {}, list[Mapping[str, Any]]()
    names = list(dict.fromkeys(row["cluster"] for row in rows))
    for number, (name, kind) in enumerate(product(names, ("simulated", "measured"))):
        found = sorted(
            (r for r in rows if (r["cluster"], r["kind"]) == (name, kind)), key=lambda row: int(row["ranks"])
        )
        if not found:
            continue
        colour, measured = COLOURS[number // 2], kind == "measured"
        label = f"{found[0]['model']} on {found[0]['machine'] if name == HERE else name}, {kind}"
        curves[label] = [row["ranks"] for row in found], [100 * row["efficiency"] for row in found]
        style = {"color": colour, "marker": MARKERS[number // 2], "linestyle": "-" if measured else "--"}
        styles.append({**style, "markersize": 7 if measured else 5, "markerfacecolor": colour if measured else "white"})
        if measured:
            _mark_shared(axes, found, colour)
    axes.set_xscale("log", base=2)
    draw_curves(axes, curves, styles, ticks=[4**n for n in range(7)], legend=False, xlabel="ranks", ylim=(0, 115))


def _mark_shared(axes: Axes, rows: Sequence[Row], colour: str) -> None:
    """Annotate the point with the most ranks, if these ranks share cores."""
    last, cores = rows[-1], _cores(rows[-1])
    if last["ranks"] > cores:
        words = f"{last['ranks']} ranks share {cores} cores:\nabout {100 * cores / last['ranks']:.0f} % at most"
        place = last["ranks"], 100 * last["efficiency"]
        axes.annotate(words, place, (8, -4), textcoords="offset points", va="top", fontsize=8, color=colour)


def _cores(row: Row) -> int:
    """Return the number of cores in the description of a machine."""
    return int(row["machine"].rpartition(", ")[2].split()[0])
