"""Find a model by the name of a preset, a Hugging Face config file, or an import path. Nothing is downloaded.

In: the value of `--model`. Out: a `Source`, which creates the module and computes its loss.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardlite.cli import imported
from shardlite.lab.compared.gpt import GPT
from shardlite.lab.plan.presets import PRESETS, check_model
from shardlite.lab.train.settings import SIZES
from shardlite.plan import Source, SourceError


def find_source(model: str, batch: int, context: int | None, inputs: str | None = None) -> Source:
    """Find a model by the name of a preset, by the path of a config, or as `module:name`.

    Args:
        model: the name, the path, or `module:name`.
        batch: sequences per rank.
        context: tokens per sequence. `None` selects the model's maximum.
        inputs: `module:name` of a function that returns the batch, for a model whose inputs are not tokens.

    Raises:
        SourceError: there is no such model.
    """
    check_model(model)
    if config := {**PRESETS, **{f"demo-{name}": each for name, each in SIZES.items()}}.get(model):
        return _of_tokens(model, partial(GPT, config), config.context, batch, context)
    if Path(model).exists():
        return _of_config(Path(model), batch, context)
    return _of_import_path(model, batch, context, inputs)


def _of_tokens(name: str, make: Callable[[], nn.Module], most: int, batch: int, context: int | None) -> Source:
    """Return a model that takes inputs and targets of at most `most` tokens."""
    length = context or most
    if length > most:
        raise SourceError(f"--context {length} exceeds the {most} positions of {name}")
    return Source(name, make, lambda: (_zeros(batch, length), _zeros(batch, length)), _words(batch, length))


def _of_config(path: Path, batch: int, context: int | None) -> Source:
    """Return the causal language model of a Hugging Face config."""
    path = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(path.read_text())
        import transformers  # an optional dependency, and slow to import
    except ModuleNotFoundError:
        raise SourceError("a Hugging Face config requires transformers; pip install 'shardlite[examples]'") from None
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
        tokens = _zeros(batch, length)
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}

    return Source(f"{kind} of {path.name}", make, given, _words(batch, length))


def _of_import_path(model: str, batch: int, context: int | None, inputs: str | None) -> Source:
    make = _imported(model, "--model")
    if inputs is not None:
        return Source(model, make, _tuples(_imported(inputs, "--inputs")), f"the batch of {inputs}")
    length = context or 1024

    def given() -> tuple[Tensor, ...]:
        """Return the inputs. If the forward takes two positional arguments, also return the targets."""
        module = make()
        needed = [p for p in signature(module.forward).parameters.values() if p.kind.name.startswith("POSITIONAL")]
        return (_zeros(batch, length),) * max(1, min(2, len(needed)))

    return Source(model, make, given, _words(batch, length))


def _imported(path: str, option: str) -> Callable[[], Any]:
    """Return the function or class with the path `module:name`."""
    module, _, name = path.partition(":")
    try:
        found = imported(module, name)
    except Exception as wrong:  # the import runs code that may raise anything
        raise SourceError(f"{option} {path}: {type(wrong).__name__}: {wrong}") from wrong
    if not callable(found):
        raise SourceError(
            f"{option} {path} is of type {type(found).__name__}; expected a function or class without arguments"
        )
    return found  # type: ignore[no-any-return]


def _tuples(make: Callable[[], Any]) -> Callable[[], Any]:
    def given() -> Any:
        batch = make()
        return batch if isinstance(batch, Mapping | tuple | list) else (batch,)

    return given


def _zeros(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def _words(batch: int, context: int) -> str:
    return f"batch {batch} x {context} tokens per rank"
