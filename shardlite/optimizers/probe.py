"""Find out by trial whether an optimizer steps shards as it would step whole parameters.

PyTorch does not tell whether an optimizer is elementwise. So a probe builds twins of the optimizer (see `twins.py`),
and steps the same small values twice: as whole parameters, which one twin has, and as the shards of several twins. The
optimizer is elementwise if both give the same bits.

    whole     | 2-D ..................... | 1-D ............... |     one twin
    shards    |-- twin 0 --|--- twin 1 ---|- twin 1 -| twin 2 --|     the shards of twin 3 are all empty

In: an optimizer that holds parameters. Out: a `Verdict`. The optimizer, its parameters and the random number generators
do not change.
"""

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial
from itertools import pairwise
from math import prod
from threading import RLock
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlite.comm.consensus import collectives_of_program
from shardlite.optimizers.twins import CANNOT_BUILD, Original, communicates
from shardlite.params import ALIGN, round_up

VECTORS = 128
"""Bytes that PyTorch's vector loops handle at once. They may round the elements after the last multiple differently, so
cuts are multiples of `ALIGN` elements and of this number of bytes, and change no bit of elementwise arithmetic."""

STEPS = 12
"""Number of steps of a trial. Some optimizers average weights every 5 steps, or compute new factors every 10 steps."""

LONG = 128
"""If an option is an integer up to this number, for example a number of warm-up steps, a trial has more steps than
this option says."""

SCALES = (0.1, 10.0, 0.001, 1.0)
"""Factors of the gradients in successive steps. So bounds of norms and ratios take effect in some steps."""

ROUNDING = 0.02
"""Largest difference that counts as rounding, as a fraction of the largest change of a step."""

LAST_SCALE = 1e4
"""Factor of the gradients in the last step, for high bounds of norms."""

SHAPES = ((), (102,), (9, 11))
"""Shapes of small parameters by number of dimensions."""

LARGE = (136, 160)
"""Shape of a large matrix. Some optimizers factor or quantize only parameters above a limit."""

LARGEST = 512
"""The large matrix of a trial is larger than an integer option up to this number, which may be a limit of sizes."""

LAST_BITS = "last bits depend on which parameters it steps together"
RAISES = "a trial with whole parameters raises"

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
    # Several instances draw other numbers than one instance. This says nothing about how they treat parameters.
    return verdict._replace(same=None) if verdict.draws and not verdict.same else verdict


# ---- verdicts -------------------------------------------------------------------------------------------------------

_verdicts: "WeakKeyDictionary[type, dict[str, Verdict]]" = WeakKeyDictionary()
_lock = RLock()  # ranks may be threads, but a process has one set of random number generators


def _cached(attempt: Callable[[Original], Verdict], optimizer: Optimizer) -> Verdict:
    """Return the result of `attempt`, which is called once per class, options, device, dtype and dimensions."""
    original = Original(optimizer)
    with _lock:
        known = _verdicts.setdefault(type(optimizer), {})
        key = f"{attempt.__name__} {original.key()}"
        if key not in known:
            with warnings.catch_warnings(), _eagerly(), _random_numbers(original.device) as drawn:
                warnings.simplefilter("ignore")
                before = collectives_of_program()
                is_local = not communicates(type(optimizer))  # a trial of such a class could wait for other ranks
                verdict = attempt(original) if is_local else Verdict(None)
                if not is_local or collectives_of_program() > before:
                    why = "it communicates with other ranks itself, which takes whole parameters on every rank"
                    verdict = Verdict(same=False, why=why)
                elif drawn():
                    why = "it draws random numbers" if verdict.same is False else verdict.why
                    verdict = Verdict(verdict.same, why, draws=True)
                known[key] = verdict
        return known[key]


def _try_shards(original: Original) -> Verdict:
    """Compare small parameters of all dimensions with their shards, then a large parameter with its shards."""
    small = _compared(original, 1, _Trial.compare_shards)
    if not small.same:
        return small
    rows, columns = _large_shape(original, 2)
    shapes = [[(rows, columns) if max(group.flags) > 1 else (rows * columns,)] for group in original.groups]
    large = _Trial(original, shapes, len(SCALES)).compare_shards()
    return large if large.same is False else small


def _try_whole(original: Original) -> Verdict:
    """Compare one instance with two instances, each of which has a parameter of every group, then with large matrices.

    A class may compute matrices of equal shapes together. With large matrices, this often changes last bits.
    """
    small = _compared(original, 2, _Trial.compare_instances)
    if not small.same:
        return small
    large_shapes = [[_large_shape(original, ndim) for ndim in group.flags] for group in original.groups]
    shapes = [[way for shape in each for way in (shape, shape, shape[::-1], shape[::-1])] for each in large_shapes]
    large = _Trial(original, shapes, len(SCALES)).compare_instances(rounding=ROUNDING)
    return large if large.same is False or large.why == LAST_BITS else small


def probe_closure(optimizer: Optimizer) -> Verdict:
    """Return whether a step with a closure is a call of the closure and then a step without it."""
    return _cached(_try_closure, optimizer)


def _try_closure(original: Original) -> Verdict:
    shapes = [[*map(_shape, group.flags)] for group in original.groups]
    return _Trial(original, shapes).compare_closures()


def _compared(original: Original, copies: int, compare: Callable[["_Trial"], Verdict]) -> Verdict:
    """Compare small parameters or, if the optimizer raises an error for these, large parameters.

    An optimizer that raises an error for both may require parameters that belong together, or sparse gradients. This
    can be neither checked nor divided among ranks.
    """
    verdict = Verdict(None)
    for shape, steps in ((_shape, None), (partial(_large_shape, original), len(SCALES))):
        # Equal shapes follow one another, so that each instance of `compare_instances` has one of them.
        shapes = [[shape(ndim) for ndim in group.flags for _ in range(copies)] for group in original.groups]
        verdict = compare(_Trial(original, shapes, steps))
        if verdict.same is not None or not verdict.why.startswith(RAISES) or CANNOT_BUILD in verdict.why:
            return verdict
    return verdict._replace(same=False)


def _shape(ndim: int) -> Shape:
    return SHAPES[ndim] if ndim < len(SHAPES) else (3, 4, *[2] * (ndim - 3), 16)


def _large_shape(original: Original, ndim: int) -> Shape:
    more = max([0, *(number + 8 - LARGE[0] for number in original.integers() if number <= LARGEST)])
    return (LARGE[0] + more, *[2] * (ndim - 2), LARGE[1] + more) if ndim > 1 else SHAPES[ndim]


@contextmanager
def _eagerly() -> Iterator[None]:
    """Run compiled functions as they are, because compilation takes seconds, and leave the inference mode."""
    compiles = "torch._dynamo" in sys.modules  # importing it takes a second
    with torch.inference_mode(False), torch.compiler.set_stance("force_eager") if compiles else nullcontext():
        yield


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
    param: int
    """Index of the whole parameter in the trial."""

    start: int
    shape: Shape

    def view(self, values: Tensor) -> Tensor:
        return values[self.start : self.start + prod(self.shape)].view(self.shape)

    def cut(self, start: int, stop: int) -> "_Piece":
        """Return elements `[start, stop)` in the shape of a shard, which has as many dimensions as its parameter."""
        is_whole = stop - start == prod(self.shape)
        shape = self.shape if is_whole else (stop - start, *[1] * (len(self.shape) - 1))
        return _Piece(self.group, self.param, self.start + start, shape)


class _Instance:
    """A twin of an optimizer. Its parameters are pieces of `values` [n], and change them."""

    def __init__(self, original: Original, pieces: Sequence[_Piece], values: Tensor, *, swaps: bool) -> None:
        """If `swaps`, parameters have values and gradients only during a step."""
        self._pieces = [(piece, piece.view(values)) for piece in pieces]
        self._swaps = swaps
        self._params = [nn.Parameter(_placeholder(view) if swaps else view) for _, view in self._pieces]
        groups: list[list[nn.Parameter]] = [[] for _ in original.groups]
        for param, piece in zip(self._params, pieces, strict=True):
            groups[piece.group].append(param)
        self._optimizer = original.twin(groups)

    def step(self, grads: Tensor, without: Sequence[_Piece], *, closure: bool) -> None:
        """Step with gradients `grads` [n]. Parameters in `without` have no gradient."""
        for param, (_, view) in zip(self._params, self._pieces, strict=True):
            param.data = view.clone() if self._swaps else view

        def loss() -> Tensor:
            for param, (piece, _) in zip(self._params, self._pieces, strict=True):
                # After `step` has moved the parameters, gradients differ.
                param.grad = None if piece in without else piece.view(grads) + param.detach()
            return torch.ones(())

        loss()
        has_gradients = any(param.grad is not None for param in self._params)
        # Without any gradient, a step only counts, and a class that requires gradients may raise an error.
        with nullcontext() if has_gradients else suppress(Exception):
            step_without_hooks(self._optimizer, [loss] if closure else [])
        for param, (_, view) in zip(self._params, self._pieces, strict=True):
            view.copy_(param.detach())
            if self._swaps:
                param.data, param.grad = _placeholder(view), None

    def numbers(self) -> dict[tuple[str, str], complex]:
        """Return the numbers that the optimizer keeps per group, and per parameter that is not empty."""
        records: dict[str, Mapping[str, Any]] = {f"group {i}": g for i, g in enumerate(self._optimizer.param_groups)}
        for param, (piece, _) in zip(self._params, self._pieces, strict=True):
            state = self._optimizer.state.get(param)
            if param.numel() and isinstance(state, Mapping):
                records[f"parameter {piece.param}"] = state
        return {
            (key, name): value.item() if isinstance(value, Tensor) else value
            for key, record in records.items()
            for name, value in record.items()
            if isinstance(value, float) or (isinstance(value, Tensor) and value.numel() == 1)
        }


def _placeholder(like: Tensor) -> Tensor:
    """Return a tensor of the same shape that has the memory of one NaN."""
    return like.new_full((), torch.nan).expand(like.shape)


def step_without_hooks(optimizer: Optimizer, args: Sequence[Any] = ()) -> None:
    """Step without the hooks that the program has registered for all optimizers."""
    step: Any = type(optimizer).step
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        step(optimizer, *args)  # the optimizer has hooks of its own
    else:
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer, *args)


class _Trial:
    """Small whole parameters, and several ways to divide them among instances."""

    def __init__(self, original: Original, shapes: Sequence[Sequence[Shape]], steps: int | None = None) -> None:
        """`shapes` has the shapes of the parameters of each group."""
        self._original = original
        self._block = max(ALIGN, VECTORS // original.dtype.itemsize)
        self._steps = steps or max([STEPS, *(number + 2 for number in original.integers() if number <= LONG)])
        self._without: dict[int, Sequence[_Piece]] = {}  # parameters that have no gradient, by step
        self._whole: list[_Piece] = []
        self._numel = 0
        for group, each in enumerate(shapes):
            for shape in each:
                self._whole.append(_Piece(group, len(self._whole), self._numel, shape))
                self._numel += round_up(prod(shape), self._block)

    def compare_shards(self) -> Verdict:
        """Compare one instance with four instances that have a shard of each parameter."""
        parts: list[list[_Piece]] = [[], [], [], []]
        for index, piece in enumerate(self._whole):
            numel = prod(piece.shape)
            cut = min((numel // 4 // self._block | 1) * self._block, numel)  # no multiple of larger blocks
            first, second = ((cut, numel), (0, cut), (cut, cut))[index % 3]  # one of the first three shards is empty
            for part, (start, stop) in zip(parts, pairwise((0, first, second, numel, numel)), strict=True):
                part.append(piece.cut(start, stop))
        verdict = self._compare_with(parts, "shards")
        if verdict.same is not None:
            return verdict
        with_closure = self._compare_with(parts, "shards", closures=(True, True))
        return verdict if "TypeError" in with_closure.why else with_closure  # `step` may take no closure

    def compare_instances(self, rounding: float = 0.0) -> Verdict:
        """Compare one instance with two instances that have every second parameter, and only during steps.

        A difference counts as rounding if it is at most `rounding` times the largest change of a step.
        """
        parts, verdict = (self._whole[::2], self._whole[1::2]), Verdict(None)
        missing: list[dict[int, Sequence[_Piece]]] = [{2: self._whole[:1], 6: self._whole[::2]}, {}]
        for without in missing:  # a class may require all gradients
            self._without = without
            verdict = self._compare_with(parts, "some of the parameters", swaps=True, rounding=rounding)
            if verdict.same is not None or verdict.why == LAST_BITS:
                break
        return verdict

    def compare_closures(self) -> Verdict:
        """Compare steps that get a closure with steps after a call of the closure."""
        return self._compare_with(
            [self._whole], "a closure that was called before", swaps=False, closures=(True, False)
        )

    def _compare_with(
        self,
        parts: Sequence[Sequence[_Piece]],
        what: str,
        *,
        swaps: bool = False,
        closures: tuple[bool, bool] = (False, False),
        rounding: float = 0.0,
    ) -> Verdict:
        """Compare a run of one instance with a run of several. `closures`: whether steps of both runs get a closure."""
        whole = _Run(self._original, [self._whole], self._random(0) / 4, swaps=False)
        twins = _Run(self._original, parts, self._random(0) / 4, swaps=swaps)
        for step in range(self._steps):
            before = whole.values.clone()
            if error := _error(self._step, step, whole, closure=closures[0]):
                return Verdict(None, f"{RAISES} {error}")
            if error := _error(self._step, step, twins, closure=closures[1]):
                return Verdict(False, f"a trial with {what} raises {error}")
            if not _equal(whole.values, twins.values):
                if (whole.values - twins.values).abs().max() <= rounding * (whole.values - before).abs().max():
                    return Verdict(None, LAST_BITS)
                return Verdict(False, f"a trial with {what} differs from a trial with all whole parameters")
        if _equal(whole.values, self._random(0) / 4):
            return Verdict(None, "a trial changes no parameter")
        (numbers,) = [each.numbers() for each in whole.instances]
        for name, value in (item for each in twins.instances for item in each.numbers().items()):
            if repr(numbers.get(name, value)) != repr(value):  # a NaN equals a NaN
                return Verdict(False, f"a trial shows that it computes {name[1]!r} from several elements")
        return Verdict(True)

    def _step(self, step: int, run: "_Run", *, closure: bool) -> None:
        # Learning rates that depend on progress grow only if gradients agree.
        scale = LAST_SCALE if step == self._steps - 1 else SCALES[step % len(SCALES)]
        grads = (self._random(self._steps + 1) + self._random(step + 1)) * scale
        for each in run.instances:
            each.step(grads, self._without.get(step, ()), closure=closure)

    def _random(self, seed: int) -> Tensor:
        """Return reproducible values, [n]."""
        values = torch.randn(
            self._numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
        )
        dtype = self._original.dtype
        values = torch.complex(values, values.flip(0)) if dtype.is_complex else values
        return values.to(self._original.device, dtype)


class _Run:
    """Values [n], and the instances that step them."""

    def __init__(self, original: Original, parts: Sequence[Sequence[_Piece]], values: Tensor, *, swaps: bool) -> None:
        self.values = values
        self._build = partial(_Instance, original, values=values, swaps=swaps)
        self._parts = parts

    @cached_property
    def instances(self) -> list[_Instance]:
        """One instance per element of `parts`."""
        return [self._build(pieces=each) for each in self._parts]


def _error(call: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    """Return the class and the first line of the error that a call raises, or an empty text."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {line.rstrip('.')}"
    return ""


def _equal(some: Tensor, other: Tensor) -> bool:
    """Return whether all elements are equal. A NaN equals a NaN."""
    return bool(((some == other) | (some.isnan() & other.isnan())).all())
