"""Exponential moving averages of a wrapped model's weights, sharded like them.

An average lies in memory laid out like what this rank keeps of the weights, so an update is one call for each arena:

    arena     [ unit 0 | unit 1 | unit 2 | ... ]     current weights
    averages  [ unit 0 | unit 1 | unit 2 | ... ]     += (1 - decay) * (weights - averages)

Only at stages 1 and 2, where this rank's shard is a part of the full weights, is it one call per unit. For an
evaluation arena and averages exchange their contents: nothing exists a third time. Averages of split weights are whole,
in fp32; by an exchange they lose what is below the 24 bits that the model keeps.

Legend: `n` elements that this rank keeps of a flat.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from shardlite_kernels import join, split
from torch import Tensor

from shardlite.build import flats_of
from shardlite.errors import LayoutError, PhaseError, lacking
from shardlite.model import ShardLite
from shardlite.params import Flat, allocate_arenas, joined, zeros_on

Decay = float | Callable[[int], float]

_CHUNK = 1 << 18
"""Elements that are exchanged at a time: how much memory an exchange takes."""


class EMA:
    """Moving averages of the trainable parameters of `model`: `average = decay * average + (1 - decay) * weight`.

        ema = EMA(model, decay=0.999)
        for x, y in batches:
            ...
            optimizer.step()
            ema.update()
        with ema.swapped():
            validate(model)

    They start as the current weights, have the precision in which weights are kept (fp32 at least) and, to the bit, the
    values that `torch.optim.swa_utils.get_ema_multi_avg_fn` gives whole parameters, at any stage and number of ranks.
    Each rank averages what it keeps of the weights, without communication: 1/W of the model from stage 1 on, all of it
    at stage 0.

    Frozen parameters need no average, and no memory for one, until they are unfrozen: then they are averaged from their
    first step on. Those that are frozen later are averaged on. Buffers (BatchNorm's statistics) and ignored parameters
    are not averaged: the averaged model has those of the model, as `AveragedModel` has with `use_buffers=False`.

    `model.memory()` counts the averages under `averages`.

    Args:
        model: a wrapped model. It may have several averages.
        decay: from 0 to 1; or what returns it for the number of updates so far (0 at the first), to warm up:
            `lambda n: min(0.999, (1 + n) / (10 + n))`.

    Raises:
        TypeError: `model` is not wrapped, or `decay` is neither a number nor callable.
        ValueError: `decay` is not from 0 to 1.
        PhaseError: `model` has averaged weights now: this is inside `swapped()` of another average.
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
        self._bridge = model._bridge
        self._swapped = False
        self._averages: dict[Flat, Tensor] = {}
        self._runs: Sequence[tuple[Tensor, Tensor]] = ()
        self._split: Sequence[tuple[Tensor, Tensor, Tensor]] = ()
        self._bridge.in_backward.announce_change()
        self._take_in(flat for flat in flats_of(model._units) if flat.rows_now())
        self._bridge.in_backward.followers.add(self)

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the averages. To be called after each step of the optimizer, by every rank.

        Raises:
            PhaseError: inside `swapped()`.
            ValueError: the callable `decay` has returned something that is not from 0 to 1.
        """
        self._bridge.in_backward.announce_change()
        decay = _checked(self._decay(self.updates), self.updates) if callable(self._decay) else self._decay
        for average, weights in self._runs:
            average.lerp_(weights, 1 - decay)
        for chunk, high, low in self._split_chunks():
            chunk.lerp_(_joined(high, low), 1 - decay)
        self.updates += 1

    @contextmanager
    def swapped(self) -> Iterator[ShardLite]:
        """Give the model its averaged weights inside, and its trained weights back afterwards.

        Weights and averages change places, so the model's own come back to the bit, after an exception too. Gradients
        and the optimizer's state are not touched. What is written to the weights inside is written to the averages:
        `model.load_full_state_dict(saved)` loads those that `full_state_dict()` has returned.

        An optimizer cannot step inside. A backward has to be on the same side as its forward: across it is an error.
        To be entered and left by every rank, since the weights are gathered anew after both.

        Raises:
            PhaseError: the model has averaged weights already, or is inside a forward or `gathered()`.
        """
        self._bridge.in_backward.announce_change()
        if any(unit.users for unit in self._model._units):
            raise PhaseError("EMA: the weights are in use: enter swapped() outside of a forward and of gathered()")
        self._settle()
        self._exchange()
        try:
            yield self._model
        finally:
            try:
                self._settle()
            finally:
                self._exchange()

    def full_state_dict(self, *, rank: int | None = None) -> dict[str, Tensor]:
        """Return the averaged model as `model.full_state_dict(rank=rank)` would: whole tensors, an unsharded model's.

        What is not averaged is in it as the model has it. It swaps, so call it between a step and the next forward, on
        every rank.
        """
        with nullcontext() if self._swapped else self.swapped():
            return self._model.full_state_dict(rank=rank)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's averages by name, each as long as this rank's shard, and the number of updates.

        They are no copies, as those of an optimizer are none. `load_state_dict` takes them on the same rank, at the
        same world size and stage.

        Raises:
            PhaseError: inside `swapped()`.
        """
        self._refuse_if_swapped()
        return {"updates": self.updates, "part": self._part(), "averages": dict(_named(self._averages.items()))}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict()` has returned. Load the model, too: `decay`, and what is frozen, are not in it.

        Raises:
            LayoutError: it is another rank's, or another model's; nothing is changed then.
            PhaseError: inside `swapped()`.
        """
        self._refuse_if_swapped()
        part, given = state_dict.get("part"), state_dict.get("averages", {})
        if part != self._part():
            raise LayoutError(f"EMA: the state is of {part or 'something else'}, this rank keeps {self._part()}")
        named = [(flat, {slot.name for slot in flat.layout.slots}) for flat in flats_of(self._model._units)]
        flats = [flat for flat, names in named if flat in self._averages or names & given.keys()]
        _check_fit(dict(_named((flat, flat.local) for flat in flats)), given)
        self._take_in(flat for flat in flats if flat not in self._averages)
        for name, average in _named(self._averages.items()):
            average.copy_(given[name])
        self.updates = int(state_dict["updates"])

    def __repr__(self) -> str:
        numel = sum(view.numel() for _, view in _named(self._averages.items()))
        return f"EMA(decay={self._decay}, updates={self.updates}, elements={numel})"

    def before_change(self) -> None:
        """Start to average what has been unfrozen, before the first step changes it.

        Raises:
            PhaseError: inside `swapped()`.
        """
        self._refuse_if_swapped()
        flats = flats_of(self._model._units)
        self._take_in(flat for flat in flats if flat not in self._averages and flat.rows_now())

    def _refuse_if_swapped(self) -> None:
        if self._swapped:
            raise PhaseError(
                "the model has averaged weights now: step, update, swap, save or load averages outside of EMA.swapped()"
            )

    def _take_in(self, flats: Iterable[Flat]) -> None:
        """Average these from now on, too."""
        new = list(flats)
        if not new:
            return
        kinds = [(flat.master, flat.layout.trainable) for flat in new]
        with torch.inference_mode(False), torch.no_grad():
            memory = allocate_arenas(kinds, [flat.local.numel() for flat in new], zeros_on(self._model._context.device))
            for flat, average in zip(new, memory, strict=True):
                average.copy_(flat.weights())
                self._model.ledger.track("averages", average)
                self._averages[flat] = average
            pairs = [(average, flat.local) for flat, average in self._averages.items() if flat.low is None]
            self._runs = joined(pairs)
            self._split = [(a, flat.local, flat.low) for flat, a in self._averages.items() if flat.low is not None]

    def _settle(self) -> None:
        """Wait until no rank needs the current weights."""
        self._bridge.gatherer.end_pass()
        self._bridge.gatherer.settle()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap weights and averages."""
        for average, weights in self._runs:
            _exchange(average, weights)
        for chunk, high, low in self._split_chunks():
            weights = _joined(high, low)
            split(high, low, chunk)
            chunk.copy_(weights)
        self._swapped = not self._swapped
        self._bridge.mark_changed()

    def _split_chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield averages of split weights, with both parts of the weights, chunk by chunk."""
        for average, high, low in self._split:
            yield from zip(*(torch.split(each, _CHUNK) for each in (average, high, low)), strict=True)

    def _part(self) -> str:
        """Return in words which part of the weights this rank keeps."""
        rank, ranks = self._model._placement.rank, self._model._context.transport.world_size
        return "all" if rank is None else f"part {rank} of {ranks}"


def _joined(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 numbers that were split, [n]."""
    whole = torch.empty_like(high, dtype=torch.float32)
    join(whole, high, low)
    return whole


def _exchange(first: Tensor, second: Tensor) -> None:
    """Swap the elements of two tensors [n]."""
    held = first.new_empty(min(first.numel(), _CHUNK))
    for start in range(0, first.numel(), _CHUNK):
        ours, theirs = first[start : start + _CHUNK], second[start : start + _CHUNK]
        held[: ours.numel()].copy_(ours)
        ours.copy_(theirs)
        theirs.copy_(held[: ours.numel()])


def _checked(decay: float, update: int | None = None) -> float:
    """Return `decay` if it is one.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not from 0 to 1.
    """
    when = "" if update is None else f" for update {update}"
    if isinstance(decay, bool) or not isinstance(decay, int | float):
        raise TypeError(f"EMA: decay must be a number{' or callable' if update is None else ''}, got {decay!r}{when}")
    if not 0 <= decay <= 1:
        raise ValueError(f"EMA: decay must be from 0 to 1, got {decay!r}{when}")
    return float(decay)


def _named(memory: Iterable[tuple[Flat, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Cut what is laid out like `flat.local`, [n], into a view for each shard, under its parameter's name."""
    for flat, local in memory:
        for slot, view in zip(flat.layout.slots, flat.shard_views(local), strict=True):
            yield slot.name, view


def _check_fit(ours: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise unless `given` are tensors like `ours`."""
    missing, unknown = ours.keys() - given.keys(), given.keys() - ours.keys()
    if missing or unknown:
        raise LayoutError(
            f"EMA: the state {lacking(missing, unknown)}: was it saved from another model, or while others were frozen?"
        )
    for name, mine in ours.items():
        if given[name].shape != mine.shape:
            raise LayoutError(f"EMA: {name!r} has shape {list(given[name].shape)}, this rank's is {list(mine.shape)}")
