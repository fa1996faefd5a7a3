"""Accelerators by name, with the source of each figure. Does not import PyTorch."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True, kw_only=True)
class Card:
    """An accelerator, or one rank's share of a CPU."""

    name: str
    nbytes: int
    """Bytes of memory."""

    wide: float
    """Peak rate of fp32 matrix products without TF32, in floating-point operations per second."""

    narrow: float
    """Peak rate of dense bf16 matrix products, in floating-point operations per second."""

    bandwidth: float
    """Memory bandwidth in bytes per second."""

    efficiency: float
    """Measured rate of a training step as a fraction of `narrow`. The same fraction of `wide` is assumed."""

    source: str

    def flops(self, *, narrow: bool) -> float:
        """Return the expected operations per second of a training step."""
        return self.efficiency * (self.narrow if narrow else self.wide)


HARDWARE = json.loads(Path(__file__).with_name("hardware.json").read_text())
"""Cards and clusters, with the source of each figure."""

CARDS = {name: Card(name=name, **figures) for name, figures in HARDWARE["cards"].items()}


def memory_of(card: str) -> int:
    """Return the bytes of memory of a card (`H100`), or of an amount (`80GB`, `24GiB`).

    Raises:
        ValueError: `card` is neither a known name nor an amount above 0.
    """
    if card in CARDS:
        return CARDS[card].nbytes
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B", card)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"--card {card!r} is neither an amount (80GB, 24GiB) nor one of {', '.join(CARDS)}")
    return round(float(found[1]) * {**_UNITS, **_BINARY}[found[2] or ""])
