"""Parameters of a wrapped model: placeholders without values, full parameters, and shards.

While a unit is sharded, each of its parameters is a `Placeholder`, which keeps the parameter's shape, dtype and
attributes. Before an operation reads values, it asks the wrapped model to unshard the unit. Outside of a forward or a
backward the model refuses with an error. So no computation reads the memory of a placeholder, which is NaN.

Assignment to `__class__` turns a parameter into a placeholder and back, as in
`torch.nn.parameter.UninitializedParameter`. The parameter stays the same object and keeps its hooks. While the
parameter is full, its operations run as usual.

Each parameter has an owner, a record of `engine/local_shards.py`. The owner is called when the parameter is used.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.errors import LayoutError

OTHER_SHAPES = (
    "load `full_state_dict()` into a new, unwrapped model, change its shapes (`resize_token_embeddings(...)`), wrap "
    "it, and create a new optimizer"
)
"""The remedy in errors that refuse to change the shape of a wrapped model's parameter."""

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "requires_grad", "grad"),
    *("grad_dtype", "is_leaf", "grad_fn", "output_nr", "retains_grad", "_version", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_sparse_csr", "is_nested"),
    *("is_quantized", "is_mps", "is_xpu", "is_mkldnn", "is_mtia", "is_maia", "is_ipu", "is_vulkan", "is_xla"),
)
_SETTABLE = ("requires_grad", "grad", "names", "_backward_hooks", "grad_dtype")
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset"),
    *("untyped_storage", "get_device", "__len__", "is_floating_point", "is_complex", "is_signed"),
    *("is_inference", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "new", "new_empty"),
    *("new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor"),
)
_FUNCTIONS = (
    *("numel", "is_floating_point", "is_complex", "is_signed", "is_inference", "get_device", "result_type"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)

_harmless: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(Tensor, name)),
        *(getattr(Tensor, name).__set__ for name in _SETTABLE if hasattr(Tensor, name)),
        *(getattr(Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in _FUNCTIONS),
        torch.autograd.backward,
        torch.autograd.grad,
    ]
)
"""Functions that do not read the values of their arguments."""


_homes: Any = WeakTensorKeyDictionary()
"""Owner of each parameter of a wrapped model. The owner unshards the unit, and returns or drops the gradient."""


_handed_out: Any = WeakTensorKeyDictionary()
"""Weak references to the living `.data` tensors of each parameter.

The references are not an attribute of the parameter, because attributes are pickled with the parameter.
"""


class Sharded:
    """Mixin class of a wrapped model's parameters. The optimizer steps their shards, not these parameters."""

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the shard or, before the reduction, this rank's own gradient."""
        home = _homes.get(self)
        return _own_grad.__get__(self) if home is None else home.gradient()  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        home = _homes.get(self)
        if home is None:  # with a single rank, the parameter is its own shard
            _own_grad.__set__(self, value)
            return
        if value is not None and _runs_compiled_autograd():
            raise LayoutError(
                f"compiled autograd sets the gradient of {home.name!r} where no reduction sees it: run the backward "
                "without it (torch._dynamo.config.compiled_autograd = False); the forward may be compiled"
            )
        if value is not None:
            raise LayoutError(
                f"parameter {home.name!r} belongs to a wrapped model, whose optimizer steps shards: assign the "
                "gradient to the shard, in `parameters()` of the ShardLite model, or write into the gradient in a hook "
                "(`param.grad.copy_(...)`)"
            )
        home.drop_gradient()

    @property
    def data(self) -> Tensor:
        """Detached values. A write to these values is detected at the end of the forward that makes the write."""
        home = _homes.get(self)
        if home is not None:
            home.touch()
        return _hand_out(self, _own_data.__get__(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        if self in _homes:
            _copy_into(self, value)
        else:
            _own_data.__set__(self, value)


def _runs_compiled_autograd() -> bool:
    module = sys.modules.get("torch._dynamo.compiled_autograd")  # importing it would import the compiler
    return module is not None and bool(module.in_compiled_autograd_region)


class Placeholder(Sharded):
    """A parameter whose unit is sharded."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Unshard the placeholders among the arguments before `func` uses them."""
        kwargs = kwargs or {}
        # `register_multi_grad_hook` and `get_gradient_edge` find a parameter's node through a view of itself.
        harmless = func in _harmless or (func is Tensor.view_as and args[0] is args[1])
        used = [] if harmless else [each for each in tree_leaves((args, kwargs)) if isinstance(each, Placeholder)]
        if harmless or not all(each in _homes for each in used):  # a placeholder without an owner is being wrapped
            with as_they_are():
                return func(*args, **kwargs)
        for each in used:
            _homes[each].use()
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        """Return the shape and the dtype instead of the values."""
        with as_they_are():
            return f"Parameter, sharded: shape {list(self.shape)}, dtype {self.dtype}"  # type: ignore[attr-defined]


as_they_are: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Context manager in which operations do not unshard placeholders. PyTorch's own class is used because it is fast."""


def attach(param: nn.Parameter, home: Any) -> None:
    """Make `param` a parameter of a wrapped model, owned by `home`."""
    _homes[param] = home
    kind = type(param)
    if not issubclass(kind, Sharded):
        param.__class__ = _mixed(Sharded, kind)


_requires_grad = attrgetter("requires_grad")  # `map` with this function makes no Python call per tensor


def requires_grad_of(params: Iterable[Tensor]) -> list[bool]:
    """Return `requires_grad` of each parameter or shard."""
    with as_they_are():
        return list(map(_requires_grad, params))


def become(what: type, pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Turn parameters into placeholders or full ones, given pairs of a parameter and its new memory.

    `what` is the class `Placeholder`, or `Sharded` for full parameters.
    """
    put, turned = _own_data.__set__, _turned
    with as_they_are():
        for param, memory in pairs:
            put(param, memory)
            kind = type(param)
            if (other := turned(what, kind)) is not kind:
                param.__class__ = other


def detach(param: nn.Parameter, values: Tensor) -> None:
    """Undo `attach`: restore the former class of a wrapped model's parameter, and overwrite its values with `values`.

    The library's hooks and attributes are removed from the parameter. The program's own hooks and attributes stay.
    """
    _homes.pop(param, None)
    _handed_out.pop(param, None)
    with as_they_are():
        _own_data.__set__(param, values)
        _own_grad.__set__(param, None)
        param.__class__ = getattr(type(param), "original", type(param))
        hooks = param._post_accumulate_grad_hooks or {}
    for number in [number for number, hook in hooks.items() if _is_ours(hook)]:
        del hooks[number]
    for name in [name for name in vars(param) if name.startswith("shardlite")]:
        delattr(param, name)


def _is_ours(hook: Any) -> bool:
    return getattr(getattr(hook, "func", hook), "__module__", "").startswith("shardlite.")


@lru_cache(maxsize=256)
def is_plain(kind: type) -> bool:
    """Return whether the class of a tensor is, or was before its model was wrapped, `Tensor` or `nn.Parameter`."""
    return getattr(kind, "original", kind) in (Tensor, nn.Parameter)


def register_first(param: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Register a hook on the accumulated gradient of `param`. It runs before the hooks that `param` already has."""
    with as_they_are():
        earlier = list(param._post_accumulate_grad_hooks or ())
        param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        hooks: Any = param._post_accumulate_grad_hooks
        for number in earlier:  # autograd reads the order of insertions, which `move_to_end` would not change
            hooks[number] = hooks.pop(number)


def take_grad(param: nn.Parameter) -> tuple[Tensor | None, bool]:
    """Remove the accumulated gradient of `param`. Return the gradient, and whether `param` has several hooks."""
    with as_they_are():
        grad: Tensor | None = _own_grad.__get__(param)
        _own_grad.__set__(param, None)
        hooks = param._post_accumulate_grad_hooks
    return grad, hooks is not None and len(hooks) > 1


_own_grad: Any = torch._C.TensorBase.grad
_own_data: Any = torch._C.TensorBase.data


@cache
def _turned(what: type, kind: type) -> type:
    """Return the class of parameters of the class `kind` as a placeholder or a full parameter (`what`)."""
    if issubclass(kind, Placeholder) is (what is Placeholder):
        return kind
    return _mixed(what, getattr(kind, "original", kind))


@cache
def _mixed(what: type, kind: type) -> type:
    return type(kind)(f"{what.__name__}{kind.__name__}", (what, kind), {"original": kind})


class Shard(nn.Parameter):
    """A parameter that an optimizer steps: this rank's part of a module's parameter.

    Writes through `.data` increment the version counter of a shard, but not that of an ordinary parameter. So after
    such a write, the next forward gathers the weights again.
    """

    @property
    def data(self) -> Tensor:
        """A detached view of the shard. The view and the shard share one version counter."""
        return _hand_out(self, self.detach())

    @data.setter
    def data(self, value: Tensor) -> None:
        _copy_into(self, value)


class SteppingShard(Shard):
    """A shard whose latest step may still run on a stream of its own. Operations on the shard wait for the step."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Order the current stream after the steps of the shards among the arguments, and call `func`."""
        kwargs = kwargs or {}
        wait_for_steps(func, args, kwargs)
        with as_they_are():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Shard:
        """Copy as a shard without a step."""
        memo[id(self)] = copied = Shard(self.data.clone(), self.requires_grad)
        return copied


get_grad, set_grad = _own_grad.__get__, _own_grad.__set__

_waits: Any = WeakTensorKeyDictionary()
"""For each shard that may be a `SteppingShard`, the function by which a stream waits for the latest step."""


def begin_step(shard: Tensor, wait: Callable[[], None]) -> None:
    """Let operations on `shard` first call `wait`, which orders the current stream after a step of the shard."""
    if type(shard) is not SteppingShard:
        _waits[shard] = wait
    if type(shard) is Shard:  # otherwise it is watched, and calls `wait_for_steps`, too
        shard.__class__ = SteppingShard


def wait_for_steps(func: Callable[..., Any], *arguments: Any) -> None:
    """Order the current stream after steps of the shards among the arguments of `func`, if it reads their values.

    In `as_they_are()`, the library itself calls `func`, and has waited if it must.
    """
    if torch._C._is_torch_function_enabled() and (func not in _harmless or func == get_grad):  # a step may write it
        for each in tree_leaves(arguments):
            if isinstance(each, Shard) and (wait := _waits.get(each)) is not None:
                wait()


def end_steps(shards: Iterable[Any]) -> None:
    """Undo `begin_step`, because streams have waited for the steps."""
    for shard in shards:
        if type(shard) is SteppingShard:
            shard.__class__ = Shard  # type: ignore[assignment]


def resume_steps(tensors: Iterable[Any]) -> None:
    """Make `SteppingShard`s of the shards that are no longer watched, and whose steps may still run."""
    if _waits:
        for each in tensors:
            if type(each) is Shard and each in _waits:
                each.__class__ = SteppingShard


class LateTensor(Tensor):
    """A tensor that a stream writes for which others do not wait. Functions that read it first call `wait`."""

    wait: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait, and call `func` with ordinary tensors. So its results are ordinary tensors, copies included."""
        leaves, tree = tree_flatten((args, kwargs or {}))
        for place, each in enumerate(leaves):
            if isinstance(each, LateTensor):
                if func not in _harmless:
                    each.wait()
                with as_they_are():
                    leaves[place] = each.as_subclass(Tensor)
        args, kwargs = tree_unflatten(leaves, tree)
        return func(*args, **kwargs or {})


def late(tensor: Tensor, wait: Callable[[], None]) -> Tensor:
    """Return `tensor` with the same memory as a `LateTensor`."""
    made = tensor.as_subclass(LateTensor)
    made.wait = wait
    return made


def _hand_out(param: Any, view: Tensor) -> Tensor:
    """Record that the program has `view` as a `.data` tensor of `param`, and return `view`."""
    _handed_out[param] = [*(each for each in _handed_out.get(param, ()) if each() is not None), ref(view)]
    return view


def _copy_into(param: Any, value: Tensor) -> None:
    """Implement `param.data = value` with a copy, because the memory of `param` is a part of a larger buffer.

    A former `.data` tensor that is alive gets its own memory and keeps its values, as with an ordinary parameter. If
    `value` is a view of `param` (`param.data.T`), `value` also gets its own memory.

    Raises:
        LayoutError: the shape differs, or views of a former `.data` tensor are alive and would change too.
    """
    if value.shape != param.shape:
        raise LayoutError(
            f"a wrapped model's parameter of shape {list(param.shape)} was assigned data of shape {list(value.shape)}, "
            f"but the size of its shards is fixed: {OTHER_SHAPES}"
        )
    there = param.data
    with as_they_are():
        if value.data_ptr() == there.data_ptr() and value.stride() == there.stride():
            return
        held = [each for former in _handed_out[param] if (each := former()) is not None and each is not there]
        held = [each for each in held if each.data_ptr() == there.data_ptr()]  # drops those that view a former buffer
        for each in held:
            _check_unviewed(each, value)
        is_view = there.data_ptr() <= value.data_ptr() < there.data_ptr() + there.nbytes
        for each in (*held, value) if is_view else held:
            _own_data.__set__(each, each.detach().clone())
    there.copy_(value)


def _check_unviewed(former: Tensor, value: Tensor) -> None:
    """Raise if views of `former` may be alive, unless `value` was computed from `former`.

    An autograd graph that saved `former` counts as a view, because PyTorch cannot distinguish graphs and views.
    """
    if former._use_count() > 1 and value.grad_fn is None and value._base is not former:  # type: ignore[attr-defined]
        raise LayoutError(
            "a wrapped model's parameter was assigned other memory (`.data = ...`) while a view of its former `.data`, "
            "or a graph that saved it, is alive and would change as well: keep a copy instead, `.data.clone()`"
        )


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor. Its class is found by name, because importing DTensor is slow."""
    return any(f"{each.__module__}.{each.__qualname__}".endswith(".DTensor") for each in type(value).__mro__)


def scripts(model: nn.Module) -> set[nn.Module]:
    """Return the TorchScript modules and all modules inside them. These modules accept no hooks."""
    outer = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
    return {inner for script in outer for inner in script.modules()}
