"""Draw the schedule of a collective as an image: one square of ranks and segments per step. Needs matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlite.apps.ring.picture import Frame, addends, brief, frames, headline, shortened, summary
from shardlite.comm import Order, Schedule, Transfer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SQUARES, _COLUMNS = 12, 4  # maximum number of squares per image, and per row
_READABLE = 8  # ranks: with more ranks, cells are too small for text, and only rank 0 has arrows
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#888888")
_LINE, _BETWEEN = 0.2, 0.6  # inches: height of a line of text, and space between squares
_LINES = 4  # maximum lines of text in a cell
_LETTERS = {"+": 0.84, ".": 0.32, "(": 0.39, ")": 0.39}  # widths as fractions of the font size; digits: 0.64
_FRAME = 0.05  # space between the side of a cell and the frame, as a fraction of the side
_MARGIN = 0.36  # space for arrows to the right of a square, as a fraction of its side
_ARROW: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 1.4, "clip_on": False}


def paint(schedule: Schedule, path: Path, node: int = 1) -> None:
    """Write a PNG. A cell has the colour of its segment, and is paler if its sum has fewer summands.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: `path` cannot be written.
    """
    from matplotlib.figure import Figure  # an optional dependency, and slow to import

    told = frames(schedule)
    kept = _kept(len(told))
    rows = -(-len(kept) // _COLUMNS)
    columns = -(-len(kept) // rows)
    title, *above = headline(schedule, node)
    above += [f"Of {len(told) - 1} steps {len(told) - len(kept)} are left out."] if len(kept) < len(told) else []
    arrows = "rank 0 sends" if schedule.world_size > _READABLE else "each rank sends"
    above.append(f"Columns are segments. Sent pieces have a frame; arrows show to which ranks {arrows}.")
    if schedule.world_size <= _READABLE and _shortens(schedule, told):
        above.append(f"{shortened(schedule.world_size)}.")

    side = _side(schedule.world_size)
    head, width = 1.15 + _LINE * len(above), max(0.6 + columns * side * (1 + _MARGIN), 8.0)
    height = head + rows * (side + _BETWEEN) + 0.1
    figure = Figure(figsize=(width, height), dpi=130)
    figure.text(0.2 / width, 1 - 0.35 / height, title, fontsize=13, weight="bold")
    for i, line in enumerate(above):
        figure.text(0.2 / width, 1 - (0.65 + _LINE * i) / height, line, fontsize=9.5)
    below = ",   ".join(" ".join(line.split()) for line in summary(schedule))
    figure.text(0.2 / width, 0.15 / height, below, fontsize=9.5)
    for place, t in enumerate(kept):
        row, column = divmod(place, columns)
        left, bottom = 0.65 + column * side * (1 + _MARGIN), height - head - row * (side + _BETWEEN) - side
        axes = figure.add_axes((left / width, bottom / height, side * (1 + _MARGIN) / width, side / height))
        _square(axes, schedule, told[t], names=column == 0)
        axes.set_title(f"step {t}" if told[t].sent else "end", fontsize=10, loc="left", weight="bold")
    figure.savefig(path, format="png")


def _shortens(schedule: Schedule, told: Sequence[Frame]) -> bool:
    """Return whether any cell shortens a run of neighbouring ranks to the first and the last rank."""
    orders = [order for frame in told for held in frame.held for order in held.values()]
    return any(re.search(r"\d\.\.", _name(order, schedule.world_size)) for order in orders)


def _side(world_size: int) -> float:
    """Return the side of a square in inches."""
    return 3.0 if world_size <= _READABLE // 2 else 4.0


def _kept(count: int) -> list[int]:
    """Return the indices of the drawn frames: all, or the first and the final ones if there are too many."""
    half = _SQUARES // 2
    return list(range(count)) if count <= _SQUARES else [*range(half), *range(count - half, count)]


def _square(axes: Axes, schedule: Schedule, frame: Frame, names: bool) -> None:
    """Draw a row per rank and a column per segment, frames around sent pieces, and arrows to their targets."""
    world_size = schedule.world_size
    sent = {(each.source, each.segment, each.part) for each in frame.sent}
    for place in product(range(world_size), range(world_size), range(schedule.parts)):
        _cell(axes, schedule, frame, place, framed=place in sent)
    readable = world_size <= _READABLE
    for each in frame.sent:
        if readable or each.source == 0:
            _arrow(axes, each, world_size)
    ticks = range(world_size) if readable else range(0, world_size, 8)
    axes.set(xlim=(-0.02, world_size * (1 + _MARGIN)), ylim=(world_size + 0.02, -0.02))
    axes.set_xticks([k + 0.5 for k in ticks], [f"{k}" for k in ticks], fontsize=8)
    axes.set_yticks([r + 0.5 for r in ticks], [f"rank {r}" if names else "" for r in ticks], fontsize=8)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def _cell(axes: Axes, schedule: Schedule, frame: Frame, place: tuple[int, int, int], framed: bool) -> None:
    """Draw the cell of a piece on a rank, at `place` (rank, segment, part)."""
    from matplotlib.patches import Rectangle

    (r, k, part), world_size, height = place, schedule.world_size, 1 / schedule.parts
    order, top = frame.held[r].get((k, part)), r + part * height
    if order is not None:
        adds = schedule.operation == "reduce-scatter"
        strength = 0.15 + 0.65 * addends(order) / world_size if adds else 0.7
        axes.add_patch(Rectangle((k, top), 1, height, facecolor=_colour(k), alpha=strength, linewidth=0))
    axes.add_patch(Rectangle((k, top), 1, height, fill=False, edgecolor="#cccccc", linewidth=0.5))
    if framed:
        thick = 1.6 if world_size <= _READABLE else 0.6
        corner, sides = (k + _FRAME, top + _FRAME), (1 - 2 * _FRAME, height - 2 * _FRAME)
        axes.add_patch(Rectangle(corner, *sides, fill=False, edgecolor="black", linewidth=thick))
    if order is not None and world_size <= _READABLE:
        name, size = _fitted(_name(order, world_size), 72 * _side(world_size) / world_size, height)
        axes.text(k + 0.5, top + height / 2, name, ha="center", va="center", fontsize=size)


def _name(order: Order, world_size: int) -> str:
    return brief(order, world_size, most=4 if world_size <= _READABLE // 2 else 2)


def _fitted(name: str, side: float, height: float) -> tuple[str, float]:
    """Break a sum into lines. Also return the largest font size in points with which the lines fit into a cell.

    Args:
        name: the sum.
        side: width of the cell in points.
        height: height of the cell as a fraction of its width.
    """
    summands = name.replace("+", " +").split()
    found = []
    for count in range(1, min(_LINES, len(summands)) + 1):
        each = -(-len(summands) // count)
        lines = ["".join(summands[i : i + each]) for i in range(0, len(summands), each)]
        widest = max(sum(_LETTERS.get(letter, 0.64) for letter in line) for line in lines)
        highest = side * (height - 2 * _FRAME) / (1.2 * len(lines))
        found.append((min(10.0, 0.85 * side / widest, highest), "\n".join(lines)))
    size, text = max(found, key=lambda pair: pair[0])
    return text, size


def _colour(segment: int) -> str:
    return _COLOURS[segment % len(_COLOURS)]


def _arrow(axes: Axes, sent: Transfer, world_size: int) -> None:
    """Draw an arrow from the row of the source to the row of the target. A longer arrow has a wider bow."""
    from matplotlib.patches import FancyArrowPatch

    down = sent.target > sent.source
    x = world_size * (1.03 if down else 1.06)
    out, into = (0.62, 0.38) if down else (0.45, 0.55)
    bow = (0.35 if abs(sent.target - sent.source) > 1 else 0.6) * (-1 if down else 1)
    ends = (x, sent.source + out), (x, sent.target + into)
    style = {"color": _colour(sent.segment), "connectionstyle": f"arc3,rad={bow}", **_ARROW}
    axes.add_patch(FancyArrowPatch(*ends, **style))
