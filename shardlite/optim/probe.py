"""Find out by trial whether an optimizer steps shards as it would step whole parameters.

PyTorch does not tell whether an optimizer is elementwise. So a probe builds twins of the optimizer, with the same class
and options, and steps the same small values twice: as whole parameters, which one twin has, and as the shards of
several twins. The optimizer is elementwise if both give the same bits.

    whole     | 2-D ..................... | 1-D ............... |     one twin
    shards    |-- twin 0 --|--- twin 1 ---|- twin 1 -| twin 2 --|     the shards of twin 3 are all empty

In: an optimizer that holds parameters. Out: a `Verdict`. The optimizer, its parameters and the random number generators
do not change.
"""

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from inspect import Parameter, signature
from itertools import pairwise
from math import prod
from threading import RLock
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlite.params import round_up

BLOCK = 64
"""All cuts are multiples of this number of elements. PyTorch's vector loops over fp32 and bf16 round the elements after
the last multiple differently, so a cut elsewhere could change the last bits even of elementwise arithmetic."""

STEPS = 12
"""Number of steps of a trial. Some optimizers average weights every 5 steps, or compute new factors every 10 steps."""

LONG = 50
"""If an option is an integer up to this number, for example a number of warm-up steps, a trial has more steps than
this option says."""

SCALES = (0.1, 10.0, 0.001, 1.0)
"""Factors of the gradients in successive steps. So bounds of norms and ratios take effect in some steps."""

SHAPES = ((), (192,), (12, 16))
"""Shapes of small parameters by number of dimensions."""

LARGE = (136, 160)
"""Shape of a large matrix. Some optimizers factor or quantize only parameters above a limit."""

LR = 0.01
"""Learning rate in a trial if the optimizer's is less than 1 % of this, as at the start of a warm-up."""

Shape: TypeAlias = tuple[int, ...]


class Verdict(NamedTuple):
    """Result of a probe."""

    same: bool | None
    """Whether the bits are equal. `None` if the optimizer could not be tried."""

    why: str = ""
    """Clause that tells why `same` is not `True`."""

    draws: bool = False
    """Whether the trial has drawn random numbers."""


def probe_shards(optimizer: Optimizer) -> Verdict:
    """Return whether one instance per rank steps shards as one instance steps whole parameters."""
    return _cached(_try_shards, optimizer)


def probe_whole(optimizer: Optimizer) -> Verdict:
    """Return whether several instances step the parameters that each has as one instance steps all parameters.

    The instances are built on placeholders. Parameters have values and gradients only during a step. An instance steps
    even if none of its parameters has a gradient.
    """
    verdict = _cached(_try_whole, optimizer)
    # The instances draw other numbers than one instance, which says nothing about how they treat parameters.
    return verdict._replace(same=None) if verdict.draws and not verdict.same else verdict


# ---- verdicts -------------------------------------------------------------------------------------------------------

_verdicts: "WeakKeyDictionary[type, dict[str, Verdict]]" = WeakKeyDictionary()
_lock = RLock()  # ranks may be threads, but a process has one set of random number generators


def _cached(attempt: Callable[["_Original"], Verdict], optimizer: Optimizer) -> Verdict:
    """Return the result of `attempt`, which is called once per class, options, device, dtype and dimensions."""
    original = _Original(optimizer)
    with _lock:
        known = _verdicts.setdefault(type(optimizer), {})
        key = f"{attempt.__name__} {original.key()}"
        if key not in known:
            with warnings.catch_warnings(), torch.inference_mode(False), _random_numbers(original.device) as drawn:
                warnings.simplefilter("ignore")
                verdict = attempt(original)
                known[key] = Verdict(verdict.same, "it draws random numbers", True) if drawn() else verdict
        return known[key]


def _try_shards(original: "_Original") -> Verdict:
    """Compare small parameters of all dimensions with their shards, then a large parameter with its shards."""
    small = _Trial(original, [[*map(_shape, group.ndims)] for group in original.groups]).compare_shards()
    if not small.same:
        return small
    large = [[LARGE if max(group.ndims) > 1 else (prod(LARGE),)] for group in original.groups]
    return _Trial(original, large, len(SCALES)).compare_shards()


def _try_whole(original: "_Original") -> Verdict:
    """Compare one instance with two instances, each of which has a parameter of every group."""
    return _Trial(original, [[*map(_shape, group.ndims)] * 2 for group in original.groups]).compare_instances()


def _shape(ndim: int) -> Shape:
    return SHAPES[ndim] if ndim < len(SHAPES) else (3, 4, *[2] * (ndim - 3), 16)


@contextmanager
def _random_numbers(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Restore the random number generators at the end. Yield a function that returns whether numbers were drawn."""
    gpus = [device] if device.type == "cuda" else []

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]

    before, others = states(), random.getstate()
    try:
        yield lambda: others != random.getstate() or not all(map(torch.equal, before, states()))
    finally:
        random.setstate(others)
        torch.set_rng_state(before[0])
        for gpu, state in zip(gpus, before[1:], strict=True):
            torch.cuda.set_rng_state(state, gpu)


# ---- trials ---------------------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """The elements from `start` on, which are a parameter of `shape` in one of the groups."""

    group: int
    start: int
    shape: Shape

    def view(self, values: Tensor) -> Tensor:
        return values[self.start : self.start + prod(self.shape)].view(self.shape)

    def cut(self, start: int, stop: int) -> "_Piece":
        """Return elements `[start, stop)` in the shape of a shard, which has as many dimensions as its parameter."""
        is_whole = stop - start == prod(self.shape)
        shape = self.shape if is_whole else (stop - start, *[1] * (len(self.shape) - 1))
        return _Piece(self.group, self.start + start, shape)


class _Instance:
    """A twin of an optimizer. Its parameters are pieces of `values` [n], and change them."""

    def __init__(self, original: "_Original", pieces: Sequence[_Piece], values: Tensor, *, swaps: bool) -> None:
        """If `swaps`, parameters have values and gradients only during a step."""
        self._pieces = [(piece, piece.view(values)) for piece in pieces]
        self._swaps = swaps
        self._params = [nn.Parameter(_placeholder(view) if swaps else view) for _, view in self._pieces]
        groups: list[list[nn.Parameter]] = [[] for _ in original.groups]
        for param, piece in zip(self._params, pieces, strict=True):
            groups[piece.group].append(param)
        self._optimizer = original.twin(groups)

    def step(self, grads: Tensor, without: Sequence[_Piece], closure: Sequence[Any]) -> None:
        """Step with gradients `grads` [n]. Parameters in `without` have no gradient."""
        for param, (piece, view) in zip(self._params, self._pieces, strict=True):
            param.data = view.clone() if self._swaps else view
            param.grad = None if piece in without else piece.view(grads)
        _step(self._optimizer, closure)
        for param, (_, view) in zip(self._params, self._pieces, strict=True):
            view.copy_(param.detach())
            if self._swaps:
                param.data, param.grad = _placeholder(view), None


def _placeholder(like: Tensor) -> Tensor:
    """Return a tensor of the same shape that has the memory of one NaN."""
    return like.new_full((), torch.nan).expand(like.shape)


def _step(optimizer: Optimizer, closure: Sequence[Any]) -> None:
    """Step without the hooks that the program has registered for all optimizers."""
    step: Any = type(optimizer).step
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        step(optimizer, *closure)  # the optimizer has hooks of its own
    else:
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, *closure)


class _Trial:
    """Small whole parameters, and several ways to divide them among instances."""

    def __init__(self, original: "_Original", shapes: Sequence[Sequence[Shape]], steps: int | None = None) -> None:
        """`shapes` has the shapes of the parameters of each group."""
        self._original = original
        self._steps = steps or original.steps()
        self._without: dict[int, Sequence[_Piece]] = {}  # parameters that have no gradient, by step
        self._whole: list[_Piece] = []
        self._numel = 0
        for group, each in enumerate(shapes):
            for shape in each:
                self._whole.append(_Piece(group, self._numel, shape))
                self._numel += round_up(prod(shape), BLOCK)

    def compare_shards(self) -> Verdict:
        """Compare one instance with four instances that have a shard of each parameter."""
        parts: list[list[_Piece]] = [[], [], [], []]
        for index, piece in enumerate(self._whole):
            numel = prod(piece.shape)
            cut = min(round_up(numel // 4, BLOCK), numel)
            first, second = ((cut, numel), (0, cut), (cut, cut))[index % 3]  # one of the first three shards is empty
            for part, (start, stop) in zip(parts, pairwise((0, first, second, numel, numel)), strict=True):
                part.append(piece.cut(start, stop))
        return self._compare(parts, "shards", swaps=False)

    def compare_instances(self) -> Verdict:
        """Compare one instance with two instances that have every second parameter, and only during steps."""
        self._without = {2: self._whole[:1], 6: self._whole[::2]}
        return self._compare([self._whole[::2], self._whole[1::2]], "some of the parameters", swaps=True)

    def _compare(self, parts: Sequence[Sequence[_Piece]], what: str, *, swaps: bool) -> Verdict:
        """Compare the steps of one instance with the steps of one instance per element of `parts`."""
        verdict = self._compare_with([], parts, what, swaps=swaps)
        if verdict.same is None:
            verdict = self._compare_with([lambda: torch.ones(())], parts, what, swaps=swaps)
        return verdict

    def _compare_with(
        self, closure: Sequence[Any], parts: Sequence[Sequence[_Piece]], what: str, *, swaps: bool
    ) -> Verdict:
        expected, got = self._random(0) / 4, self._random(0) / 4
        whole = self._run([self._whole], expected, closure, swaps=False)
        twins = self._run(parts, got, closure, swaps=swaps)
        for _ in range(self._steps):
            if error := _error(whole):
                return Verdict(None, f"a step of whole parameters raises {error}")
            if error := _error(twins):
                return Verdict(False, f"a step of {what} raises {error}")
            if not _equal(expected, got):
                return Verdict(False, f"its steps of {what} differ from steps of all whole parameters together")
        if _equal(expected, self._random(0) / 4):
            return Verdict(None, "trial steps change no parameter")
        return Verdict(True)

    def _run(
        self, parts: Sequence[Sequence[_Piece]], values: Tensor, closure: Sequence[Any], *, swaps: bool
    ) -> Iterator[None]:
        """Change `values` [n] by steps. Yield after each step."""
        instances = [_Instance(self._original, each, values, swaps=swaps) for each in parts]
        for step in range(self._steps):
            grads = self._random(step + 1) * SCALES[step % len(SCALES)]
            for each in instances:
                each.step(grads, self._without.get(step, ()), closure)
            yield

    def _random(self, seed: int) -> Tensor:
        """Return reproducible values, [n]."""
        values = torch.randn(
            self._numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
        )
        return values.to(self._original.device, self._original.dtype)


def _error(run: Iterator[None]) -> str:
    """Take the next step of a run. Return the first line of the error that it raises, or an empty text."""
    try:
        next(run)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def _equal(some: Tensor, other: Tensor) -> bool:
    """Return whether all elements are equal. A NaN equals a NaN."""
    return bool(((some == other) | (some.isnan() & other.isnan())).all())


# ---- twins ----------------------------------------------------------------------------------------------------------

_TORCH_OWN = {"defaults", "state", "param_groups", "step", "grad_scale", "found_inf"}
"""Attributes of an optimizer that PyTorch, its schedulers and its gradient scalers set."""


class _Group(NamedTuple):
    """Options of one or more parameter groups, and the numbers of dimensions of their parameters."""

    options: dict[str, Any]
    ndims: set[int]


class _Original:
    """The optimizer in question: what its twins need to know."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind = type(optimizer)
        self._defaults = optimizer.defaults
        self._attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in _TORCH_OWN and not name.startswith(("_optimizer_", "_shardlite", "_zero_grad_"))
        }
        groups: dict[str, _Group] = {}  # models may have hundreds of groups that differ in the learning rate only
        for given in optimizer.param_groups:
            options = {name: value for name, value in given.items() if name not in ("params", "param_names")}
            if "lr" in options:
                options["lr"] = _visible(options["lr"])
            group = groups.setdefault(repr(sorted((options | {"lr": None}).items())), _Group(options, set()))
            group.ndims.update(param.ndim for param in given["params"])
        self.groups = [each for each in groups.values() if each.ndims]
        first = next(param for given in optimizer.param_groups for param in given["params"])
        self.device, self.dtype = first.device, first.dtype

    def key(self) -> str:
        """Return a text that is equal for optimizers of one class whose verdicts are equal."""
        plain = {name: value for name, value in self._attributes.items() if _is_plain(value)}
        return repr((self.device, self.dtype, self._defaults, self.groups, plain))

    def steps(self) -> int:
        """Return the number of steps after which all options have taken effect."""
        options = [*self._attributes.values(), *(value for group in self.groups for value in group.options.values())]
        return max([STEPS, *(value + 2 for value in options if type(value) is int and value <= LONG)])

    def twin(self, params: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
        """Return an optimizer with the same class and options, for the given parameters of each group.

        Raises:
            Exception: the constructor needs arguments that the optimizer has not kept.
        """
        names = _arguments(self._kind)
        groups = [
            {"params": [*tensors], **copy.deepcopy(_chosen(group.options, names))}
            for tensors, group in zip(params, self.groups, strict=True)
        ]
        plain = {name: value for name, value in self._attributes.items() if _is_plain(value)}
        arguments = {name: value for name, value in {**plain, **self._defaults}.items() if name in names}
        try:
            twin = self._kind(groups, **copy.deepcopy(arguments))
        except Exception:
            if len(plain) < len(self._attributes):
                raise
            twin = self._without_constructor(groups)
        if len(twin.param_groups) == len(self.groups):
            for fresh, group in zip(twin.param_groups, self.groups, strict=True):
                _overlay(fresh, group.options)
        _overlay(vars(twin), plain)
        return twin

    def _without_constructor(self, groups: list[dict[str, Any]]) -> Optimizer:
        twin = self._kind.__new__(self._kind)
        vars(twin).update(copy.deepcopy(self._attributes))
        Optimizer.__init__(twin, groups, copy.deepcopy(self._defaults))
        return twin


def _visible(lr: Any) -> Any:
    """Return a learning rate that changes parameters: a warm-up may begin with 0."""
    if not isinstance(lr, int | float | Tensor) or float(lr) >= LR / 100:
        return lr
    return torch.full_like(lr, LR) if isinstance(lr, Tensor) else LR


def _arguments(kind: type) -> set[str]:
    """Return the names of the arguments of a constructor, including those that it passes on as `**kwargs`."""
    names: set[str] = set()
    for each in kind.__mro__[: kind.__mro__.index(Optimizer)]:
        if "__init__" in vars(each):
            own = signature(vars(each)["__init__"]).parameters.values()
            names.update(
                param.name for param in own if param.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
            )
            if not any(param.kind is Parameter.VAR_KEYWORD for param in own):
                break
    return names


def _chosen(options: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the options of a group for a constructor. Numbers that it does not know were added by steps."""
    return {name: value for name, value in options.items() if name in names or isinstance(value, bool | str)}


def _overlay(fresh: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Copy options into a new optimizer that its constructor does not set, but no counts of steps."""
    for name, value in given.items():
        counts = type(value) is int and fresh.get(name) == 0
        if isinstance(value, bool | str) or (name in fresh and _is_plain(value) and not counts):
            fresh[name] = copy.deepcopy(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value is an option, and not a state."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    plain = (bool, int, float, str, type, FunctionType, torch.dtype, torch.device, Enum)
    return value is None or isinstance(value, plain)
