"""Find a model by the name of a preset, a Hugging Face config file, or an import path. Nothing is downloaded.

In: the value of `--model`. Out: a `Source`, which creates the module and computes its loss.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardlite.apps.demo.gpt import GPT
from shardlite.apps.demo.settings import SIZES
from shardlite.apps.plan.decoder import Decoder
from shardlite.apps.plan.presets import PRESETS, SourceError, check_model


@dataclass(frozen=True)
class Source:
    """A model, and the batch of a rank."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    """Returns the arguments of the model: a tuple, or a dict of keywords."""

    words: str
    """A description of the batch, for tables."""

    def loss(self, module: nn.Module, dtype: torch.dtype | None) -> Callable[[], Tensor]:
        """Return a function that calls `module` and returns the loss []. Floating-point inputs are cast to `dtype`.

        The batch is kept with the function, as a program keeps it until its next step.
        """
        given = self.batch()
        if dtype is not None:
            given = tree_map(lambda leaf: leaf.to(dtype) if _is_float(leaf) else leaf, given)

        def call() -> Tensor:
            outputs = module(**given) if isinstance(given, Mapping) else module(*given)
            return _loss_of(outputs, self.name)

        return call


def find_source(model: str, batch: int, context: int | None, inputs: str | None = None) -> Source:
    """Find a model by preset, by the path of a config, or as `module:name`.

    Args:
        model: name, path or `module:name`.
        batch: sequences per rank.
        context: tokens per sequence; `None` takes the model's own.
        inputs: `module:name` of a function that returns the batch, for a model with other inputs than tokens.

    Raises:
        SourceError: there is no such model.
    """
    check_model(model)
    if model in PRESETS:
        shape = PRESETS[model]
        tokens = _tokens(batch, context or shape.context, shape.context, model)
        return Source(model, lambda: Decoder(shape), lambda: tokens(2), _words(batch, context or shape.context))
    if model.startswith("demo-") and model.removeprefix("demo-") in SIZES:
        config = SIZES[model.removeprefix("demo-")]
        tokens = _tokens(batch, context or config.context, config.context, model)
        return Source(model, lambda: GPT(config), lambda: tokens(2), _words(batch, context or config.context))
    if Path(model).exists():
        return _of_config(Path(model), batch, context)
    return _of_import_path(model, batch, context, inputs)


def _of_config(path: Path, batch: int, context: int | None) -> Source:
    """Read the config of a causal language model."""
    path = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(path.read_text())
        import transformers  # optional, and slow to import
    except ModuleNotFoundError:
        raise SourceError("a Hugging Face config needs transformers: pip install 'shardlite[examples]'") from None
    except (OSError, ValueError) as wrong:
        raise SourceError(f"--model {path} is not a readable JSON file: {wrong}") from wrong
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise SourceError(f"--model {path} is not a Hugging Face config: it has no model_type")
    kind = settings.pop("model_type")
    try:
        config = transformers.AutoConfig.for_model(kind, **settings)
    except Exception as wrong:
        raise SourceError(f"--model {path}: transformers does not support it: {wrong}") from wrong
    length = context or getattr(config, "max_position_embeddings", None) or 1024

    def make() -> nn.Module:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return model.train()

    def given() -> Mapping[str, Any]:
        tokens = torch.zeros(batch, length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}

    return Source(f"{kind} of {path.name}", make, given, _words(batch, length))


def _of_import_path(model: str, batch: int, context: int | None, inputs: str | None) -> Source:
    make = _imported(model, "--model")
    if inputs is not None:
        return Source(model, make, _tuples(_imported(inputs, "--inputs")), f"the batch of {inputs}")
    length = context or 1024

    def given() -> tuple[Tensor, ...]:
        """Return one or two tensors of tokens, as many as the forward takes."""
        module = make()
        needed = [p for p in signature(module.forward).parameters.values() if p.kind.name.startswith("POSITIONAL")]
        return (torch.zeros(batch, length, dtype=torch.long),) * max(1, min(2, len(needed)))

    return Source(model, make, given, _words(batch, length))


def _imported(path: str, option: str) -> Callable[[], Any]:
    """Return the function or class `module:name`. Modules of the current folder are included."""
    module, _, name = path.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as wrong:  # the module's own code runs
        raise SourceError(f"{option} {path}: {type(wrong).__name__}: {wrong}") from wrong
    if not callable(found):
        raise SourceError(
            f"{option} {path} is a {type(found).__name__}; a function or class without arguments is needed"
        )
    return found  # type: ignore[no-any-return]


def _tuples(make: Callable[[], Any]) -> Callable[[], Any]:
    def given() -> Any:
        batch = make()
        return batch if isinstance(batch, Mapping | tuple | list) else (batch,)

    return given


def _tokens(batch: int, context: int, most: int, name: str) -> Callable[[int], tuple[Tensor, ...]]:
    if context > most:
        raise SourceError(f"--context {context} is more than the {most} tokens that {name} has positions for")
    return lambda count: tuple(torch.zeros(batch, context, dtype=torch.long) for _ in range(count))


def _words(batch: int, context: int) -> str:
    return f"batch {batch} x {context} tokens per rank"


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _loss_of(outputs: Any, name: str) -> Tensor:
    """Return the loss: the output itself, its `loss`, or the sum of its floating-point tensors."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [leaf for leaf in tree_leaves(outputs) if _is_float(leaf)]
    if not floats:
        raise SourceError(
            f"--model {name} returned neither a loss nor a floating-point tensor, so there is no backward"
        )
    return floats[0] if floats[0].ndim == 0 else sum((leaf.float().sum() for leaf in floats), torch.zeros(()))
