"""Shapes of models by name. Does not import PyTorch, so the command line rejects a wrong name immediately."""

import json
from pathlib import Path

from shardlite.lab.train.settings import SIZES, GPTConfig

_SHAPES = json.loads(Path(__file__).with_name("presets.json").read_text())
PRESETS = {name: GPTConfig(**shape) for name, shape in _SHAPES.items()}


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
