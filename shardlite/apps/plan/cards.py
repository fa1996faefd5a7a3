"""Cards by name, with the source of each figure. Does not import PyTorch."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True, kw_only=True)
class Card:
    """One accelerator, or a rank's part of a CPU."""

    name: str
    nbytes: int
    """Memory."""

    wide: float
    """Peak of fp32 matrix products, in floating-point operations per second, without TF32."""

    narrow: float
    """Peak of bf16 matrix products, dense."""

    bandwidth: float
    """Memory bandwidth, bytes per second."""

    efficiency: float
    """Measured operations per second of a training step, as a fraction of `narrow`. The same is assumed for `wide`."""

    source: str

    def flops(self, *, narrow: bool) -> float:
        """Return the expected operations per second of a training step."""
        return self.efficiency * (self.narrow if narrow else self.wide)


HARDWARE = json.loads(Path(__file__).with_name("hardware.json").read_text())
"""Cards and clusters, with the source of each figure."""

CARDS = {name: Card(name=name, **figures) for name, figures in HARDWARE["cards"].items()}


def memory_of(card: str) -> int:
    """Return the bytes of a card by name (`H100`) or of an amount (`80GB`, `24GiB`).

    Raises:
        ValueError: `card` is neither.
    """
    if card in CARDS:
        return CARDS[card].nbytes
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B", card)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"--card {card!r} is neither an amount (80GB, 24GiB) nor one of {', '.join(CARDS)}")
    return round(float(found[1]) * {**_UNITS, **_BINARY}[found[2] or ""])
