"""Models by name. Does not import PyTorch, so that the command line rejects a wrong name at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardlite.apps.demo.settings import SIZES


class SourceError(ValueError):
    """The model does not exist, or cannot be created or called with fake tensors."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a decoder."""

    kind: Literal["gpt2", "llama"]
    """`gpt2`: layer norm, biases, learnt positions, GELU, one matrix for embedding and head. `llama`: RMS norm, no
    biases, rotary positions, SwiGLU, two matrices.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    kv_heads: int | None = None
    """Heads of keys and values; as many as of queries if `None`."""

    hidden: int | None = None
    """Width inside the MLP; four times the width if `None`."""

    source: str


_GPT2 = {"kind": "gpt2", "vocabulary": 50257, "context": 1024, "source": "Radford et al. 2019"}
_LLAMA2 = {"kind": "llama", "vocabulary": 32000, "context": 4096, "source": "Touvron et al. 2023"}

PRESETS: dict[str, Shape] = {
    "gpt2": Shape(layers=12, width=768, heads=12, **_GPT2),  # type: ignore[arg-type]
    "gpt2-medium": Shape(layers=24, width=1024, heads=16, **_GPT2),  # type: ignore[arg-type]
    "gpt2-large": Shape(layers=36, width=1280, heads=20, **_GPT2),  # type: ignore[arg-type]
    "gpt2-xl": Shape(layers=48, width=1600, heads=25, **_GPT2),  # type: ignore[arg-type]
    "turing-nlg": Shape(
        kind="gpt2", layers=78, width=4256, heads=28, vocabulary=50257, context=1024, source="Rasley et al. 2020"
    ),
    "gpt3-175b": Shape(
        kind="gpt2", layers=96, width=12288, heads=96, vocabulary=50257, context=2048, source="Brown et al. 2020"
    ),
    "llama-2-7b": Shape(layers=32, width=4096, heads=32, hidden=11008, **_LLAMA2),  # type: ignore[arg-type]
    "llama-2-13b": Shape(layers=40, width=5120, heads=40, hidden=13824, **_LLAMA2),  # type: ignore[arg-type]
    "llama-2-70b": Shape(layers=80, width=8192, heads=64, kv_heads=8, hidden=28672, **_LLAMA2),  # type: ignore[arg-type]
    "llama-3-8b": Shape(
        kind="llama",
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        hidden=14336,
        vocabulary=128256,
        context=8192,
        source="Dubey et al. 2024",
    ),
}


def check_model(model: str) -> None:
    """Check that `model` is the name of a preset, the path of a file, or has the form `module:name`.

    Raises:
        SourceError: it is none of them.
    """
    names = [*PRESETS, *(f"demo-{size}" for size in SIZES)]
    if model not in names and not Path(model).exists() and ":" not in model:
        raise SourceError(f"--model {model!r} is no preset, no file and no module:name; presets are {', '.join(names)}")
