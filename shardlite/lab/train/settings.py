"""Settings of the demo. The command line takes its defaults from this file, which does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

BYTE_VALUES = 256


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT.

    Raises:
        ValueError: a number is not positive, or the width is not a multiple of twice the number of heads.
    """

    layers: int = 6
    """Number of blocks."""

    width: int = 384
    """Number of elements of the hidden state per byte."""

    heads: int = 6
    """Number of attention heads."""

    context: int = 128
    """Maximum number of bytes per sequence."""

    kind: Literal["bytes", "gpt2", "llama"] = "bytes"
    """`bytes` has rotary positions, GELU, and one matrix for embedding and head. `gpt2` has learned positions instead.
    `llama` has RMS norms, no biases, rotary positions, SwiGLU, and separate matrices.
    """

    vocabulary: int = BYTE_VALUES
    kv_heads: int | None = None
    """Number of key and value heads. `None` means as many as query heads."""

    hidden: int | None = None
    """Width inside the MLP. `None` means four times `width`."""

    source: str = ""
    """Where the shape was published."""

    @property
    def inner(self) -> int:
        """Width inside the MLP."""
        return self.hidden or 4 * self.width

    @property
    def biases(self) -> bool:
        """Whether matrices have biases."""
        return self.kind != "llama"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPT {name} must be at least 1, got {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ValueError(f"GPT width must be a multiple of twice the heads: width {self.width}, heads {self.heads}")


SIZES = {
    "tiny": GPTConfig(layers=2, width=64, heads=2, context=64),
    "demo": GPTConfig(),
    "gpt2": GPTConfig(layers=12, width=768, heads=12, context=1024),
}
"""Shapes of models by name. The models have 0.1, 10.7 and 85 million parameters."""

OPTIMIZERS = (
    *("adamw", "muon", "torch.AdamW", "torch.Adam", "torch.NAdam", "torch.RAdam", "torch.Adamax", "torch.Adagrad"),
    *("torch.Adadelta", "torch.SGD", "torch.ASGD", "torch.RMSprop", "torch.Rprop"),
)
"""Names of optimizers. Each other optimizer has an import path, and is stepped by `shardlite.WholeParameters`."""

RATES = {"muon": 8e-3}
"""Default peak learning rates of the command line, for optimizers whose default is not that of `Settings`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run of the demo.

    Raises:
        ValueError: a number is out of its range, or options cannot be combined.
    """

    gpt: GPTConfig = field(default_factory=GPTConfig)
    """The model."""

    stage: int = 3
    """Stage of ZeRO. 0: nothing is sharded; 1: the optimizer state; 2: also gradients; 3: also parameters."""

    steps: int = 180
    """Number of optimizer steps."""

    batch: int = 4
    """Number of sequences per rank in one forward."""

    accumulate: int = 1
    """Number of forwards and backwards per optimizer step."""

    lr: float = 1e-3
    """Peak learning rate. A linear warmup reaches the peak after a tenth of the steps. Then a cosine lowers the rate to
    a tenth of the peak.
    """

    precision: str = "fp32"
    """Dtype of forward and backward: fp32, bf16, fp16 or fp64. Weights are created in fp32, so fp32 needs no casts.

    With fp16, a gradient scaler is used.
    """

    reduce: str = "fp32"
    """Dtype in which gradients are summed: fp32, bf16 or fp16."""

    master: str = "fp32"
    """Format of the weights that the optimizer updates: fp32, or split24 (a bf16 part and 8 more bits)."""

    optimizer: str = "adamw"
    """One of `OPTIMIZERS`, or the import path of an optimizer class, such as "torch.optim.Adafactor".

    "adamw" is ShardLite's. "muon" steps the matrices of the blocks, and AdamW the other parameters.
    """

    adamw_lr: float | None = None
    """Peak learning rate of AdamW beside "muon" or a class with an import path. AdamW steps the parameters that are not
    matrices of blocks. `None` selects `lr` for "muon". A class with an import path then steps all parameters itself.
    """

    state: str = "fp32"
    """Format of the moments of "adamw", and of AdamW beside "muon": fp32, bf16 or int8."""

    offload: bool | float | None = None
    """Which states of "adamw" are kept in host memory, as in `ShardLite`. No effect on CPUs."""

    in_backward: bool = False
    """Whether "adamw" updates the weights during the backward, without clipping the gradients."""

    transport: str = "auto"
    """Transport of messages, as in `shardlite.Route`."""

    activation_checkpointing: bool = False
    """Whether blocks are recomputed in the backward."""

    fit: str | None = None
    """Memory of a rank, such as "8GB". `shardlite.fit` then chooses stage, formats, checkpointing and micro-batch."""

    seed: int = 0
    """Seed of the initial weights and of the batches."""

    data: Path | None = None
    """A text file or a folder of text files. `None` selects the source of Python's standard library."""

    out: Path = Path("outputs")
    """Folder for the loss curve and the log. The command line also saves checkpoints in this folder by default."""

    log: str | None = None
    """Format in which the values of each step are written during the run: csv or tensorboard."""

    checkpoints: Path | None = None
    """Folder for checkpoints. The run resumes from the newest checkpoint in the folder. `None` saves nothing."""

    save_every: int = 20
    """Number of steps between two checkpoints."""

    redundancy: str | None = None
    """Copies of the run in memory, from which restarted ranks can resume.

    "neighbour" makes a copy after each step. `None` copies nothing.
    """

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "lr", "save_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.redundancy is not None and self.checkpoints is None:
            raise ValueError(
                "redundancy needs checkpoints: give --checkpoints FOLDER or --save-every N, because copies in memory "
                "do not outlive the launcher"
            )
        self._check_optimizer()
        if self.master == "split24" and self.precision != "bf16":
            raise ValueError(
                f"master split24 keeps weights as bf16 plus 8 bits, so it requires precision bf16, got {self.precision}"
            )
        if self.in_backward and self.precision == "fp16":
            raise ValueError("in_backward does not support precision fp16, whose gradients are scaled: choose bf16")

    def _check_optimizer(self) -> None:
        if self.optimizer not in OPTIMIZERS and "." not in self.optimizer:
            raise ValueError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}, or the import path of a class, such as "
                f"torch.optim.Adafactor; got {self.optimizer}"
            )
        if self.adamw_lr is not None and not self.adamw_lr > 0:
            raise ValueError(f"adamw_lr must be positive, got {self.adamw_lr}")
        whole = ["muon", *({self.optimizer} - {*OPTIMIZERS})]
        supported = {
            "state": ["adamw", "muon"],
            "master": ["adamw", *whole],
            "offload": ["adamw"],
            "in_backward": ["adamw"],
            "adamw_lr": whole,
            "fit": ["adamw"],
        }
        for name, optimizers in supported.items():
            value = getattr(self, name)
            if value != getattr(Settings, name) and self.optimizer not in optimizers:
                raise ValueError(
                    f"{name} is {str(value).lower()}, which requires the optimizer {' or '.join(optimizers)}; "
                    f"got {self.optimizer}"
                )
