"""Rows as plots: bars by purpose, and bytes against the number of ranks. Needs matplotlib.

Colours are those of Wong 2011 (Nature Methods 8, 441), with hatches and markers that can be told apart in print.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlite.apps.footprint.measure import Row
from shardlite.apps.footprint.systems import SYSTEMS
from shardlite.apps.footprint.table import model_stem, run_stem, runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#777777")
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "")
_GREYS = ("#bbbbbb", "#e5e5e5", "#888888")
_MARKERS = "os^Dv<>P"
_REST = ("tensors of systems that keep no account", "activations, gradients on their way", "not in tensors")

_NO_TENSORS = ("mailboxes", "idle shared memory")
"""Purposes of memory that no tensor has."""

_VISIBLE = 0.02
"""The least part of the longest bar that has a colour of its own; smaller purposes are put together."""


def paint(rows: Sequence[Row], folder: Path, *, kind: str = "png") -> list[Path]:
    """Write the plots of some rows to a folder, and return their paths: bars for each run, lines for each model.

    Args:
        rows: of any number of models, ranks and systems.
        folder: made if it does not exist.
        kind: `png` or `svg`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the folder cannot be written to.
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


def _paint_bars(rows: Sequence[Row], file: Path) -> None:
    """Draw a bar for each system: its tensors at their peak by purpose, then what else the process held."""
    from matplotlib.figure import Figure

    purposes = _purposes(rows)
    parts = [*purposes, *_REST]
    figure = Figure(figsize=(8, 1.2 + 0.36 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(rows)
    colours = [*_COLOURS[: len(purposes)], *_GREYS]
    hatches = [*_HATCHES[: len(purposes)], *("" for _ in _REST)]
    for part, colour, hatch in zip(parts, colours, hatches, strict=True):
        sizes = [_part(row, part, purposes) / 2**20 for row in rows]
        style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        axes.barh([row["system"] for row in rows], sizes, left=left, label=part, **style)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("MiB per rank at the peak of a step", fontsize=8)
    axes.set_title(f"{rows[0]['words']}, {rows[0]['ranks']} ranks", fontsize=9, loc="left")
    _plain(axes)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, metadata=_dateless(file))


def _purposes(rows: Sequence[Row]) -> list[str]:
    """Return the purposes that have a colour: the largest ones, in the order in which `memory()` reports them."""
    most: dict[str, int] = {}
    for row in rows:
        for purpose, nbytes in row["purposes"].items():
            most[purpose] = max(most.get(purpose, 0), nbytes)
    least = _VISIBLE * max(row["pss_bytes"] for row in rows)
    largest = sorted(most, key=lambda purpose: -most[purpose])[: len(_COLOURS) - 1]
    visible = [purpose for purpose in most if purpose in largest and most[purpose] >= least]
    return [*visible, "other purposes"] if len(visible) < len(most) else visible


def _part(row: Row, part: str, purposes: Sequence[str]) -> int:
    """Return the bytes of one part of a bar."""
    held: dict[str, int] = row["purposes"]
    idle = sum(held.get(each, 0) for each in _NO_TENSORS)
    if part == _REST[2]:
        return max(0, int(row["pss_bytes"]) - int(row["tensor_bytes"]) - idle)
    if part in _REST:
        tensors = int(row["tensor_bytes"]) - sum(held.values()) + idle
        return tensors if part == _REST[bool(held)] else 0
    if part == "other purposes":
        return sum(nbytes for purpose, nbytes in held.items() if purpose not in purposes)
    return held.get(part, 0)


def _paint_ranks(rows: Sequence[Row], file: Path) -> None:
    """Draw bytes in tensors against ranks: measured as points, predicted as lines, a panel for each kind of system."""
    from matplotlib.figure import Figure

    panels = dict(_panels(rows))
    figure = Figure(figsize=(3.4 * len(panels) + 0.6, 4.6), dpi=150, layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, systems) in zip(every, panels.items(), strict=True):
        for i, system in enumerate(systems):
            _draw_system(axes, [row for row in rows if row["system"] == system], i)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("ranks", fontsize=8)
        axes.set_xscale("log")
        ticks = sorted({row["ranks"] for row in rows})
        axes.set_xticks(ticks, [str(each) for each in ticks])
        axes.minorticks_off()
        axes.grid(color="#dddddd", linewidth=0.6)
        _plain(axes)
        axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    every[0].set_ylim(0, 1.08 * max(row["tensor_bytes"] for row in rows) / 2**20)
    every[0].set_ylabel("MiB in tensors per rank at the peak of a step", fontsize=8)
    figure.suptitle(f"{rows[0]['words']}: points are measured, lines are predicted", fontsize=9)
    figure.savefig(file, metadata=_dateless(file))


def _draw_system(axes: Axes, rows: Sequence[Row], place: int) -> None:
    """Draw the points of the first system largest, so that points at the same place are seen one inside the other."""
    colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
    rows = sorted(rows, key=lambda row: int(row["ranks"]))
    measured = [row["tensor_bytes"] / 2**20 for row in rows]
    points = {"markersize": max(3, 9 - place), "markerfacecolor": "none", "label": rows[0]["system"]}
    axes.plot([row["ranks"] for row in rows], measured, marker, color=colour, **points)
    known = [row for row in rows if "predicted_bytes" in row]
    predicted = [row["predicted_bytes"] / 2**20 for row in known]
    axes.plot([row["ranks"] for row in known], predicted, color=colour, linewidth=0.9)


def _panels(rows: Sequence[Row]) -> Iterator[tuple[str, list[str]]]:
    """Yield the systems of each panel."""
    names = list(dict.fromkeys(row["system"] for row in rows))
    stages = [name for name in names if name.startswith("stage")]
    formats = [name for name in names if name not in stages and SYSTEMS[name].setting is not None]
    others = [name for name in names if name not in (*stages, *formats)]
    panels = {"other systems": others, "ShardLite": stages, "ShardLite, stage 3, other formats": formats}
    yield from ((title, systems) for title, systems in panels.items() if systems)


def _dateless(file: Path) -> dict[str, None]:
    """Leave the date out of an SVG, so that equal rows give equal files."""
    return {"Date": None} if file.suffix == ".svg" else {}


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
