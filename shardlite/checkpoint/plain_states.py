"""Full optimizer states in the format of a plain run: `optimizer.state_dict()` of one process, or of DDP.

In: a wrapped model and its optimizer. Out: a state dict that a plain optimizer loads, or the loaded optimizer.

    plain    state: {0: ..., 1: ...}                     parameters are numbered in the order of the groups
    DCP      state: {"head.weight": ..., ...}            parameters are named

The functions rename parameters. `state_dict_patches.py` gathers and cuts their states, one tensor after the other.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path

from shardlite.checkpoint.state_dict_patches import uncompiled
from shardlite.comm import problem_in
from shardlite.engine import params_of
from shardlite.errors import LayoutError, check_optimizer, some_of
from shardlite.model import ModelState, ShardLite
from shardlite.optimizers import Group, WholeParameters, name_of_value, names_in, plain_name
from shardlite.params import ShardTensor


def load_optimizer_state(model: ShardLite, optimizer: Optimizer, state_dict: Mapping[str, Any] | None) -> None:
    """Load the full `optimizer.state_dict()` of a plain or DDP run into an optimizer of shards. Collective.

    Rank 0 sends its state, one tensor after the other, and each rank keeps its part. A state with the names of
    parameters (of an optimizer that was built from `named_parameters()`) is matched by names, even if its groups
    differ. The groups of any other state must have the same parameters, in the same order, as in the plain run.

    Args:
        model: the wrapped model.
        optimizer: the optimizer of the model's shards.
        state_dict: the state of the plain run, whose parameters are numbered or named. Used on rank 0 only; other ranks
            may pass `None`.

    Raises:
        LayoutError: the groups of the state differ from those of the optimizer, a tensor does not have the shape of its
            parameter, or the optimizer holds parameters that are not of the model. Raised on every rank; the optimizer
            is unchanged.

    Example:
        >>> load_optimizer_state(model, optimizer, torch.load("optimizer.pt") if rank == 0 else None)
    """
    state = ModelState(model)
    named: dict[str, Any] = {}

    def check() -> None:
        check_optimizer("load_optimizer_state", optimizer)
        names = _names(model, optimizer)
        if state.context.rank == 0:
            named.update(_by_name(optimizer, state_dict, names))
            _check_shapes(model, optimizer, named)

    state.context.agree("load_optimizer_state", problem_in(check), loads=False)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_optimizer_state_dict(model, optimizer, named, options=options)


def full_optimizer_state(model: ShardLite, optimizer: Optimizer, *, rank: int | None = None) -> dict[str, Any]:
    """Return the full state of an optimizer of shards, as a plain optimizer loads it. Collective.

    Tensors are gathered one after the other. The counterpart is `load_optimizer_state`.

    Args:
        model: the wrapped model.
        optimizer: the optimizer of the model's shards.
        rank: 0 if only rank 0 returns the state, in tensors on the CPU, and other ranks an empty dict. `None`: every
            rank returns the state, in tensors on the model's device.

    Returns:
        The state in the format of `optimizer.state_dict()`. Moments in 8 bits are returned in fp32.

    Raises:
        LayoutError: the optimizer holds parameters that are not of the model, or another rank has invalid arguments.
        DesyncError: a rank has skipped a step. Raised on every rank.
        TypeError, ValueError: an argument is invalid, for example a `rank` that is neither 0 nor `None`.

    Example:
        >>> state = full_optimizer_state(model, optimizer, rank=0)
        >>> if rank == 0:
        ...     torch.save(state, "optimizer.pt")
    """
    numbers: dict[str, int] = {}

    def check() -> None:
        if rank is not None and (isinstance(rank, bool) or rank != 0):
            raise ValueError(f"full_optimizer_state: rank must be 0 or None, got {rank!r}")
        check_optimizer("full_optimizer_state", optimizer)
        numbers.update((name, index) for index, name in enumerate(_names(model, optimizer)))

    state = ModelState(model)
    context = state.context
    context.agree("full_optimizer_state", problem_in(check), loads=False)
    if not any(context.all_gather_int(len(optimizer.state), "full_optimizer_state")):
        # PyTorch's function would initialize the state by a step, which counts.
        groups = Optimizer.state_dict(optimizer)["param_groups"]
        return {"state": {}, "param_groups": groups} if rank is None or context.rank == rank else {}
    options = StateDictOptions(full_state_dict=True, cpu_offload=rank == 0)
    full: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    if not full:
        return {}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in full["param_groups"]]
    states = {numbers[name]: entry for name, entry in full["state"].items() if entry}
    return {"state": dict(sorted(states.items())), "param_groups": groups}


def _names(model: ShardLite, optimizer: Optimizer) -> list[str]:
    """Return the name of each parameter of an optimizer, in the order of its groups."""
    names: dict[Tensor, str] = {param: uncompiled(name) for name, param in model.named_parameters()}
    params = params_of(optimizer)
    if foreign := sum(param not in names for param in params):
        raise LayoutError(
            f"{foreign} of {len(params)} parameters of {type(optimizer).__name__} are not of the ShardLite model: use "
            "one optimizer for each model, and call model.adopt(optimizer) if it was built before wrapping"
        )
    return [names[param] for param in params]


def _by_name(optimizer: Optimizer, state_dict: Mapping[str, Any] | None, names: list[str]) -> dict[str, Any]:
    """Return a state with names in place of the numbers of a plain state."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise LayoutError(
            "load_optimizer_state: rank 0 needs a full optimizer.state_dict(), with the keys 'state' and "
            f"'param_groups', got {type(state_dict).__name__}"
        )
    groups = state_dict["param_groups"]
    keys, known = [key for group in groups for key in group["params"]], {plain_name(name): name for name in names}
    found = names_in(groups)
    if found is None or not (known.keys() & {*chain(*found)} or isinstance(keys[0], str)):
        found = _by_position(groups, optimizer, names)
    name_of = dict(zip(keys, chain(*found), strict=True))
    named = {key: known.get(name_of.get(key, key)) for key in (*keys, *state_dict["state"])}
    if foreign := [key if name_of.get(key) is None else name_of[key] for key, name in named.items() if name is None]:
        raise LayoutError(
            f"load_optimizer_state: the optimizer has no parameters {some_of(map(repr, foreign))} of the state"
        )
    if missing := known.keys() - name_of.values():
        raise LayoutError(f"load_optimizer_state: the state has no parameters {some_of(map(repr, missing))}")
    return {
        "state": {named[key]: entry for key, entry in state_dict["state"].items()},
        "param_groups": [{**group, "params": [named[key] for key in group["params"]]} for group in groups],
    }


def _by_position(groups: Sequence[Group], optimizer: Optimizer, names: Sequence[str]) -> list[list[str]]:
    """Return the names of the parameters in each group of a state that has no names."""
    got, own = ([len(group["params"]) for group in each] for each in (groups, optimizer.param_groups))
    if got != own:
        raise LayoutError(
            f"load_optimizer_state: the state has groups of {got} parameters, and {type(optimizer).__name__} of {own}: "
            "build the optimizer with the groups of the plain run, or save the plain state of an optimizer that was "
            "built from named_parameters()"
        )
    rest = map(plain_name, names)
    return [[*islice(rest, count)] for count in own]


def _check_shapes(model: ShardLite, optimizer: Optimizer, named: Mapping[str, Any]) -> None:
    """Raise if a tensor has neither one element nor the shape of its parameter, so that it cannot be cut to shards."""
    if isinstance(optimizer, WholeParameters):
        return
    shapes = {
        uncompiled(name): each.shape for name, each in model.state_dict().items() if isinstance(each, ShardTensor)
    }
    for path, value in tree_flatten_with_path(named["state"])[0]:
        name = name_of_value(path[:1])
        if isinstance(value, Tensor) and value.numel() > 1 and value.shape != shapes.get(name, value.shape):
            raise LayoutError(
                f"load_optimizer_state: {name_of_value(path[1:])!r} of {name!r} has shape {list(value.shape)}, but the "
                f"parameter has {list(shapes[name])}: is the state of another model?"
            )
