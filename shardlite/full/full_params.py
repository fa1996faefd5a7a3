"""Full parameters of a sharded model: reading, writing, and state dicts in the format of the unsharded model.

`gathered`, `state_dict` and `make_plain` are collective: every rank must call them. A flat is a flat parameter: the
parameters of one kind in a unit, in one buffer.

Legend: `W` ranks that share a model, `S` elements per shard; a full buffer has `W*S` elements.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardlite.comm import Context, all_gather_json, problem_in
from shardlite.errors import LayoutError, PhaseError, check_int, lacking, some_of
from shardlite.full.gathered import gathered
from shardlite.full.pieces import Piece, gather_param, pieces_of
from shardlite.full.weight_stream import WeightStream
from shardlite.params import Flat, ShardInfo, ShardTensor, Unit, is_dtensor, scripts
from shardlite.params.parameters import detach
from shardlite.params.shard_tensor import apart
from shardlite.weights import Calls, Gathering

NO_COPY = (
    "a wrapped model cannot be copied or pickled, because it is connected to other ranks. For a copy, wrap a second "
    "instance with the same options and load it, on every rank: "
    "`twin = ShardLite(make_model()); twin.load_full_state_dict(model.full_state_dict(rank=0))`. "
    "For moving averages use shardlite.EMA, for a file full_state_dict(), for a plain module unwrap()"
)


class FullParameters:
    """Access to the full parameters of one wrapped model."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        context: Context,
        gatherer: Gathering,
        ignored: Collection[Tensor],
    ) -> None:
        """Register hooks on the module. Each rank has its own parameters in `ignored`."""
        self._module = module
        self._units = units
        self._context = context
        self._gatherer = gatherer
        self._ignored = ignored
        self.stream = WeightStream(context)
        self._places: dict[Tensor, tuple[Unit, Flat, int]] = {
            param: (unit, flat, i) for unit in units for flat in unit.flats for i, param in enumerate(flat.params)
        }
        self._reading = False
        self.gathers_states = False
        """Whether `state_dict()` of a sharded module gathers weights, on every rank, and is not refused."""

        self._states = ExitStack()  # left at the end of such a call
        self._states_of: nn.Module | None = None
        self._versions: list[int] = []
        self._hooks: list[RemovableHandle] = []
        reads = partial(self._refuse, "use full_state_dict() of the ShardLite model, or be inside `gathered()`")
        loads = partial(self._refuse, "use load_full_state_dict() of the ShardLite model, or load inside `gathered()`")
        for each in set(module.modules()) - scripts(module):
            self._hooks.append(each.register_state_dict_post_hook(_separate))  # type: ignore[no-untyped-call]
            if any(unit.needs_gather for unit in units):
                self._hooks.append(each.register_state_dict_pre_hook(self._gather_states))  # type: ignore[no-untyped-call]
                self._hooks.append(each.register_state_dict_post_hook(partial(self._end_states)))  # type: ignore[no-untyped-call]
                self._hooks.append(each.register_state_dict_pre_hook(reads))  # type: ignore[no-untyped-call]
                self._hooks.append(each.register_load_state_dict_pre_hook(loads))  # type: ignore[no-untyped-call]

    def gathered(self, names: Sequence[str], calls: Calls | None, *, writeback: bool) -> AbstractContextManager[None]:
        """Unshard the units of the named parameters, or all units if `names` is empty. See `gathered.py`.

        Raises:
            LayoutError: there is no parameter with one of these names.
        """
        return gathered(self._units_with(names), self._context, self._gatherer, calls, writeback=writeback)

    def state_dict(self, rank: int | None, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return CPU copies of all parameters and persistent buffers. If `names` is given, copy only the named ones.

        Ranks other than `rank` get an empty dict. If `rank` is `None`, every rank gets the copies.
        """
        entries = {name: entry for name, entry in self.entries().items() if names is None or name in names}
        kept = set(entries.values())
        wanted = rank is None or rank == self._context.rank
        full: dict[Tensor, Tensor] = {}
        for piece in pieces_of(self._units):
            values = piece.gather(self._context)
            if wanted:
                views = ((param, view) for param, view in piece.views(values) if param in kept)
                full.update({param: view.to("cpu", copy=True) for param, view in views})
            del values  # free it before the next piece is gathered
        self._context.trim(keep=0)
        if not wanted:
            return {}
        return {name: full[entry] if entry in full else entry.to("cpu", copy=True) for name, entry in entries.items()}

    def make_plain(self) -> None:
        """Turn the module's parameters into ordinary parameters with full values. Gather one piece at a time."""
        with torch.inference_mode(False), torch.no_grad():
            for piece in pieces_of(self._units):
                values = piece.gather(self._context)
                for param, view in piece.views(values):
                    detach(param, view.clone())
                    ShardInfo.forget(param)
                del values  # free it before the next piece is gathered
        self._context.trim(keep=0)
        while self._hooks:
            self._hooks.pop().remove()

    def parameters(
        self, dtype: torch.dtype | None, max_bytes: int | None, check: Callable[[], object], *, trainable: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of full parameters, see `ShardLite.full_parameters`. `check` raises if they cannot be read."""
        names: dict[Tensor, list[str]] = {}
        for name, param in self._module.named_parameters(remove_duplicate=False):
            if param.requires_grad or not trainable:
                names.setdefault(param, []).append(name)
        pieces: list[Piece] = []

        def check_arguments() -> None:
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"full_parameters(dtype=...) must be a floating-point dtype, got {dtype!r}")
            if max_bytes is not None:
                check_int("full_parameters(max_bytes=...), a number of bytes,", max_bytes)
            pieces.extend(pieces_of(self._units, dtype=dtype, only=names, max_bytes=max_bytes))

        facts = [f"full_parameters(dtype={dtype}, max_bytes={max_bytes}, trainable={trainable})"]
        problem = problem_in(check, check_arguments)
        self._context.agree("full_parameters()", problem, facts, subject="calls", loads=False)
        self._gatherer.settle()
        yield from self.stream.over(pieces, names, max_bytes)
        self._context.trim(keep=0)
        for own in filter(self._ignored.__contains__, names):
            value = own.detach().to(dtype if own.is_floating_point() else None)
            yield from ((name, value.clone()) for name in names[own])

    def gradient(self, name: str, check: Callable[[], object]) -> Tensor | None:
        """Return a copy of a full gradient, see `ShardLite.full_grad`. `check` raises if gradients cannot be read."""
        place, fact, problem = None, f"full_grad({name!r})", None
        try:
            flat, index = place = self._find(name)
            check()
            fact += " of a parameter without a gradient" * (flat.shards[index].grad is None)
        except (LayoutError, PhaseError) as error:
            problem = error
        self._context.agree("full_grad()", problem, [fact], subject="calls", loads=False)
        assert place is not None, "`agree` has raised any problem"
        flat, index = place
        if (grad := flat.shards[index].grad) is None:
            return None
        with torch.no_grad():
            grad = grad.to_dense() if grad.is_sparse else grad.detach()
            return gather_param(self._context, flat, index, grad.reshape(-1))

    def _find(self, name: str) -> tuple[Flat, int]:
        """Return the flat of the parameter `name`, and the index of its slot.

        Raises:
            LayoutError: the model has no parameter of this name, or it is ignored or frozen.
        """
        params = dict(self._module.named_parameters(remove_duplicate=False))
        if name not in params:
            close = get_close_matches(str(name), params, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {some_of(params)}"
            raise LayoutError(f"there is no parameter {name!r}: {hint}")
        if params[name] in self._ignored:
            raise LayoutError(
                f"parameter {name!r} is ignored, so each rank has its own full gradient: read `.grad` of the parameter"
            )
        if not params[name].requires_grad:
            raise LayoutError(f"full_grad(): parameter {name!r} is frozen, so it has no gradient")
        return self._places[params[name]][1:]

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter, and the persistent buffers, without copying anything.

        A tied parameter is returned under each of its names.
        """
        mine: dict[Tensor, Tensor] = {
            param: flat.shard_tensor(i, partial(gather_param, self._context, flat, i))
            for param, (_, flat, i) in self._places.items()
        }
        return {name: mine[entry] if entry in mine else entry.detach() for name, entry in self.entries().items()}

    @torch.no_grad()
    def take_sharded(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load buffers, and this rank's part of each parameter. A value may be such a part or a full tensor."""
        for name, entry in self.entries().items():
            if name not in state_dict:
                continue
            value = state_dict[name]
            if entry not in self._places:
                entry.copy_(value)
                continue
            _, flat, i = self._places[entry]
            given = value.read() if isinstance(value, ShardTensor) else flat.part_of(i, value.detach())
            if flat.low is not None or given.data_ptr() != flat.shards[i].data_ptr():
                flat.write_param(i, given)

    def source_of(
        self, state_dict: Mapping[str, Tensor]
    ) -> tuple[Sequence[str], Sequence[str], Mapping[Tensor, Tensor]]:
        """Return what rank 0's state dict gives: missing names, unexpected names, and its value for each entry.

        Missing entries keep their values. Collective; only the values on rank 0 are used.
        """
        context, entries, names = self._context, self.entries(), self.other_names(state_dict)
        for group in context.ranks.all:
            watch = context.reports.watching
            names = all_gather_json(group, names, "load_full_state_dict", context.timeout, watch=watch)[0]
        missing, unexpected = names
        kept = self.state_dict(0, missing) if missing else {}
        source = {entry: kept.get(name, entry) for name, entry in entries.items()}
        # `state_dict` may have any of the names of a tied tensor.
        source.update({entry: state_dict[name] for name, entry in entries.items() if name in state_dict})
        return missing, unexpected, source

    def __deepcopy__(self, _: object) -> "FullParameters":
        """Raise an error. The module's hooks hold this object, so `deepcopy` of the module copies this object too."""
        raise LayoutError(NO_COPY)

    @contextmanager
    def naming(self, values: Mapping[Tensor, Tensor] = {}) -> Iterator[dict[Tensor, nn.Parameter]]:
        """Inside the context, stand-ins take the places of the module's parameters.

        So state dicts have names, and code of the program that changes state dicts has tensors to compute with. A
        stand-in has the values of the parameter's entry in `values`. If there is no entry, the stand-in is on the meta
        device.

        Returns:
            The parameter of each stand-in.
        """
        modules = set(self._module.modules()) - scripts(self._module)
        own = {each: dict(each._parameters) for each in modules}
        params = {param for params in own.values() for param in params.values() if param is not None}
        given = {param: values[param] if param in values else _shape_of(param) for param in params}
        stand_ins = {param: nn.Parameter(value, requires_grad=False) for param, value in given.items()}
        for each, its in own.items():
            each._parameters.update({name: stand_ins.get(param) for name, param in its.items()})  # type: ignore[arg-type]
        reading, self._reading = self._reading, True
        try:
            yield {stand_in: param for param, stand_in in stand_ins.items()}
        finally:
            self._reading = reading
            for each, its in own.items():
                each._parameters.update(its)

    def entries(self) -> dict[str, Tensor]:
        """Return the module's own parameters and persistent buffers, each under all of its names.

        The program may change the names, by hooks or methods (`state_dict`). A tensor that the program leaves out, or
        computes other tensors from, has its name in the module, as in `full_parameters()`. Nothing is computed here.
        """
        own = dict(self._own())
        try:
            with self.naming() as param_of:
                given = self._module.state_dict(keep_vars=True)
        except Exception:  # the program's code needs values, so it computes
            return own
        named = {
            name: own.get(name, value) if value not in param_of else param_of[value]
            for name, value in given.items()
            if isinstance(value, Tensor) and (value in param_of or not value.is_meta or name in own)
        }
        kept = set(named.values())
        return named | {name: entry for name, entry in own.items() if entry not in kept}

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's own parameters and persistent buffers under their names in the module."""
        for path, each in self._module.named_modules(remove_duplicate=False):
            buffers = {k: v for k, v in each._buffers.items() if k not in each._non_persistent_buffers_set}
            for name, value in (*each._parameters.items(), *buffers.items()):
                if value is not None:
                    yield f"{path}.{name}".lstrip("."), value

    def misfit(self, state_dict: Mapping[str, Tensor], *, strict: bool, full: bool = False) -> LayoutError | None:
        """Return an error that says why a state dict does not fit the model, or `None` if the state dict fits.

        Args:
            state_dict: by name, full tensors or this rank's shards.
            strict: whether the names must be exactly those of the model.
            full: whether only full tensors fit. Otherwise shards fit too.
        """
        if not isinstance(state_dict, Mapping):
            return LayoutError(f"a state dict is a mapping from names to tensors, got {type(state_dict).__name__}")
        entries = self.entries()
        given = {entry for name, entry in entries.items() if name in state_dict}
        # Of tied weights, one name is enough: files of safetensors have only one.
        missing = {name for name, entry in entries.items() if name not in state_dict and entry not in given}
        unknown = state_dict.keys() - entries.keys()
        if strict and (missing or unknown):
            return LayoutError(
                f"the state dict {lacking(missing, unknown)}: was it saved from another model, or from a wrapped one "
                "without full_state_dict()? If the module's code computes its state dict, use `module.load_state_dict` "
                "inside `gathered()`"
            )
        part = next((name for name, value in state_dict.items() if isinstance(value, ShardTensor)), None)
        if full and part is not None:
            return LayoutError(
                f"{part!r} is a shard, but full tensors are required: pass full_state_dict() of the other model, or "
                "call load_state_dict(), which loads shards"
            )
        for name, entry in entries.items():
            why = _misfit(name, state_dict[name], entry, self._own_range(entry)) if name in state_dict else ""
            if why:
                return LayoutError(why)
        return None

    def other_names(self, state_dict: Mapping[str, object]) -> tuple[list[str], list[str]]:
        """Return two lists for a state dict: the missing names and the unexpected names."""
        entries = self.entries()
        missing = [name for name in entries if name not in state_dict]
        return missing, [name for name in state_dict if name not in entries]

    def _own_range(self, entry: Tensor) -> tuple[int, int]:
        """Return the range of this rank's elements in an entry."""
        place = self._places.get(entry)
        return (0, entry.numel()) if place is None else place[1].range_of(place[2])

    def _gather_states(self, module: nn.Module, prefix: str, _: bool) -> None:
        """Gather the weights for the state dict of a module, unless this is part of such a call already."""
        now = [unit.version() for unit in self._units]
        if prefix or not self.gathers_states or (self._states_of not in (None, module) and self._versions == now):
            return
        self._states.close()  # an earlier call has raised
        if not self._reading and any(map(self._is_sharded, module.modules())):
            entries, full = self.entries(), self.state_dict(rank=None)
            self._states.enter_context(self.naming({entries[name]: value for name, value in full.items()}))
            self._states_of, self._versions = module, now

    def _end_states(self, module: nn.Module, *_: object) -> None:
        """End the call of `state_dict()` for which weights were gathered."""
        if self._states_of is module:
            self._states.close()
            self._states_of = None

    def _refuse(self, instead: str, module: nn.Module, *_: object) -> None:
        """Raise unless the module is gathered.

        A state dict of a sharded module would contain placeholders, and loading a state dict would have no effect.
        """
        if not self._reading and self._is_sharded(module):
            raise LayoutError(f"the module's parameters are sharded: {instead}")

    def _is_sharded(self, module: nn.Module) -> bool:
        """Return whether a module owns a parameter whose unit is not in use."""
        units = (self._places[param][0] for param in module._parameters.values() if param in self._places)
        return any(not (unit.users or unit.replicated) for unit in units)

    def _units_with(self, names: Iterable[str]) -> list[Unit]:
        params = self._module.named_parameters(remove_duplicate=False)
        known = {name: self._places[param][0] for name, param in params if param in self._places}
        for name in names:
            if name not in known:
                raise LayoutError(f"there is no parameter {name!r}; there are {some_of(known)}")
        return [unit for unit in self._units if not names or unit in {known[name] for name in names}]


def _separate(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
    """Give each parameter in a state dict of the module its own storage, because parameters are views of one buffer.

    This hook is a function without references to the model, because copies of the module contain the hook as well.
    """
    for name in module._parameters:
        value = state_dict.get(f"{prefix}{name}")
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or not value.is_contiguous():
            continue
        if value.untyped_storage().nbytes() > value.nbytes:
            state_dict[f"{prefix}{name}"] = apart(value)


def _shape_of(param: Tensor) -> Tensor:
    """Return a tensor on the meta device with the shape and the dtype of a parameter."""
    return torch.empty(param.shape, dtype=param.dtype, device="meta")


def _misfit(name: str, value: object, entry: Tensor, own: tuple[int, int]) -> str:
    """Return the reason why `value` cannot be loaded into an entry of the model, or an empty string.

    `own` is the range of elements that this rank keeps.
    """
    if not isinstance(value, Tensor):
        return f"{name!r} is a {type(value).__name__}, not a tensor"
    if is_dtensor(value):
        return f"{name!r} is a DTensor, of which this rank has a part: pass its full_tensor()"
    if value.is_meta:
        return f"{name!r} is on the meta device and has no values"
    if value.layout != torch.strided:
        return f"{name!r} has the layout {value.layout}: pass a dense tensor"
    if value.shape != entry.shape:
        return f"{name!r} has shape {list(value.shape)}, the model's is {list(entry.shape)}"
    if _kind(value.dtype) != _kind(entry.dtype):
        return f"{name!r} has dtype {value.dtype}, the model's is {entry.dtype}: convert it if this is intended"
    if isinstance(value, ShardTensor) and (value.start, value.stop) != own:
        return (
            f"{name!r} is elements {value.start} to {value.stop} of {entry.numel()}, and this rank keeps {own[0]} to "
            f"{own[1]}: a sharded state dict fits models with the same ranks, stage and units. shardlite.save and "
            "shardlite.load convert between any of them"
        )
    return ""


def _kind(dtype: torch.dtype) -> str:
    """Return the kind of a dtype. A conversion within a kind only rounds."""
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"
