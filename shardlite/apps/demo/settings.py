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


PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
"""What forward and backward can run in. The weights are made in fp32, so "fp32" casts nothing."""

OPTIMIZERS = (
    "adamw",
    *(f"torch.{name}" for name in ("AdamW", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "SGD", "ASGD")),
    *("torch.RMSprop", "torch.Rprop"),
)
"""That of ShardLite, and those of `torch.optim` that step each element by itself."""

TRANSPORTS = ("auto", "shared_memory", "symmetric_memory", "p2p", "collectives")
"""Names of transports, see `shardlite.Route`."""

LOGS = ("csv", "tensorboard")
"""Formats of the values of each step."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of the demo.

    Raises:
        ValueError: a number is out of its range, or options do not go together.
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

    precision: str = "fp32"
    """What forward and backward run in, one of `PRECISIONS`. fp16 has a gradient scaler."""

    reduce: str = "fp32"
    """What gradients are summed in: fp32, bf16 or fp16."""

    master: str = "fp32"
    """Format of the weights that are stepped: fp32, or split24, which is a bf16 part and 8 bits more."""

    optimizer: str = "adamw"
    """One of `OPTIMIZERS`."""

    state: str = "fp32"
    """Format of the moments of "adamw": fp32, bf16 or int8."""

    in_backward: bool = False
    """Whether "adamw" steps in the backward, without clipping."""

    transport: str = "auto"
    """How messages travel, see `shardlite.Route`."""

    activation_checkpointing: bool = False
    """Whether blocks are recomputed in the backward."""

    seed: int = 0
    """Seed of the initial weights and of the batches."""

    data: Path | None = None
    """A text file or a folder of text files; `None` is Python's own standard library."""

    out: Path = Path("outputs")
    """The folder for the loss curve, the log and, unless `checkpoints` names another one, the checkpoints."""

    log: str | None = None
    """One of `LOGS`: write the values of each step while the run goes on."""

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
            raise ValueError(
                "redundancy needs checkpoints: give --checkpoints FOLDER or --save-every N, because copies in memory "
                "do not outlive the launcher"
            )
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        self._check_formats()

    def _check_formats(self) -> None:
        ours = self.optimizer == "adamw"
        for name, wanted in (("state", "fp32"), ("master", "fp32"), ("in_backward", False)):
            if getattr(self, name) != wanted and not ours:
                raise ValueError(
                    f"{name} is {_told(getattr(self, name))}, which requires the optimizer adamw; got {self.optimizer}"
                )
        if self.master == "split24" and self.precision != "bf16":
            raise ValueError(
                f"master split24 keeps weights as bf16 and 8 bits more: requires precision bf16, got {self.precision}"
            )
        if self.in_backward and self.precision == "fp16":
            raise ValueError("in_backward does not go with precision fp16, whose gradients are scaled: take bf16")


def _told(value: object) -> str:
    """Return a value as a user writes it."""
    return "true" if value is True else str(value)
