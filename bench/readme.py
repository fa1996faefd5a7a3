"""Measure the rows behind the picture of README.md anew, and draw the picture.

    python -m bench.readme            measures in under ten minutes, then draws
    python -m bench.readme --draw     only draws

Rows go to `bench/results/readme.jsonl`. Each row names the measured commit (`commit`), so that a test can compute the
age of the row. The picture is `docs/readme.svg`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardlite.lab import suite
from shardlite.lab.plots import new_figure
from shardlite.lab.suite import Part
from shardlite.lab.table import RESULTS, Row, read_rows, system_name, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS, PICTURE = RESULTS / "readme.jsonl", suite.ROOT / "docs" / "readme.svg"

_PARTS = (
    Part(
        "readme-step",
        "-m bench.step --ranks 2 --model gpt --steps 15 --systems floor ddp fsdp2 stage3",
        300,
        "-m bench.step --ranks 2 --model tiny --steps 1 --systems floor ddp fsdp2 stage3",
    ),
    Part(
        "readme-footprint",
        "-m bench.footprint --ranks 2 --model gpt2 --systems ddp fsdp2 stage3 compact",
        420,
        "-m bench.footprint --ranks 2 --model tiny --systems ddp fsdp2 stage3 compact",
    ),
)
_COLOURS = {"ddp": "#999999", "fsdp2": "#56B4E9"}  # others: ShardLite


def main(arguments: Sequence[str]) -> int:
    """Measure unless told only to draw. Return 1 if a bench failed; then nothing is drawn."""
    parser = argparse.ArgumentParser(prog="python -m bench.readme", description="rows and picture of the README")
    parser.add_argument("--draw", action="store_true", help="only draw the picture, from existing rows")
    parser.add_argument("--dry", action="store_true", help="measure at toy size")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the rows (%(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="(%(default)s)")
    options = parser.parse_args(arguments)
    if not options.draw:
        ended = suite.run(_PARTS, options.rows, 600, dry=options.dry)
        if any(row["status"] != "ok" for row in ended):
            return 1
    draw(read_rows([options.rows]), options.picture)
    return 0


def bars(rows: Sequence[Row], bench: str) -> dict[str, float]:
    """Return the bar of each system: milliseconds of a step, or MiB of process memory at its peak."""
    chosen = [row for row in rows if row["bench"] == bench and row["system"] != "floor"]
    return {row["system"]: row["ms_p50"] if bench == "step" else row["pss_bytes"] / 2**20 for row in chosen}


def source(rows: Sequence[Row]) -> str:
    """Return where the rows were measured, and at which commit."""
    first = next(row for row in rows if row["bench"] == "step")
    return f"{first['ranks']} CPU ranks, {first['threads']} thread each; {where(first)}, commit {first['commit']}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw step time and memory of a rank as bars with their numbers.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: `path` cannot be written.
    """
    import matplotlib  # an optional dependency, and slow to import

    figure, both = new_figure(9.6, 2.4, 1, 2)
    for axes, bench, title in zip(both, ("step", "footprint"), ("step time, ms", "memory of a rank, MiB"), strict=True):
        _draw_bars(axes, bars(rows, bench))
        words = next(row["words"] for row in rows if row["bench"] == bench)
        axes.set_title(f"{title}\n{words}", fontsize=7, loc="left", x=-0.1)
    figure.supxlabel(source(rows), fontsize=7, color="#555555")
    with matplotlib.rc_context({"svg.hashsalt": "readme", "svg.fonttype": "none"}):  # equal rows give equal files
        figure.savefig(path, metadata={"Date": None})


def _draw_bars(axes: Axes, found: dict[str, float]) -> None:
    names = [system_name(name) for name in found]
    axes.barh(names, list(found.values()), 0.7, color=[_COLOURS.get(name, "#D55E00") for name in found])
    for place, size in enumerate(found.values()):
        axes.annotate(f"{size:.0f}", (size, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, 1.1 * max(found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
