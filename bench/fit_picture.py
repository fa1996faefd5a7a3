"""Draw the picture of docs/fit.md from the tables on the page: `python -m bench.fit_picture`.

In: the console blocks of the page, which a test compares with what `shardlite plan` prints. Out: `docs/fit.svg`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from shardlite.lab.plots import EDGES, STYLES, new_figure, save

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "fit.md", ROOT / "docs" / "fit.svg"

_BLOCK = re.compile(r"^\$ shardlite plan (?P<options>.*)\n(?P<names>ranks .*)\n(?P<values>.*)\n", re.MULTILINE)
_HOST = {"facecolor": "#FFFFFF", "hatch": "//"}


def examples(page: str) -> dict[str, list[dict[str, float]]]:
    """Return the columns of GB in the tables without offload and with it, by a headline for each pair of tables."""
    found: dict[str, list[dict[str, float]]] = {}
    for block in _BLOCK.finditer(page):
        options = block["options"].removesuffix(" --offload")
        names, values = (re.split(r"\s{2,}", block[part].strip()) for part in ("names", "values"))
        row = dict(zip(names, values, strict=True))
        found.setdefault(options, []).append({name: float(row[name]) for name in (*STYLES, "on host") if name in row})
    return {_headline(options): tables for options, tables in found.items() if len(tables) == 2}


def _headline(options: str) -> str:
    given = dict(re.findall(r"--(\S+) ([^-\s]\S*)", options))
    formats = [given.get("master", "fp32"), given.get("state", "fp32")]
    return f"{given['model']}, {given['ranks']} x {given['card']}\nweights {formats[0]}, moments {formats[1]}"


def draw(page: str, path: Path) -> Path:
    """Draw the GB of each example by purpose: without offload, and with it on the GPU and on the host.

    A line shows the memory of the card.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: `path` cannot be written.
    """
    found = examples(page)
    figure, every = new_figure(9.6, 3.2, 1, len(found))
    for axes, (headline, tables) in zip(every, found.items(), strict=True):
        below = [0.0, 0.0]
        for title in STYLES:
            sizes = [table[title] for table in tables]
            axes.bar(("all on\nthe GPU", "offload,\nGPU"), sizes, 0.7, below, label=title, **STYLES[title], **EDGES)
            below = [a + b for a, b in zip(below, sizes, strict=True)]
        axes.bar(["offload,\nhost"], [tables[1]["on host"]], 0.7, label="states on the host", **_HOST, **EDGES)
        card = float(re.findall(r"(\d+)GB", headline)[0])
        axes.plot((-0.5, 1.5), (card, card), color="black", linestyle="--", linewidth=1.2, label="card")
        axes.set_title(headline, fontsize=8, loc="left")
        axes.set_ylim(0, 1.08 * max(card, *below))
    every[0].set_ylabel("GB per rank", fontsize=8)
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return save(figure, path)


def main(arguments: Sequence[str]) -> int:
    """Draw the picture, by default in its place."""
    print(f"wrote {draw(PAGE.read_text(), Path(*arguments) if arguments else PICTURE)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
