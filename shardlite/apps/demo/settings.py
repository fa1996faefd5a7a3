"""Settings of the demo. Light to import: the command line takes its defaults from here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT.

    Raises:
        ValueError: a number is not positive, or the width is not a multiple of twice the heads.
    """

    layers: int = 6
    """Number of blocks."""

    width: int = 384
    """Elements of the hidden state per byte."""

    heads: int = 6
    """Attention heads."""

    context: int = 128
    """Maximum number of bytes per sequence."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"GPT {name} must be at least 1, got {value}")
        if self.width % (2 * self.heads):
            raise ValueError(f"GPT width must be a multiple of twice the heads: width {self.width}, heads {self.heads}")


SIZES = {
    "tiny": GPTConfig(layers=2, width=64, heads=2, context=64),
    "demo": GPTConfig(),
    "gpt2": GPTConfig(layers=12, width=768, heads=12, context=1024),
}
"""Models by name: 0.1, 10.7 and 85 million parameters."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of the demo.

    Raises:
        ValueError: a number is out of its range.
    """

    gpt: GPTConfig = field(default_factory=GPTConfig)
    """The model."""

    stage: int = 3
    """0: nothing is sharded; 1: optimizer state; 2: gradients, too; 3: parameters, too."""

    steps: int = 180
    """Optimizer steps."""

    batch: int = 4
    """Sequences per rank in one forward."""

    accumulate: int = 1
    """Forwards and backwards per optimizer step."""

    lr: float = 1e-3
    """Peak learning rate, reached after a tenth of the steps; a cosine decays it to a tenth."""

    seed: int = 0
    """Seed of the initial weights and of the batches."""

    data: Path | None = None
    """A text file or a folder of text files; `None` is Python's own standard library."""

    out: Path = Path("outputs")
    """The folder for the loss curve."""

    checkpoints: Path | None = None
    """The folder for checkpoints. The run goes on from the newest one there; `None` saves nothing."""

    save_every: int = 20
    """Steps between two checkpoints."""

    redundancy: str | None = None
    """"neighbour": copies in memory after each step, from which ranks that start again go on."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "lr", "save_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.redundancy is not None and self.checkpoints is None:
            raise ValueError("redundancy needs a folder for checkpoints: copies in memory do not outlive the launcher")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
