"""`state_dict()` and `load_state_dict()` of optimizers of shards.

An optimizer's state belongs to one rank's shards: moments have the shapes of shards. PyTorch matches states to
parameters by position and does not compare shapes, so it would silently load another rank's state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path, tree_map_with_path

from shardlite.engine import OptimizerBridge, models_with, params_of
from shardlite.engine.local_shards import ShardRange
from shardlite.errors import LayoutError
from shardlite.optim import AdamW, create_states, decoders, load_entries
from shardlite.optimizers.param_groups import match_groups, names_in, plain_name, same_names
from shardlite.params import ShardTensor
from shardlite.patches import change, replace_function

if TYPE_CHECKING:
    from shardlite.optimizers.members import Member

KEY = "shardlite"
"""Third key of a `state_dict()`, besides `state` and `param_groups`. Its value describes the shards of the state."""

_RESUME = (
    "Nothing was changed. Each rank must load the state that it saved, with the same ranks, stage and units. To change "
    "these, load the weights (`load_full_state_dict`) and start with a new optimizer"
)


_NUMBERS = {"step", "mu_product", "eta", "mu"}
"""Names of the values that PyTorch's optimizers keep once per parameter, not once per element."""


class WholeStateOptimizer(Optimizer):
    """The base of `WholeParameters`, which few programs import: an optimizer whose ranks step whole parameters."""

    _has_stepped = False
    """Whether a step was taken or a state was loaded. The value is equal on all ranks."""

    def _member_of(self, param: Tensor) -> "Member | None":
        """Return a parameter whose state only its owner has. `None`: each rank has the state of its shard."""
        raise NotImplementedError

    def _load_entries(self, entries: Iterable[tuple[Tensor, dict[str, Any]]]) -> None:
        """Replace the states of all parameters. Each `_member_of` has the state of the whole parameter."""
        raise NotImplementedError


def member_of(optimizer: Optimizer, param: Tensor) -> "Member | None":
    """Return `WholeStateOptimizer._member_of`, which is `None` for any other optimizer."""
    return optimizer._member_of(param) if isinstance(optimizer, WholeStateOptimizer) else None


def init_states(by_step: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
    """Create the missing states of an optimizer, by a step with zero gradients if this is the only way.

    The step of whole parameters is collective, but a rank that owns no parameter never has a state.
    """
    if isinstance(optimizer, AdamW) and optimizer.in_backward:
        create_states(optimizer)
    elif not (isinstance(optimizer, WholeStateOptimizer) and optimizer._has_stepped):
        by_step(optimizer)


def load_states(optimizer: Optimizer, states: Iterable[tuple[Tensor, dict[str, Any]]]) -> None:
    """Replace the state of an optimizer, parameter by parameter."""
    if isinstance(optimizer, AdamW):
        load_entries(optimizer, states)
    elif isinstance(optimizer, WholeStateOptimizer):
        optimizer._load_entries(states)
    else:
        groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
        counted_on_device = {param for group in groups for param in group["params"]}
        for param, state in states:
            if param in counted_on_device and isinstance(step := state.get("step"), Tensor):
                state["step"] = step.to(param.device)  # as in PyTorch
            optimizer.state[param] = state


# ---- values of a state ----------------------------------------------------------------------------------------------


def numbers_among(values: Iterable[tuple[str, int, int]]) -> set[str]:
    """Return the names of the values that an optimizer keeps once per parameter, not once per element.

    The state of a parameter with one element does not show this, but the states of larger parameters do.

    Args:
        values: for each value of a state its name, the number of elements of its parameter, and its number of elements.
    """
    return _NUMBERS | {name for name, of_param, of_value in values if of_param != 1 and of_value == 1}


def numbers_of(states: Iterable[tuple[Tensor, Mapping[str, Any]]]) -> set[str]:
    """Return `numbers_among` the values of an optimizer, given parameters and their states."""
    return numbers_among(
        (name_of_value(path), param.numel(), value.numel())
        for param, entry in states
        for path, value in tree_flatten_with_path(dict(entry))[0]
        if isinstance(value, Tensor)
    )


def name_of_value(path: Sequence[Any]) -> str:
    """Return the name of a value in a state: keys and indices, joined by dots."""
    return ".".join(str(getattr(step, "key", getattr(step, "idx", ""))) for step in path)


def map_state(entry: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the state of a parameter with `change(name, value)` for each value, also for values inside lists."""
    changed: dict[str, Any] = tree_map_with_path(lambda path, value: change(name_of_value(path), value), dict(entry))
    return changed


# ---- `state_dict()` and `load_state_dict()` -------------------------------------------------------------------------


def state_of_shards(original: Callable[[Optimizer], dict[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state, with a description of the shards.

    In the result, a `ShardTensor` replaces each tensor that has one element for each element of a shard.
    """
    saved = original(optimizer)
    models = models_with(params_of(optimizer))
    if not models:
        return saved
    makers = {shard: make for model in models for shard, make in model.shards.shard_tensors(model.context).items()}
    return {**_as_shards(optimizer, saved, makers), KEY: _describe(optimizer, models)}


def load_state_of_shards(original: Callable[..., None], optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a state. Raise an error if the state of any rank does not belong to the shards of that rank."""
    models = models_with(params_of(optimizer))
    if models:
        name = f"load_state_dict of {type(optimizer).__name__}"
        own = _describe(optimizer, models)
        why = ""
        try:
            state_dict = _by_names(optimizer, state_dict, own)
            state_dict = _as_local(state_dict, own)
        except LayoutError as error:
            why = str(error)
        wrong = _misfit(optimizer, state_dict, own) or why or _misshapen(optimizer, state_dict)
        # Ranks that own different parameters have different step counts.
        latest = 0 if isinstance(optimizer, WholeStateOptimizer) else _latest_step(state_dict)
        steps = models[0].context.all_gather_int(-1 if wrong else latest, name)
        if wrong:
            raise LayoutError(f"{name}: {wrong}. {_RESUME}")
        if min(steps) < 0:
            raise LayoutError(f"{name}: the state given to rank {steps.index(-1)} does not fit. {_RESUME}")
        if min(steps) < max(steps):
            raise LayoutError(
                f"{name}: the states given to the ranks are of different steps, {steps} by rank: give each rank "
                "its own state of the same checkpoint"
            )
    original(optimizer, state_dict)


def _by_names(optimizer: Optimizer, state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state whose groups are those of an optimizer, if both have the same names.

    Names are those of the description of shards or, in a state without a description, `param_names`.

    Raises:
        LayoutError: a group would take different options from several groups.
    """
    groups, given = state_dict["param_groups"], state_dict.get(KEY)
    its = _cut(own["parts"], optimizer.param_groups)
    names = names_in(groups) if given is None else _cut(given["parts"], groups)
    if names is None or names == its or not same_names(names, its):
        return state_dict
    changed = {**state_dict, "param_groups": match_groups(groups, names, optimizer.param_groups, its)}
    if given is None:
        return changed
    before = _positions(state_dict)
    order = [before.index(key) for key in _positions(changed)]
    described = {**given, "parts": [given["parts"][index] for index in order]}
    if "owned" in given:
        described["owned"] = [new for new, old in enumerate(order) if old in given["owned"]]
    return {**changed, KEY: described}


def _cut(parts: Sequence[ShardRange], groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the names of the parameters in each group, given the descriptions of all parameters."""
    rest = iter(parts)
    return [[plain_name(name) for name, *_ in islice(rest, len(group["params"]))] for group in groups]


def _describe(optimizer: Optimizer, models: Sequence[OptimizerBridge]) -> dict[str, Any]:
    """Return a description of this rank and, for each parameter, the name and the range of this rank's shard."""
    parts: dict[Tensor, ShardRange] = {shard: part for model in models for shard, part in model.shards.parts().items()}
    params = enumerate(params_of(optimizer))
    described: dict[str, Any] = {
        "of": models[0].place,
        "parts": [parts.get(p) or (str(i), 0, p.numel(), p.numel()) for i, p in params],
    }
    if isinstance(optimizer, WholeStateOptimizer):
        members = [optimizer._member_of(param) for param in params_of(optimizer)]
        described["owned"] = [i for i, member in enumerate(members) if member is not None and member.is_mine]
    return described


def _positions(state_dict: Mapping[str, Any]) -> list[Any]:
    """Return the keys of a state in the order of the optimizer's parameters."""
    return [index for group in state_dict["param_groups"] for index in group["params"]]


def _as_shards(
    optimizer: Optimizer, state_dict: Mapping[str, Any], makers: Mapping[Tensor, Callable[..., ShardTensor]]
) -> dict[str, Any]:
    """Return a state in which a `ShardTensor` replaces each tensor that has one element for each element of a shard."""
    positions = _positions(state_dict)
    # Optimizers may create states in memory order, which differs between ranks. Gathers need one order on all ranks.
    state = {index: state_dict["state"][index] for index in positions if index in state_dict["state"]}
    state |= state_dict["state"]
    pairs = list(zip(params_of(optimizer), positions, strict=True))
    numbers = numbers_of((param, state.get(index, {})) for param, index in pairs)  # not elementwise, of any size

    def part(param: Tensor, name: str, value: Any) -> Any:
        is_like = isinstance(value, Tensor) and value.numel() == param.numel() and value.ndim == param.ndim
        return makers[param](value) if is_like and name not in numbers else value

    for param, index in pairs:
        if param not in makers or not state.get(index) or member_of(optimizer, param) is not None:
            continue
        coded = decoders(state[index]) if isinstance(optimizer, AdamW | WholeStateOptimizer) else {}
        facts = {"numel": param.numel(), "dtype": torch.float32, "device": param.device}
        moments = {key: makers[param](decode, sources=codes, **facts) for key, (decode, codes) in coded.items()}
        rest = {"step": state[index]["step"]} if moments else map_state(state[index], partial(part, param))
        state[index] = {**rest, **moments}
    return {**state_dict, "state": state}


def _as_local(state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state in which this rank's elements replace each `ShardTensor`.

    `own` replaces the description in the state, because DCP gives rank 0's description to all ranks.

    Raises:
        LayoutError: a `ShardTensor` does not fit this rank.
    """
    positions = _positions(state_dict)
    state, found = dict(state_dict["state"]), False

    def local(part: ShardRange, key: str, given: Any) -> Any:
        nonlocal found
        (name, start, stop, _), value = part, getattr(given, "value", given)
        if not isinstance(value, ShardTensor):
            return given
        found = True
        if (value.start, value.stop) != (start, stop):
            raise LayoutError(
                f"{key!r} of {name!r} is elements {value.start} to {value.stop}, here it must be {start} to {stop}"
            )
        own_part = value.to_local().detach()
        return own_part if value is given else replace(given, value=own_part)

    for index, part in zip(positions, own["parts"], strict=False):
        if index in state:
            state[index] = map_state(state[index], partial(local, part))
    fits = found and len(positions) == len(own["parts"])
    return {**state_dict, "state": state, **({KEY: own} if fits else {})}


def _misfit(optimizer: Optimizer, state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Return an error text if a state does not fit the optimizer whose shards `own` describes, else `None`."""
    given = state_dict.get(KEY)
    if given is None:
        return _misfit_of_unmarked(optimizer, state_dict, own)
    for (name, *ours), (theirs_name, *theirs) in zip(own["parts"], given["parts"], strict=False):
        if ours != theirs:
            here, there = ("{} to {} of {}".format(*part) for part in (ours, theirs))
            return (
                f"the state is of {given['of']}, this is {own['of']}: there {theirs_name!r} has the state of "
                f"elements {there}, here {name!r} needs the state of elements {here}"
            )
    if given.get("owned") != own.get("owned"):
        return f"the state is of {given['of']}, where other parameters are stepped whole, or have other owners"
    if len(own["parts"]) != len(given["parts"]):
        return f"the state is of {len(given['parts'])} parameters, this optimizer has {len(own['parts'])}"
    return None


def _misfit_of_unmarked(optimizer: Optimizer, state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Return an error text if a state without a description has a tensor of a whole parameter's shape, else `None`."""
    parts = dict(zip(_positions(state_dict), own["parts"], strict=False))
    for param, index, key, value in _tensors(optimizer, state_dict):
        name, start, stop, numel = parts[index]
        # One element may also be a number, which each rank keeps.
        if (
            member_of(optimizer, param) is None
            and value.numel() == numel != stop - start
            and numel > 1
            and value.ndim == param.ndim
        ):
            return (
                f"the state is of an unsharded model, this is {own['of']}: {key!r} of {name!r} has shape "
                f"{list(value.shape)}, and its shard here {list(param.shape)}"
            )
    return None


def _misshapen(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> str | None:
    """Return an error text if a tensor of a state does not have the shape that `optimizer` requires, else `None`.

    PyTorch's elementwise optimizers keep numbers, and tensors in the parameter's shape. For any other optimizer, the
    only known shapes are those of the tensors that the optimizer already holds.
    """
    if isinstance(optimizer, AdamW):
        return None  # `AdamW` itself compares the shapes of all its formats
    from shardlite.optimizers.probe import probe_shards

    known = type(optimizer).__module__.startswith("torch.optim") and probe_shards(optimizer).same
    for param, index, key, value in _tensors(optimizer, state_dict):
        expected = optimizer.state.get(param, {}).get(key, param if known else None)
        if isinstance(expected, Tensor) and value.numel() > 1 and value.shape != expected.shape:
            return f"{key!r} of parameter {index} has shape {list(value.shape)}, here it has {list(expected.shape)}"
    return None


def _tensors(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any, str, Tensor]]:
    """For each tensor of a state, yield the parameter, the parameter's key, the tensor's name, and the tensor."""
    for param, index in zip(params_of(optimizer), _positions(state_dict), strict=False):
        for path, given in tree_flatten_with_path(dict(state_dict["state"].get(index, {})))[0]:
            value = getattr(given, "value", given)  # `AdamW` wraps values so that PyTorch does not convert them
            if isinstance(value, Tensor):
                yield param, index, name_of_value(path), value


def _latest_step(state_dict: Mapping[str, Any]) -> int:
    """Return the highest step count in a state, or 0 if the state has no step counts."""
    steps = [entry["step"] for entry in state_dict["state"].values() if isinstance(entry, Mapping) and "step" in entry]
    return max((int(getattr(step, "value", step)) for step in steps), default=0)


@change("`torch.optim.Optimizer.state_dict`")
def _() -> None:
    """A state would not record the shards that it belongs to, and DCP would save its tensors as if they were full."""
    replace_function(Optimizer, "state_dict", state_of_shards)


@change("`torch.optim.Optimizer.load_state_dict`")
def _() -> None:
    """An optimizer would load another rank's state, because PyTorch does not compare shapes."""
    replace_function(Optimizer, "load_state_dict", load_state_of_shards)
