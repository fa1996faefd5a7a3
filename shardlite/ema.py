"""Exponential moving averages of a wrapped model's weights, sharded like the weights.

An arena is one contiguous buffer with this rank's weights of all units. The averages have the same layout, so one call
updates the averages of a whole arena:

    arena     [ unit 0 | unit 1 | unit 2 | ... ]     current weights
    averages  [ unit 0 | unit 1 | unit 2 | ... ]     += (1 - decay) * (weights - averages)

At stages 1 and 2 a shard is a part of the full weights, so each unit needs its own call. For an evaluation, arena and
averages swap their contents in place. Averages of split weights are fp32. A swap rounds these averages to the 24 bits
that the model keeps.

Legend: `n` elements that this rank keeps of a flat (flat parameter).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardlite.errors import LayoutError, PhaseError, lacking
from shardlite.extend import Flat, Weights, ranks_of
from shardlite.model import ShardLite

Decay = float | Callable[[int], float]

_CHUNK = 1 << 18
"""Number of elements that are swapped at a time, to bound the memory of a swap."""


class EMA:
    """Average the trainable parameters of `model`: `average = decay * average + (1 - decay) * weight`.

    Averages start as the current weights. They have the precision in which weights are kept, at least fp32. At any
    stage and number of ranks the averages are bit-equal to those of `torch.optim.swa_utils.get_ema_multi_avg_fn` on
    full parameters. Each rank averages the weights that it keeps, without communication: all weights at stage 0,
    1/W of the weights at other stages.

    Frozen parameters have no average, and take no memory for one. If a parameter is unfrozen, it is averaged from its
    first step on. If a parameter is frozen later, it is still averaged. Buffers (BatchNorm statistics) and ignored
    parameters are not averaged: the averaged model has the current values of the model, as with
    `AveragedModel(use_buffers=False)`.

    `model.memory()` counts the averages under `averages`.

    Args:
        model: a wrapped model. It may have several `EMA` objects.
        decay: a number from 0 to 1, or a function of the number of updates so far (0 at the first update). A function
            can warm up the decay: `lambda n: min(0.999, (1 + n) / (10 + n))`.

    Raises:
        TypeError: `model` is not wrapped, or `decay` is neither a number nor callable.
        ValueError: `decay` is not from 0 to 1.
        PhaseError: the call is inside `swapped()` of another `EMA` of `model`.

    Example:
        >>> ema = EMA(model, decay=0.999)
        >>> for x, y in batches:
        ...     train_step(x, y)
        ...     ema.update()
        >>> with ema.swapped():
        ...     validate(model)
    """

    def __init__(self, model: ShardLite, decay: Decay = 0.999) -> None:
        if not isinstance(model, ShardLite):
            raise TypeError(
                f"EMA averages a ShardLite model, got {type(model).__name__}: wrap it first, or use "
                "torch.optim.swa_utils.AveragedModel"
            )
        self.updates = 0
        """Number of updates so far."""
        self._decay = decay if callable(decay) else _checked(decay)
        self._model = model
        self._weights = Weights(model)
        self._swapped = False
        self._averages: dict[Flat, Tensor] = {}
        self._runs: Sequence[tuple[Tensor, Tensor]] = ()
        self._split: Sequence[tuple[Tensor, Flat]] = ()
        self._weights.announce_change()
        self._start(flat for flat in self._weights.flats if flat.trainable_now())
        self._weights.follow(self)

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the current weights. Every rank must call this after each optimizer step.

        Raises:
            PhaseError: the call is inside `swapped()`, or a CUDA graph captures it.
            ValueError: the callable `decay` returned a value that is not from 0 to 1.

        Example:
            >>> optimizer.step()
            >>> ema.update()
        """
        self._weights.announce_change()
        if self._weights.is_captured:
            raise PhaseError(
                "EMA: a CUDA graph that contains update() would always use the decay of the capture: call update() "
                "after the captured step"
            )
        decay = _checked(self._decay(self.updates), self.updates) if callable(self._decay) else self._decay
        for average, weights in self._runs:
            average.lerp_(weights, 1 - decay)
        for chunk, flat, begin in self._split_chunks():
            chunk.lerp_(flat.weights(begin, begin + len(chunk)), 1 - decay)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[ShardLite]:
        """Let the model use its averaged weights inside the context. Collective.

        Weights and averages are swapped on entry and swapped back on exit, also after an exception. So the trained
        weights are restored bit for bit. Gradients and the optimizer's state are not changed. Inside the context, a
        write to the weights changes the averages. For example, `model.load_full_state_dict(saved)` loads averages that
        `full_state_dict()` of this object has returned.

        An optimizer cannot step inside the context. A forward and its backward must both run inside, or both outside;
        otherwise the backward raises.

        Returns:
            A context manager. `with` binds the model.

        Raises:
            PhaseError: the model already uses averaged weights, or the call is inside a forward or `gathered()`.

        Example:
            >>> with ema.swapped():
            ...     validate(model)
        """
        self._weights.announce_change()
        if self._weights.in_use:
            raise PhaseError("EMA: the weights are in use: enter swapped() outside of a forward and of gathered()")
        self._weights.settle()
        self._exchange()
        try:
            yield self._model
        finally:
            try:
                self._weights.settle()
            finally:
                self._exchange()

    def full_state_dict(self, *, rank: int | None = None) -> dict[str, Tensor]:
        """Return the averaged model as full tensors, as `model.full_state_dict(rank=rank)` does. Collective.

        Entries without an average have the model's values. The call swaps weights and averages, and swaps them back at
        its end, so call this method between a step and the next forward.

        Args:
            rank: the only rank that returns the tensors. Other ranks return an empty dict. `None`: every rank returns
                the tensors.

        Returns:
            Full tensors by name.

        Raises:
            PhaseError: the call is inside a forward, `gathered()`, or `swapped()` of another `EMA`.

        Example:
            >>> torch.save(ema.full_state_dict(rank=0), "averaged.pt")
        """
        with nullcontext() if self._swapped else self.swapped():
            return self._model.full_state_dict(rank=rank)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's averages and the number of updates.

        `load_state_dict` requires the same rank, world size and stage.

        Returns:
            A dict with `updates`, `part` (a description of the part of the weights that this rank keeps) and
            `averages`: tensors by parameter name, each as long as this rank's shard. The tensors are not copies.

        Raises:
            PhaseError: the call is inside `swapped()`.

        Example:
            >>> save("runs/first", model, optimizer, {"ema": ema})  # calls it
        """
        self._refuse_if_swapped()
        return {"updates": self.updates, "part": self._part(), "averages": dict(_named(self._averages.items()))}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict()`. Only the averages and the number of updates change.

        Weights, frozen parameters and `decay` are not in the state.

        Args:
            state_dict: the state of the same rank, at the same world size and stage.

        Raises:
            LayoutError: the state is of another rank or model. Nothing was changed.
            PhaseError: the call is inside `swapped()`.
        """
        self._refuse_if_swapped()
        part, given = state_dict.get("part"), state_dict.get("averages", {})
        if part != self._part():
            raise LayoutError(f"EMA: the state is of {part or 'something else'}, but this rank keeps {self._part()}")
        named = [(flat, {slot.name for slot in flat.layout.slots}) for flat in self._weights.flats]
        flats = [flat for flat, names in named if flat in self._averages or names & given.keys()]
        ours = dict(_named((flat, flat.local) for flat in flats))
        missing, unknown = ours.keys() - given.keys(), given.keys() - ours.keys()
        if missing or unknown:
            raise LayoutError(
                f"EMA: the state {lacking(missing, unknown)}: was it saved from a different model, or with other "
                "parameters frozen?"
            )
        for name, mine in ours.items():
            if (shape := given[name].shape) != mine.shape:
                raise LayoutError(f"EMA: {name!r} has shape {list(shape)}, but this rank's has {list(mine.shape)}")
        self._start(flat for flat in flats if flat not in self._averages)
        for name, average in _named(self._averages.items()):
            average.copy_(given[name])
        self.updates = int(state_dict["updates"])

    def __repr__(self) -> str:
        numel = sum(view.numel() for _, view in _named(self._averages.items()))
        return f"EMA(decay={self._decay}, updates={self.updates}, elements={numel})"

    def before_change(self) -> None:
        """Start to average unfrozen parameters before their first step. The model calls this before weights change.

        Raises:
            PhaseError: the call is inside `swapped()`.
        """
        self._refuse_if_swapped()
        self._start(flat for flat in self._weights.flats if flat not in self._averages and flat.trainable_now())

    def _refuse_if_swapped(self) -> None:
        if self._swapped:
            raise PhaseError("EMA.swapped() is active: leave it before you step, update, swap, save or load averages")

    def _start(self, flats: Iterable[Flat]) -> None:
        """Allocate averages of `flats`, and set the averages to the current weights."""
        new = list(flats)
        if not new:
            return
        with torch.inference_mode(False), torch.no_grad():
            for flat, average in zip(new, self._weights.allocate(new, "averages"), strict=True):
                average.copy_(flat.weights())
                self._averages[flat] = average
            pairs = [(average, flat.local) for flat, average in self._averages.items() if flat.low is None]
            self._runs = _merge_adjacent(pairs)
            self._split = [(average, flat) for flat, average in self._averages.items() if flat.low is not None]

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap weights and averages."""
        for average, weights in self._runs:
            for ours, theirs in zip(torch.split(average, _CHUNK), torch.split(weights, _CHUNK), strict=True):
                _swap(ours, theirs)
        for chunk, flat, begin in self._split_chunks():
            weights = flat.weights(begin, begin + len(chunk))
            flat.write(chunk, begin)
            chunk.copy_(weights)
        self._swapped = not self._swapped
        self._weights.mark_changed()

    def _split_chunks(self) -> Iterator[tuple[Tensor, Flat, int]]:
        """Yield the averages of split weights in chunks, each with its flat and its first element there."""
        for average, flat in self._split:
            for begin in range(0, len(average), _CHUNK):
                yield average[begin : begin + _CHUNK], flat, begin

    def _part(self) -> str:
        """Return a description of the part of the weights that this rank keeps."""
        ranks = ranks_of(self._model)
        return "all" if ranks.shard is None else f"part {ranks.shard} of {ranks.shards}"


def _swap(ours: Tensor, theirs: Tensor) -> None:
    kept = ours.clone()
    ours.copy_(theirs)
    theirs.copy_(kept)


def _merge_adjacent(pairs: Sequence[tuple[Tensor, Tensor]]) -> Sequence[tuple[Tensor, Tensor]]:
    """Merge two pairs of 1-D tensors into one if their first tensors and their second tensors are both adjacent."""
    runs: list[tuple[Tensor, Tensor]] = []
    for first, second in sorted(pairs, key=lambda pair: pair[0].data_ptr()):
        if runs and _follows(runs[-1][0], first) and _follows(runs[-1][1], second):
            numel = runs[-1][0].numel() + first.numel()
            first, second = (part.as_strided((numel,), (1,), part.storage_offset()) for part in runs.pop())
        runs.append((first, second))
    return runs


def _follows(part: Tensor, following: Tensor) -> bool:
    """Return whether `part` and `following` share a storage, and `following` starts at the end of `part`."""
    same = part.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
    return same and part.storage_offset() + part.numel() == following.storage_offset()


def _checked(decay: float, update: int | None = None) -> float:
    """Check a decay and return it.

    Raises:
        TypeError: the decay is not a number.
        ValueError: the decay is not from 0 to 1.
    """
    when = "" if update is None else f" for update {update}"
    if isinstance(decay, bool) or not isinstance(decay, int | float):
        raise TypeError(f"EMA: decay must be a number{' or callable' if update is None else ''}, got {decay!r}{when}")
    if not 0 <= decay <= 1:
        raise ValueError(f"EMA: decay must be from 0 to 1, got {decay!r}{when}")
    return float(decay)


def _named(memory: Iterable[tuple[Flat, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each parameter and the view of its shard.

    Args:
        memory: pairs of a flat and a tensor [n] with the layout of `flat.local`. The views are views of this tensor.
    """
    for flat, local in memory:
        for slot, view in zip(flat.layout.slots, flat.shard_views(local), strict=True):
            yield slot.name, view
