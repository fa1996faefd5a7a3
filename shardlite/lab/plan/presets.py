"""Shapes of models by name. Does not import PyTorch, so the command line rejects a wrong name immediately."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardlite.lab.train.settings import SIZES


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a decoder."""

    kind: Literal["gpt2", "llama"]
    """`gpt2` has layer norms, biases, learned positions, GELU, and one matrix for embedding and head. `llama` has RMS
    norms, no biases, rotary positions, SwiGLU, and separate matrices.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    kv_heads: int | None = None
    """Number of key and value heads. `None` means as many as query heads."""

    hidden: int | None = None
    """Width inside the MLP. `None` means four times `width`."""

    source: str


_SHAPES = json.loads(Path(__file__).with_name("presets.json").read_text())
PRESETS: dict[str, Shape] = {name: Shape(**shape) for name, shape in _SHAPES.items()}


def check_model(model: str) -> None:
    """Check that `model` is the name of a preset, is an existing path, or has the form `module:name`.

    Raises:
        ValueError: `model` is none of these.
    """
    names = [*PRESETS, *(f"demo-{size}" for size in SIZES)]
    if model not in names and not Path(model).exists() and ":" not in model:
        raise ValueError(
            f"--model {model!r} is neither a preset, nor a file, nor module:name; presets are {', '.join(names)}"
        )
