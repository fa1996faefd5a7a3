"""Find a model by the name of a preset, a Hugging Face config file, or an import path. Nothing is downloaded.

In: the value of `--model`. Out: a `Source`, which creates the module and computes its loss.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardlite.cli import imported
from shardlite.lab.plan.decoder import Decoder
from shardlite.lab.plan.presets import PRESETS, SourceError, check_model
from shardlite.lab.train.gpt import GPT
from shardlite.lab.train.settings import SIZES
from shardlite.wrapping import partition_module


@dataclass(frozen=True)
class Source:
    """A model and the batch of a rank."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    """Function that returns the arguments of the model: a tuple, or a mapping of keywords."""

    words: str
    """Description of the batch, for tables."""

    device = torch.device("cpu")

    def model(self) -> nn.Module:
        """Create the model."""
        return self.make()

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Return the units that ShardLite finds in a model: inner modules first, without the root."""
        return [*reversed(units_of(model).values())]

    def parameters(self) -> int:
        """Return the number of elements in all parameters."""
        try:
            with torch.device("meta"):
                model = self.make()
        except (NotImplementedError, RuntimeError):  # the constructor reads values of meta tensors, which have none
            model = self.make()
        return sum(param.numel() for param in model.parameters())

    def loss(self, module: nn.Module, dtype: torch.dtype | None) -> Callable[[], Tensor]:
        """Return a function that calls `module` and returns the loss []. Floating-point inputs are cast to `dtype`.

        The function holds the batch, as a program holds its batch until the next step.
        """
        given = self.batch()
        if dtype is not None:
            given = tree_map(lambda leaf: leaf.to(dtype) if _is_float(leaf) else leaf, given)

        def call() -> Tensor:
            outputs = module(**given) if isinstance(given, Mapping) else module(*given)
            return _loss_of(outputs, self.name)

        return call


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose weights ShardLite gathers together, by name: outer modules first, without the root."""
    plans = partition_module(model, None)
    return {plan.name: plan.module for plan in plans if plan.params and plan.module is not model}


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
    if model in PRESETS:
        return _of_tokens(model, partial(Decoder, PRESETS[model]), PRESETS[model].context, batch, context)
    if config := {f"demo-{name}": each for name, each in SIZES.items()}.get(model):
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


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _loss_of(outputs: Any, name: str) -> Tensor:
    """Return the loss: the output itself, the `loss` of the output, or the sum of its floating-point tensors."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [leaf for leaf in tree_leaves(outputs) if _is_float(leaf)]
    if not floats:
        raise SourceError(
            f"--model {name} returned neither a loss nor a floating-point tensor, so there is no backward"
        )
    return floats[0] if floats[0].ndim == 0 else sum((leaf.float().sum() for leaf in floats), torch.zeros(()))
