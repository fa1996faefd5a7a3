"""The `state_dict()` of an optimizer: which shards it is of, and its tensors as shards of whole ones.

Such a state is this rank's: moments have the shapes of shards. PyTorch puts them beside the parameters by position and
looks at no shape, so the state of another rank would be trained with, in silence. A state that does not say (of an
unsharded program) is refused if its tensors are of whole parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardlite.engine.local_shards import ShardRange
from shardlite.params import ShardTensor

NUMBERS = {"step", "mu_product", "eta", "mu"}
"""What PyTorch's optimizers keep once for a parameter, and not for each of its elements."""

WHOLE_MATRICES = {"Muon", "Adafactor", "LBFGS"}
"""Optimizers of PyTorch that are not elementwise."""

KEY = "shardlite"
"""Under which a `state_dict()` says it, beside `state` and `param_groups`."""


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order in which its states are saved."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def describe(optimizer: Optimizer, parts: Mapping[Tensor, ShardRange], where: str) -> dict[str, Any]:
    """Return what is saved: `where` the state is of, and for each parameter its name and its part of the whole one.

    `parts` are those of shards; what is in no wrapped model is whole.
    """
    params = enumerate(params_of(optimizer))
    return {"of": where, "parts": [parts.get(p) or (str(i), 0, p.numel(), p.numel()) for i, p in params]}


def as_shards(
    optimizer: Optimizer, state_dict: Mapping[str, Any], makers: Mapping[Tensor, Callable[..., ShardTensor]]
) -> dict[str, Any]:
    """Return a state with a `ShardTensor` for each tensor that is like its parameter, a shard."""
    positions = [index for group in state_dict["param_groups"] for index in group["params"]]
    # Optimizers may make states in the order of memory, which differs by rank; gathers need one order.
    state = {index: state_dict["state"][index] for index in positions if index in state_dict["state"]}
    state |= state_dict["state"]
    for param, index in zip(params_of(optimizer), positions, strict=True):
        if param in makers and state.get(index):
            state[index] = _entry(optimizer, param, state[index], makers[param])
    return {**state_dict, "state": state}


def _entry(optimizer: Optimizer, param: Tensor, entry: Mapping[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    decode_each = getattr(optimizer, "decoders", None)
    if decode_each is not None and (decoders := decode_each(entry)):
        facts = {"numel": param.numel(), "dtype": torch.float32, "device": param.device}
        moments = {key: make(decode, sources=codes, **facts) for key, (decode, codes) in decoders.items()}
        return {"step": entry["step"], **moments}
    return {key: make(value) if is_like(value, param) and key not in NUMBERS else value for key, value in entry.items()}


def is_like(value: object, param: Tensor) -> bool:
    """Return whether a value of a state has one element for each element of its parameter."""
    return isinstance(value, Tensor) and value.numel() == param.numel() and value.ndim == param.ndim


def as_local(state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """Return a state with this rank's elements for each `ShardTensor`, and why one is not of its parameter, if so.

    If all fit, what the state says that it is of is replaced by `own`, a description: DCP gives all ranks the first's.
    """
    positions = [index for group in state_dict["param_groups"] for index in group["params"]]
    state, found = dict(state_dict["state"]), False
    for index, (name, start, stop, _) in zip(positions, own["parts"], strict=False):
        for key, given in state.get(index, {}).items():
            value = getattr(given, "value", given)
            if not isinstance(value, ShardTensor):
                continue
            if (value.start, value.stop) != (start, stop):
                return state_dict, (
                    f"{key!r} of {name!r} is elements {value.start} to {value.stop}, here it must be {start} to {stop}"
                )
            local = value.to_local().detach()
            state[index] = {**state[index], key: local if value is given else replace(given, value=local)}
            found = True
    fits = found and len(positions) == len(own["parts"])
    return {**state_dict, "state": state, **({KEY: own} if fits else {})}, None


def misfit(optimizer: Optimizer, state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Return why the parameters of an optimizer, which `describe` has described as `own`, cannot have a state."""
    given = state_dict.get(KEY)
    if given is None:
        return _misfit_of_unmarked(optimizer, state_dict, own)
    for (name, *ours), (theirs_name, *theirs) in zip(own["parts"], given["parts"], strict=False):
        if ours != theirs:
            return (
                f"the state is of {given['of']}, this is {own['of']}: there the state of {theirs_name!r} is that of "
                f"elements {_range(theirs)}, here it must be that of elements {_range(ours)} of {name!r}"
            )
    if len(own["parts"]) != len(given["parts"]):
        return f"the state is of {len(given['parts'])} parameters, this optimizer has {len(own['parts'])}"
    return None


def _misfit_of_unmarked(optimizer: Optimizer, state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    positions = [index for group in state_dict["param_groups"] for index in group["params"]]
    for param, index, (name, start, stop, numel) in zip(params_of(optimizer), positions, own["parts"], strict=False):
        for key, value in state_dict["state"].get(index, {}).items():
            tensor = getattr(value, "value", value)
            if isinstance(tensor, Tensor) and tensor.numel() == numel != stop - start and tensor.ndim == param.ndim:
                return (
                    f"the state is of an unsharded model, this is {own['of']}: {key!r} of {name!r} has shape "
                    f"{list(tensor.shape)}, and its shard here {list(param.shape)}"
                )
    return None


def misshapen(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> str | None:
    """Return which tensor of a state has another shape than the optimizer has or makes: PyTorch would take it over.

    Those of PyTorch make tensors like the parameter, and numbers. Of others only what they hold already is known.
    """
    if hasattr(optimizer, "decoders"):
        return None  # it compares them itself, in all its formats
    known = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ not in WHOLE_MATRICES
    positions = [index for group in state_dict["param_groups"] for index in group["params"]]
    for param, index in zip(params_of(optimizer), positions, strict=False):
        held = optimizer.state.get(param, {})
        for key, value in state_dict["state"].get(index, {}).items():
            expected = held.get(key, param if known else None)
            if not isinstance(value, Tensor) or not isinstance(expected, Tensor) or value.numel() <= 1:
                continue
            if value.shape != expected.shape:
                return f"{key!r} of parameter {index} has shape {list(value.shape)}, here it has {list(expected.shape)}"
    return None


def latest_step(state_dict: Mapping[str, Any]) -> int:
    """Return the highest step count in a state, 0 if there is none."""
    steps = [entry["step"] for entry in state_dict["state"].values() if isinstance(entry, Mapping) and "step" in entry]
    return max((int(getattr(step, "value", step)) for step in steps), default=0)


def _range(part: Sequence[int]) -> str:
    start, stop, numel = part
    return f"{start} to {stop} of {numel}"
