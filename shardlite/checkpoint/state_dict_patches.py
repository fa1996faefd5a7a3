"""Patches that let `torch.distributed.checkpoint.state_dict` handle wrapped models.

PyTorch's module looks for an optimizer's parameters in the model's submodules, but the submodules of a wrapped model
contain placeholders. Besides, PyTorch's module gathers and shards DTensors only. The patches replace private functions
of that module, because programs may have imported its public functions by name.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from io import BytesIO
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map, tree_map_only, tree_map_with_path

from shardlite.checkpoint.contents import pickled, unpickled
from shardlite.comm import Context, agree
from shardlite.comm import broadcast as broadcast_tensor
from shardlite.engine import params_of
from shardlite.errors import CheckpointError, LayoutError, some_of
from shardlite.model import ModelState, ShardLite
from shardlite.optimizers import (
    Group,
    WholeParameters,
    init_states,
    match_groups,
    member_of,
    name_of_value,
    numbers_among,
)
from shardlite.params import ShardTensor
from shardlite.patches import replace_function

_State: TypeAlias = dict[str, Any]
_Original: TypeAlias = Callable[..., Any]


@cache
def install() -> None:
    """Let `torch.distributed.checkpoint.state_dict` handle wrapped models. Further calls have no effect."""
    from torch.distributed.checkpoint import state_dict as patched

    for name, replacement in _REPLACEMENTS.items():
        replace_function(patched, name, partial(_if_wrapped, replacement))
    replace_function(patched, "_init_optim_state", init_states)


def _if_wrapped(replacement: _Original, original: _Original, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call `replacement` for a wrapped model, and `original` for any other model."""
    wrapped = _wrapped(model)
    if wrapped is None:
        return original(model, *args, **kwargs)
    return replacement(original, wrapped, *args, **kwargs)


def _wrapped(model: nn.Module) -> ShardLite | None:
    """Return `model` if it is wrapped. If `torch.compile` has compiled a wrapped model, return the wrapped model.

    Otherwise return `None`.

    Raises:
        LayoutError: `model` is another module, and contains a wrapped model.
    """
    # A `ShardLite` model that wraps a compiled module also has the attribute `_orig_mod`, which is that of the module.
    if not isinstance(model, ShardLite):
        model = getattr(model, "_orig_mod", model)
    if isinstance(model, ShardLite):
        return model
    inside = next((name for name, each in model.named_modules() if isinstance(each, ShardLite)), None)
    if inside is not None:
        raise LayoutError(
            f"the state dict of a {type(model).__name__} with a ShardLite model inside, {inside!r}: pass the ShardLite "
            "model itself, and the other modules separately"
        )
    return None


# ---- checks ---------------------------------------------------------------------------------------------------------


def _verify_options(original: _Original, model: ShardLite, *args: Any, submodules: Any = None, **kwargs: Any) -> Any:
    """Raise `LayoutError` for the argument `submodules`, which PyTorch has deprecated."""
    if submodules:
        raise LayoutError("submodules=: not supported for a ShardLite model: select from all names of its state dict")
    return original(model, *args, submodules=submodules, **kwargs)


def _unflatten_model_state(original: _Original, model: ShardLite, state_dict: _State) -> Any:
    """Raise `LayoutError` for a state dict with modules as keys, which PyTorch has deprecated."""
    if any(isinstance(key, nn.Module) for key in state_dict):
        raise LayoutError("a state dict by modules is not supported for a ShardLite model: pass it by names")
    return original(model, state_dict)


# ---- get ------------------------------------------------------------------------------------------------------------


def _iterate_model_state(_: _Original, model: ShardLite, *__: Any, **___: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of parameters and persistent buffers."""
    shards = dict(model.named_parameters(remove_duplicate=False))
    yield from ((name, shards.get(name, value)) for name, value in model.state_dict().items())


def _get(original: _Original, model: ShardLite, *args: Any) -> _State:
    """Return shards. If `full_state_dict` is set, gather whole tensors one after the other, and return copies."""
    *others, info = args
    if not info.full_state_dict:
        state: _State = original(model, *args)
        return state
    wanted = not info.cpu_offload or ModelState(model).context.rank == 0
    shards = original(model, *others, replace(info, full_state_dict=False, cpu_offload=False))
    owners = [each for each in (others[0] if others else ()) if isinstance(each, WholeParameters)]

    def copied(value: Tensor) -> Tensor | None:
        tensor = value.full_tensor() if isinstance(value, ShardTensor) else value.clone()
        if not wanted and (isinstance(value, ShardTensor) or not owners):
            return None  # states of parameters that this rank owns are kept, because it sends them
        return tensor.cpu() if info.cpu_offload else tensor

    whole: _State = tree_map_only(Tensor, copied, shards)
    for optimizer in owners:
        _add_owned(whole, model, optimizer)
    return whole if wanted else {}


def _add_owned(state: _State, model: ShardLite, optimizer: WholeParameters) -> None:
    """Add the states of whole parameters that other ranks own, one parameter after the other. Collective."""
    context = ModelState(model).context
    for original, param in model.named_parameters():
        name = uncompiled(original)
        if (member := member_of(optimizer, param)) is None:
            continue
        prefix = f"state.{name}."
        flat = {key: value for key, value in state.items() if key.startswith(prefix)}
        content = pickled(name, flat or state.get("state", {}).get(name, {})).getvalue() if member.is_mine else b""
        lengths = context.all_gather_int(len(content), "the length of a state")
        length = lengths[context.rank - context.transport.rank + member.owner]  # in this replica
        data = torch.frombuffer(bytearray(content or bytes(length)), dtype=torch.uint8).to(context.device)
        broadcast_tensor(data, context.inline[0], source=member.owner, operation=context.operation("a state", "values"))
        if not member.is_mine and (found := unpickled(name, BytesIO(data.cpu().numpy().tobytes()))):
            if "state" in state:
                state["state"][name] = found
            else:
                state.update(found)


# ---- set ------------------------------------------------------------------------------------------------------------


def _load_model(_: _Original, model: ShardLite, state_dict: Mapping[str, Tensor], info: Any) -> Any:
    """Load shards or whole tensors. If `broadcast_from_rank0` is set, load the state dict of the model's first rank."""
    names = {uncompiled(name): name for name in model.state_dict()}
    state_dict = {names.get(name, name): value for name, value in (state_dict or {}).items()}
    if info.broadcast_from_rank0:
        return model.load_full_state_dict(state_dict, strict=info.strict)
    if not state_dict:  # as in PyTorch, a rank may pass an empty state dict
        return _IncompatibleKeys([], [])
    return model.load_state_dict(state_dict, strict=info.strict)


def _load_optimizers(
    original: _Original, model: ShardLite, optimizers: tuple[Optimizer, ...], state_dict: _State, info: Any
) -> None:
    """Load shards, or this rank's parts of whole tensors. Collective.

    Raises:
        LayoutError: `state_dict` is not the state of an optimizer, or it has shards where `info` asks for whole
            tensors. Raised on every rank.
    """
    state = ModelState(model)
    read = not info.broadcast_from_rank0 or state.context.rank == 0
    wholes = [optimizer for optimizer in optimizers if isinstance(optimizer, WholeParameters)]
    if wholes:
        info = replace(info, strict=False)  # this rank has no state of parameters that other ranks own
    _agree(state, _misfit(model, optimizers, state_dict, info) if read else None)
    with state.context.reporting_failures("its set_optimizer_state_dict"):
        if info.full_state_dict:
            state_dict = _shards_of(state_dict, model, wholes, broadcast=info.broadcast_from_rank0)
            info = replace(info, full_state_dict=False, broadcast_from_rank0=False)
        original(model, optimizers, state_dict, info)


def _agree(state: ModelState, problem: Exception | None) -> None:
    """Raise an error on every rank if any rank has a problem. Collective."""
    timeout, watch = state.context.timeout, state.context.reports.watching
    agree(state.ranks, [], problem, what="set_optimizer_state_dict", timeout=timeout, watch=watch)


def _misfit(model: ShardLite, optimizers: Sequence[Optimizer], state_dict: _State, info: Any) -> Exception | None:
    """Return an error if a state dict has another format than `get_optimizer_state_dict`, or other parameters."""
    flat = all(isinstance(name, str) and name.startswith(("state.", "param_groups.")) for name in state_dict)
    if not state_dict or not ({"state", "param_groups"} <= state_dict.keys() or flat):
        return LayoutError(
            f"set_optimizer_state_dict: a state has the keys 'state' and 'param_groups', got {some_of(state_dict)}"
            f"{': with broadcast_from_rank0 only the first rank needs it' if not info.broadcast_from_rank0 else ''}"
        )
    if info.full_state_dict and any(isinstance(leaf, ShardTensor) for leaf in tree_leaves(state_dict)):
        return LayoutError(
            "set_optimizer_state_dict(full_state_dict=True) takes whole tensors, got shards: pass options without it, "
            "or get the state with full_state_dict=True"
        )
    try:
        for optimizer in optimizers if "state" in state_dict and not _is_numbered(state_dict) else ():
            _groups_for(model, optimizer, state_dict["param_groups"], strict=info.strict)
    except LayoutError as error:
        return LayoutError(f"set_optimizer_state_dict of {type(optimizer).__name__}: {error}")
    return None


def _is_numbered(state_dict: _State) -> bool:
    return any(isinstance(key, int) for group in state_dict["param_groups"] for key in group["params"])


def _groups_for(
    model: ShardLite, optimizer: Optimizer, groups: Sequence[Group], *, strict: bool
) -> list[dict[str, Any]]:
    """Return the groups of a named state, divided and ordered as the groups of an optimizer.

    Raises:
        LayoutError: the groups do not fit.
    """
    given = {name for group in groups for name in group["params"]}
    names: dict[Tensor, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):  # a tied parameter has several names
        if param not in names or uncompiled(name) in given:
            names[param] = uncompiled(name)
    own = [[names[param] for param in group["params"] if param in names] for group in optimizer.param_groups]
    return match_groups(groups, [group["params"] for group in groups], optimizer.param_groups, own, strict=strict)


def _split(original: _Original, model: ShardLite, optimizer: Optimizer, state_dict: _State, info: Any) -> _State:
    """Return the part of a named state that belongs to one of several optimizers."""
    state, groups = state_dict["state"], state_dict["param_groups"]
    if _is_numbered(state_dict):
        numbered: _State = original(model, optimizer, state_dict, info)
        return numbered
    own = _groups_for(model, optimizer, groups, strict=info.strict)
    names = [name for group in own for name in group["params"]]
    needed = {name for name, param in zip(names, params_of(optimizer), strict=True) if param.requires_grad}
    if info.strict and state and (missing := needed - state.keys()):
        raise LayoutError(f"the state lacks {some_of(missing)}: pass StateDictOptions(strict=False) to load the rest")
    return {"state": {name: state[name] for name in names if name in needed & state.keys()}, "param_groups": own}


def _shards_of(state_dict: _State, model: ShardLite, wholes: Sequence[WholeParameters], *, broadcast: bool) -> _State:
    """Return an optimizer's state in which this rank's part replaces each whole tensor of a parameter's shape.

    Tensors of parameters that `wholes` step stay whole.

    If `broadcast` is set, the model's first rank sends its state, one tensor after the other.
    """
    ours = {uncompiled(name): value for name, value in model.state_dict().items()}
    shards = {uncompiled(name): shard for name, shard in model.named_parameters(remove_duplicate=False)}
    state = ModelState(model)

    stay = {name for name, shard in shards.items() if any(member_of(each, shard) for each in wholes)}

    def part(path: Sequence[Any], value: Any, own: Any) -> Any:
        if broadcast and _is_sent(value):
            # `empty_like` would copy the strides of a placeholder, which are 0.
            target = torch.empty(value.shape, dtype=value.dtype) if own is value else own.detach()
            value = _send(state.context, target)
        if not isinstance(value, Tensor):
            return value
        name, key = _entry_of(path, shards)
        mine = ours.get(name)
        if not isinstance(mine, ShardTensor) or name in stay or key in numbers or value.shape != mine.shape:
            return value.clone()  # optimizers keep and change the tensors that they load
        local = value.detach().reshape(-1)[mine.start : mine.stop].to(mine.device, copy=True)
        return ShardTensor(local.view(shards[name].shape), mine.shape, mine.start)

    form = _form(state, state_dict) if broadcast else state_dict
    numbers = _numbers(form, ours)
    own = state_dict if state.context.rank == 0 else form
    parts: _State = tree_map_with_path(part, form, own)
    return parts


def uncompiled(name: str) -> str:
    """Return the name that PyTorch's functions give to a parameter inside a submodule compiled by `torch.compile`.

    If the whole module that was wrapped is compiled, they keep the first `_orig_mod.`.
    """
    return name.replace("._orig_mod.", ".")


def _numbers(state_dict: _State, shards: Mapping[str, Any]) -> set[str]:
    """Return the keys of the values that the optimizer of a whole state keeps once per parameter."""
    tensors = [(path, value) for path, value in tree_flatten_with_path(state_dict)[0] if isinstance(value, Tensor)]
    entries = [(*_entry_of(path, shards), value.numel()) for path, value in tensors]
    return numbers_among((key, shards[name].numel(), numel) for name, key, numel in entries if name in shards)


def _entry_of(path: Sequence[Any], names: Container[str]) -> tuple[str, str]:
    """Return the parameter's name and the key of a leaf whose path is `state.NAME.KEY`, nested or flattened."""
    name, key = name_of_value(path).removeprefix("state."), ""
    while name and name not in names:
        name, _, last = name.rpartition(".")
        key = f"{last}.{key}" if key else last
    return name, key


def _form(state: ModelState, state_dict: _State) -> _State:
    """Return the first rank's state, with a placeholder of the same shape and dtype for each tensor. Collective.

    Raises:
        CheckpointError, LayoutError: the state contains something that is neither a plain value nor a tensor. Raised on
            every rank.
    """
    context, what = state.context, "the state of the optimizer"
    content, problem = b"", None
    try:
        if context.rank == 0:
            content = pickled(what, tree_map(_placeholder, state_dict)).getvalue()
    except CheckpointError as error:
        problem = error
    _agree(state, problem)
    length = context.all_gather_int(len(content), "the length of an optimizer's state")[0]
    data = torch.frombuffer(bytearray(content or bytes(length)), dtype=torch.uint8)
    form: _State = unpickled(what, BytesIO(_send(context, data).cpu().numpy().tobytes()))
    return form


def _send(context: Context, tensor: Tensor) -> Tensor:
    """Return the first rank's tensor. Other ranks pass a tensor of the same shape and dtype. Collective."""
    tensor = tensor.to(context.device).contiguous()
    if tensor.numel():
        operation = context.operation("an optimizer's state", "values")
        for transport in context.transports:
            broadcast_tensor(tensor.view(-1).view(torch.uint8), transport, operation=operation)
    return tensor


def _is_sent(value: object) -> bool:
    """Return whether a value is sent separately. Numbers are not, because the result of `_form` contains them."""
    return isinstance(value, Tensor) and value.ndim > 0


def _placeholder(value: Any) -> Any:
    return torch.empty((), dtype=value.dtype).expand(value.shape) if _is_sent(value) else value


_REPLACEMENTS: dict[str, _Original] = {
    "_verify_options": _verify_options,
    "_unflatten_model_state_dict": _unflatten_model_state,
    "_iterate_valid_model_state": _iterate_model_state,
    "_get_model_state_dict": _get,
    "_get_optim_state_dict": _get,
    "_split_optim_state_dict": _split,
    "_load_model_state_dict": _load_model,
    "_load_optim_state_dict": _load_optimizers,
}
