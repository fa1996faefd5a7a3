"""Cards by name, with the source of each figure. Does not import PyTorch."""

from __future__ import annotations

import re
from dataclasses import dataclass

DATASHEETS = "vendor's data sheet"

_GB = 10**9

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


CARDS = {
    card.name: card
    for card in (
        Card(
            name="A100-80GB",
            nbytes=80 * _GB,
            wide=19.5e12,
            narrow=312e12,
            bandwidth=2039e9,
            efficiency=0.642,
            source=f"{DATASHEETS}, nvidia-a100-datasheet-us-nvidia-1758950-r4; efficiency of a 7B model, 2048 tokens, "
            "fully sharded over 8 cards: github.com/mosaicml/llm-foundry, scripts/train/benchmarking (64.23 %)",
        ),
        Card(
            name="A100-40GB",
            nbytes=40 * _GB,
            wide=19.5e12,
            narrow=312e12,
            bandwidth=1555e9,
            efficiency=0.642,
            source=f"{DATASHEETS}, nvidia-a100-datasheet; efficiency as for 80 GB",
        ),
        Card(
            name="H100",
            nbytes=80 * _GB,
            wide=67e12,
            narrow=989.4e12,
            bandwidth=3350e9,
            efficiency=0.464,
            source=f"{DATASHEETS} of the H100 SXM (bf16 1,979 teraFLOPS with sparsity, half without); efficiency of "
            "a 7B model, 2048 tokens, fully sharded over 8 cards: github.com/mosaicml/llm-foundry, "
            "scripts/train/benchmarking (46.44 %)",
        ),
        Card(
            name="H200",
            nbytes=141 * _GB,
            wide=67e12,
            narrow=989.4e12,
            bandwidth=4800e9,
            efficiency=0.464,
            source=f"{DATASHEETS} of the H200 SXM; efficiency of the H100, which has the same cores",
        ),
        Card(
            name="CPU core",
            nbytes=8 * _GB,
            wide=69.4e9,
            narrow=69.4e9,
            bandwidth=10e9,
            efficiency=1.0,
            source="one core of an AMD EPYC: the step without communication in bench/results/step-gpt-2ranks.jsonl "
            "takes 1.010 s for 70.1 billion operations, in fp32; bf16, memory and bandwidth are assumed",
        ),
    )
}


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
