"""Entries of a checkpoint by name, and the conversion of objects to and from bytes without executing code.

    model.<name>                            weights and buffers
    optimizer.state.<name>.<key>            moments and step counts
    optimizer.param_groups.<i>.<option>     hyperparameters, and `params`: names
    ranks.<r>.extra, ranks.<r>.generators   `extra` of rank r, and the states of its random number generators

`torch.distributed.checkpoint.state_dict` gives the entries of FSDP2 programs names of the first three forms.
"""

from __future__ import annotations

import io
import pickle
import random
import re
import sys
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.optim import Optimizer

from shardlite.engine import models_with
from shardlite.errors import CheckpointError, check_optimizer
from shardlite.model import ShardLite
from shardlite.optimizers import WholeParameters

Paths = dict[str, tuple[str | int, ...]]
"""The type of a dict that has, for the name of each entry, the keys of this entry in the nested state dict."""


class Run(NamedTuple):
    """The objects to save or load, which are arguments of `save`, `save_in_memory` and `load`."""

    model: ShardLite
    optimizer: Optimizer | None
    extra: Mapping[str, Any] | None


def check_run(call: str, run: Run) -> None:
    """Check the types of the objects to save or load.

    Raises:
        TypeError: the optimizer is no optimizer, or `extra` is no dict.
    """
    if run.optimizer is not None:
        check_optimizer(call, run.optimizer)
    if run.extra is not None and not isinstance(run.extra, Mapping):
        raise TypeError(f"{call}: extra must be a dict, got {run.extra!r}")


def contents(run: Run, rank: int) -> tuple[dict[str, Any], Paths]:
    """Return the entries that this rank has, by name: tensors, and objects to pickle."""
    state: dict[str, Any] = {"model": run.model.state_dict()}
    if run.optimizer is not None:
        state["optimizer"] = _named_state(run.model, run.optimizer)
    flat, paths = flatten_state_dict(state)
    for name, value in flat.items():
        if isinstance(value, Tensor) and value.numel() == 0:  # no rank has a shard of the tensor
            flat[name] = torch.empty(value.shape, dtype=value.dtype)
    for key, value in (("extra", states_in(run.extra or {})), ("generators", generators())):
        name = f"ranks.{rank}.{key}"
        flat[name], paths[name] = value, ("ranks", str(rank), key)
    return flat, paths


def _named_state(model: ShardLite, optimizer: Optimizer) -> dict[str, Any]:
    """Return `optimizer.state_dict()`, with the names of parameters instead of their numbers."""
    saved, names = optimizer.state_dict(), names_of(model, optimizer)
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    by_number = dict(zip(numbers, chain.from_iterable(names), strict=True))
    # DCP loads a group only if it has all options of PyTorch's AdamW. ShardLite's AdamW has fewer options.
    others = torch.optim.AdamW([torch.zeros(0)]).defaults
    groups = [
        {**(others if "max_update" in group else {}), **group, "params": own}
        for group, own in zip(saved["param_groups"], names, strict=True)
    ]
    return {"state": {by_number[i]: entry for i, entry in saved["state"].items()}, "param_groups": groups}


def kind_of(optimizer: Optimizer | None) -> str:
    """Return the name of an optimizer's class, with the class that steps whole parameters, if any."""
    kind = type(optimizer).__name__
    return f"{kind}({optimizer.optimizer_class.__name__})" if isinstance(optimizer, WholeParameters) else kind


def names_of(model: ShardLite, optimizer: Optimizer | None) -> list[list[str]]:
    """Return the names of the parameters in each param group of an optimizer.

    A parameter outside of the model, such as one of the loss, has a number instead. Its state is that of one rank.

    Raises:
        CheckpointError: the optimizer has no parameter of the model, or a shard of another model.
    """
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    groups, own = optimizer.param_groups if optimizer is not None else (), len(names)
    is_other = not any(param in names for group in groups for param in group["params"])

    def name_of(param: Tensor) -> str:
        if param not in names and (is_other or models_with([param])):
            raise CheckpointError(
                f"{type(optimizer).__name__} has a parameter of shape {list(param.shape)} that is not one of "
                "`model.parameters()`: a checkpoint has the state of one model. Save the other model separately"
            )
        return names.setdefault(param, f"(outside of the model).{len(names) - own}")

    return [[*map(name_of, group["params"])] for group in groups]


# ---- extra ----------------------------------------------------------------------------------------------------------


def states_in(extra: Any) -> Any:
    """Return `extra` with each stateful object (schedulers, samplers, averages) replaced by its `state_dict()`."""
    if isinstance(extra, Mapping):
        return {key: states_in(value) for key, value in extra.items()}
    if type(extra) in (list, tuple):
        return type(extra)(map(states_in, extra))
    return extra.state_dict() if _is_stateful(extra) else extra


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def restore(extra: Any, saved: Any) -> Any:
    """Load saved states into the stateful objects of `extra`. Return `saved` with these objects in their places."""
    if _is_stateful(extra):
        extra.load_state_dict(saved)
        return extra
    if isinstance(extra, Mapping) and isinstance(saved, Mapping):
        return {key: restore(extra[key], value) if key in extra else value for key, value in saved.items()}
    if type(extra) in (list, tuple) and type(extra) is type(saved) and len(extra) == len(saved):
        return type(saved)(map(restore, extra, saved))
    return saved


def check_keys(extra: Any, saved: Any, where: object) -> None:
    """Check that each stateful object of `extra` has a saved state.

    Raises:
        CheckpointError: an object has no saved state.
    """
    for key, value in extra.items() if isinstance(extra, Mapping) else ():
        if isinstance(saved, Mapping) and key in saved:
            check_keys(value, saved[key], where)
        elif _is_stateful(value):
            known = ", ".join(map(repr, saved)) if isinstance(saved, Mapping) and saved else "nothing"
            raise CheckpointError(f"{where} has no state for extra[{key!r}], only for {known}")


# ---- objects as bytes -----------------------------------------------------------------------------------------------


def pickled(name: str, value: object) -> io.BytesIO:
    """Pickle an object as `torch.save` does.

    Raises:
        CheckpointError: the object contains something that is neither a tensor, nor a plain value, nor a container.
            Loading would refuse it.
    """
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    unpickled(name, content)
    content.seek(0)
    return content


def unpickled(name: str, content: io.BytesIO) -> Any:
    """Unpickle an object that consists of tensors, plain values and containers.

    Raises:
        CheckpointError: the object contains a value of another type.
    """
    try:
        return torch.load(content, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{name!r} holds something that is neither a tensor, a number, a string, nor a dict, list or tuple of these"
            f"{f' ({found[1]})' if found else ''}. Loading it could execute code: convert it (`float(x)`, "
            "`x.tolist()`, `vars(x)`), or pass an object with state_dict() and load_state_dict()"
        ) from None


# ---- random numbers -------------------------------------------------------------------------------------------------


def generators() -> dict[str, Any]:
    """Return the states of this process's random number generators."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


def restore_generators(states: Mapping[str, Any]) -> None:
    """Restore this process's random number generators from the result of `generators`."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy:
        numpy.random.set_state(states["numpy"])
