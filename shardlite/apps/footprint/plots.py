"""Rows as plots: bars by purpose, and bytes against the number of ranks. Needs matplotlib.

Colours are those of Wong 2011 (Nature Methods 8, 441), with hatches and markers that can be told apart in print. A
purpose has the colour that it has in the pictures of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from shardlite.apps.footprint.measure import Row
from shardlite.apps.footprint.systems import SYSTEMS
from shardlite.apps.footprint.table import model_stem, run_stem, runs
from shardlite.apps.plan.plots import EDGES, STYLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#777777")
_MARKERS = "os^Dv<>P"

_PURPOSES = {
    "parameters": STYLES["weights"],
    "optimizer state": STYLES["optimizer"],
    "gradients": STYLES["gradients"],
    "gradient buckets": STYLES["buckets"],
    "gather buffers": STYLES["gathered"],
    "idle shared memory": ("#D55E00", "++"),
}
_OTHERS, _NO_ACCOUNT = "other purposes", "tensors of systems that keep no account"
_ON_THEIR_WAY, _NOT_IN_TENSORS = "activations, gradients on their way", "not in tensors"
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
"""The least part of the longest bar that has room for its number."""

_DARK = ("#0072B2", "#009E73", "#333333")
"""Colours on which numbers are white."""


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
    """Draw a bar for each system: its tensors at their peak by purpose, then what else the process held, in MiB."""
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
    _plain(axes)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    figure.savefig(file, metadata=_dateless(file))


def _number(axes: Axes, middle: float, place: int, size: float, colour: str) -> None:
    """Write a number into its part of a bar, where it interrupts the hatch."""
    box = {"boxstyle": "square,pad=0.15", "facecolor": colour, "linewidth": 0}
    ink = "white" if colour in _DARK else "black"
    axes.text(middle, place, f"{size:.0f}", ha="center", va="center", fontsize=7, color=ink, bbox=box)


def _part(row: Row, part: str) -> int:
    """Return the bytes of one part of a bar."""
    held: dict[str, int] = row["purposes"]
    idle = sum(held.get(each, 0) for each in _NO_TENSORS)
    if part == _NOT_IN_TENSORS:
        return max(0, int(row["pss_bytes"]) - int(row["tensor_bytes"]) - idle)
    if part in (_NO_ACCOUNT, _ON_THEIR_WAY):
        tensors = int(row["tensor_bytes"]) - sum(held.values()) + idle
        return tensors if part == (_ON_THEIR_WAY if held else _NO_ACCOUNT) else 0
    if part == _OTHERS:
        return sum(nbytes for purpose, nbytes in held.items() if purpose not in _PURPOSES)
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
