"""Make `torch.distributed.checkpoint.state_dict` handle wrapped models.

`torch.distributed.checkpoint.state_dict` finds an optimizer's parameters by walking through the model's submodules,
whose own parameters are placeholders, and gathers and cuts nothing but DTensors. The private functions that do so are
replaced: whoever has imported the public ones by name calls the private ones, too.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from io import BytesIO
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as distributed
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only, tree_map_with_path

from shardlite.apps.checkpoint.contents import pickled, unpickled
from shardlite.comm import agree
from shardlite.comm import broadcast as broadcast_tensor
from shardlite.engine import NUMBERS
from shardlite.errors import CheckpointError, LayoutError, some_of
from shardlite.model import ShardLite
from shardlite.optim import AdamW
from shardlite.params import ShardTensor

_State: TypeAlias = dict[str, Any]
_Walk: TypeAlias = Callable[..., Iterator[tuple[str, Any]]]


def teach() -> None:
    """Let `torch.distributed.checkpoint.state_dict` know wrapped models."""
    changes: dict[str, Callable[[Any], Any]] = {
        "_verify_options": _check_options,
        "_iterate_valid_model_state": _walk,
        "_init_optim_state": _init_state,
        "_get_model_state_dict": _get,
        "_get_optim_state_dict": _get,
        "_load_model_state_dict": _load_model,
        "_load_optim_state_dict": _load_optimizers,
        "_unflatten_model_state_dict": _check_names,
    }
    for name, change in changes.items():
        setattr(distributed, name, change(getattr(distributed, name)))


def _check_options(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def verify(model: nn.Module, *args: Any, submodules: Any = None, **kwargs: Any) -> Any:
        """Check the options as ever, and refuse `submodules`, which PyTorch itself has deprecated."""
        wrapped = _wrapped(model)
        if wrapped is not None and submodules:
            raise LayoutError(
                "submodules=: not supported for a ShardLite model: select from all names of its state dict"
            )
        return original(wrapped or model, *args, submodules=submodules, **kwargs)

    return verify


def _check_names(original: Callable[..., _State]) -> Callable[..., _State]:
    @wraps(original)
    def unflatten(model: nn.Module, state_dict: _State) -> _State:
        """Refuse a state dict by modules, which PyTorch itself has deprecated."""
        if _wrapped(model) is not None and any(isinstance(key, nn.Module) for key in state_dict):
            raise LayoutError("a state dict by modules is not supported for a ShardLite model: give it by names")
        return original(model, state_dict)

    return unflatten


def _wrapped(model: nn.Module) -> ShardLite | None:
    """Return the wrapped model that `model` is, or that `torch.compile` has compiled, if it is one.

    Raises:
        LayoutError: it has a wrapped model inside.
    """
    if not isinstance(model, ShardLite):  # which has the attributes of a compiled module inside it
        model = getattr(model, "_orig_mod", model)
    if isinstance(model, ShardLite):
        return model
    inside = next((name for name, each in model.named_modules() if isinstance(each, ShardLite)), None)
    if inside is not None:
        raise LayoutError(
            f"the state dict of a {type(model).__name__} with a ShardLite model inside, {inside!r}: pass the ShardLite "
            "model itself, and the rest of the modules by itself"
        )
    return None


def _walk(original: _Walk) -> _Walk:
    @wraps(original)
    def entries(model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of parameters and persistent buffers."""
        wrapped = _wrapped(model)
        if wrapped is None:
            yield from original(model, *args, **kwargs)
            return
        shards = dict(wrapped.named_parameters(remove_duplicate=False))
        yield from ((name, shards.get(name, value)) for name, value in wrapped.state_dict().items())

    return entries


def _init_state(original: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
    @wraps(original)
    def init(optimizer: Optimizer) -> None:
        """Make the states of an optimizer: by a step with gradients of zero, unless it steps in the backward."""
        if isinstance(optimizer, AdamW) and optimizer.in_backward:
            optimizer.init_state()
        else:
            original(optimizer)

    return init


def _get(original: Callable[..., _State]) -> Callable[..., _State]:
    @wraps(original)
    def get(model: nn.Module, *args: Any) -> _State:
        """Return shards; or copies that are whole, if `full_state_dict` asks for them, one after the other."""
        *others, info = args
        wrapped = _wrapped(model)
        if wrapped is None or not info.full_state_dict:
            return original(wrapped or model, *args)
        wanted = not info.cpu_offload or wrapped._context.rank == 0
        mine = original(wrapped, *others, replace(info, full_state_dict=False, cpu_offload=False))

        def copied(value: Tensor) -> Tensor | None:
            tensor = value.full_tensor() if isinstance(value, ShardTensor) else value.clone()
            return (tensor.cpu() if info.cpu_offload else tensor) if wanted else None

        whole: _State = tree_map_only(Tensor, copied, mine)
        return whole if wanted else {}

    return get


def _load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load(model: nn.Module, state_dict: Mapping[str, Tensor], info: Any) -> Any:
        """Load shards or whole tensors; with `broadcast_from_rank0`, those of the model's first rank."""
        wrapped = _wrapped(model)
        if wrapped is None:
            return original(model, state_dict, info)
        if info.broadcast_from_rank0:
            return wrapped.load_full_state_dict(state_dict, strict=info.strict)
        if not state_dict:  # as PyTorch does: a rank may have nothing to load
            return _IncompatibleKeys([], [])
        return wrapped.load_state_dict(state_dict, strict=info.strict)

    return load


def _load_optimizers(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def load(model: nn.Module, optimizers: tuple[Optimizer, ...], state_dict: _State, info: Any) -> None:
        """Cut whole tensors into this rank's shards; load those as ever. Other ranks are told of an error.

        Raises:
            LayoutError: on every rank, if the state is none, or is not whole.
        """
        wrapped = _wrapped(model)
        if wrapped is None:
            original(model, optimizers, state_dict, info)
            return
        taken = not info.broadcast_from_rank0 or wrapped._context.rank == 0
        agree(
            wrapped._groups,
            [],
            _misfit(state_dict, info) if taken else None,
            what="set_optimizer_state_dict",
            timeout=wrapped._context.timeout,
        )
        with wrapped._context.reporting_failures("its set_optimizer_state_dict"):
            if info.full_state_dict:
                state_dict = _cut(state_dict, wrapped, broadcast=info.broadcast_from_rank0)
                info = replace(info, full_state_dict=False, broadcast_from_rank0=False)
            original(wrapped, optimizers, state_dict, info)

    return load


def _misfit(state_dict: _State, info: Any) -> LayoutError | None:
    """Return why something is not the state of an optimizer that `get_optimizer_state_dict` has returned."""
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
    return None


def _cut(state_dict: _State, wrapped: ShardLite, *, broadcast: bool) -> _State:
    """Return an optimizer's state with this rank's part of each whole tensor that is like its parameter.

    With `broadcast` the state is that of the model's first rank, which sends one tensor after the other.
    """
    ours, shards = wrapped.state_dict(), dict(wrapped.named_parameters(remove_duplicate=False))
    sent = _Broadcast(wrapped, state_dict) if broadcast else None

    def cut(path: Sequence[Any], value: Any) -> Any:
        if sent is not None and _is_sent(value):
            value = sent.receive(value)
        if not isinstance(value, Tensor):
            return value
        name, key = _entry_of(path, shards)
        mine = ours.get(name)
        if not isinstance(mine, ShardTensor) or key in NUMBERS or value.shape != mine.shape:
            return value.clone()  # optimizers keep what they are given, and change it
        local = value.detach().reshape(-1)[mine.start : mine.stop].to(mine.device, copy=True)
        return ShardTensor(local.view(shards[name].shape), mine.shape, mine.start)

    whole: _State = tree_map_with_path(cut, state_dict if sent is None else sent.form)
    return whole


def _entry_of(path: Sequence[Any], names: Container[str]) -> tuple[str, str]:
    """Return the parameter and the key of a leaf: of `state.NAME.KEY`, nested or, if that was asked for, flattened."""
    steps = [str(getattr(step, "key", getattr(step, "idx", ""))) for step in path]
    name, key = ".".join(steps).removeprefix("state."), ""
    while name and name not in names:
        name, _, last = name.rpartition(".")
        key = f"{last}.{key}" if key else last
    return name, key


class _Broadcast:
    """A state of a model's first rank on its way to all ranks: at first its form, then its tensors one by one.

    Raises:
        CheckpointError, LayoutError: the state holds something else than tensors and plain values; on every rank.
    """

    def __init__(self, wrapped: ShardLite, state_dict: _State) -> None:
        self._context = context = wrapped._context
        self._tensors: Iterator[Tensor] | None = None
        told, problem = b"", None
        if context.rank == 0:
            self._tensors = iter([each for each in tree_leaves(state_dict) if _is_sent(each)])
            try:
                told = pickled("the state of the optimizer", tree_map(_stand_in, state_dict)).getvalue()
            except CheckpointError as error:
                problem = error
        agree(wrapped._groups, [], problem, what="set_optimizer_state_dict", timeout=context.timeout)
        length = context.all_gather_int(len(told), "the length of an optimizer's state")[0]
        data = torch.frombuffer(bytearray(told or bytes(length)), dtype=torch.uint8)
        told = self._send(data.to(context.device)).cpu().numpy().tobytes()
        self.form: _State = unpickled("the state of the optimizer", BytesIO(told))
        """The state, with something of the same shape and dtype instead of each tensor."""

    def receive(self, stand_in: Tensor) -> Tensor:
        """Return the next tensor of the form."""
        if self._tensors is None:
            return self._send(torch.empty(stand_in.shape, dtype=stand_in.dtype, device=self._context.device))
        return self._send(next(self._tensors).detach().to(self._context.device).contiguous())

    def _send(self, tensor: Tensor) -> Tensor:
        """Return the first rank's tensor, given one of the same shape and dtype."""
        if tensor.numel():
            operation = self._context.operation("an optimizer's state", "values")
            for transport in self._context.transports:
                broadcast_tensor(tensor.view(-1).view(torch.uint8), transport, operation=operation)
        return tensor


def _is_sent(value: object) -> bool:
    """Return whether a value is sent by itself; numbers travel with the form."""
    return isinstance(value, Tensor) and value.ndim > 0


def _stand_in(value: Any) -> Any:
    return torch.empty((), dtype=value.dtype).expand(value.shape) if _is_sent(value) else value
