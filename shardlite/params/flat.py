"""A flat (flat parameter): the parameters of one kind in a unit, one after the other in one buffer.

Three objects represent one parameter. Forward and autograd use the module's own `nn.Parameter`, which is a view
of the full buffer or, while there is no full buffer, a placeholder. The optimizer uses the shard, a view of the arena
(the contiguous buffer of this rank's shards) under the original name. The slot records the place of the parameter and
of its shard.

Legend: `W` ranks, `S` elements per shard; a full buffer has `W*S` elements. A shard has the original shape if this rank
keeps the full parameter, else `[k, 1, ...]`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import compress

import torch
from shardlite_kernels import joined, split
from torch import Tensor, nn

from shardlite.params.full_buffer import storage_key
from shardlite.params.host_states import HostStates
from shardlite.params.layout import Layout, Place, Slot, mark_padded, views
from shardlite.params.parameters import Placeholder, become, end_steps, late, requires_grad_of
from shardlite.params.shard_tensor import Gather, ShardTensor, apart


@dataclass(eq=False, kw_only=True)
class Flat:
    """The parameters of one kind in a unit. They have the same dtypes, and either all or none are trainable."""

    layout: Layout
    """Layout of the weights. Its dtype is the one in which this rank keeps the weights."""

    compute: torch.dtype
    """Dtype of the full weights, for forward and backward."""

    reduce: torch.dtype
    """Dtype of gradients while they are summed."""

    quantized: bool
    """Whether gathers send 8-bit codes."""

    params: Sequence[nn.Parameter]
    """The module's own parameters, one per slot."""

    rank: int | None
    """Rank whose shard `local` contains, or `None` if `local` contains all shards."""

    local: Tensor
    """Weights that this rank keeps: its shard [S] in the arena, or all weights [W*S]."""

    low: Tensor | None = None
    """Lower part of split weights, laid out like `local`, which is the upper part. `None` if weights are not split."""

    states: HostStates | None = None
    """Host memory for the optimizer states of the unit, with `low`. `None` if the states stay on the device."""

    full: Tensor | None = None
    """Permanent memory of the full weights [W*S], if any. `local` may be a view of a part of this memory."""

    shards: Sequence[nn.Parameter] = ()
    """The parameters that the optimizer steps, one per slot: views of `local`."""

    placeholder: Tensor | None = None
    """Memory of placeholders: one element, NaN if the dtype has NaN."""

    memory: Tensor = field(init=False)
    """The same as `local`, for readers of facts other than its values."""

    trainable_slots: tuple[int, ...] = field(init=False)
    """Indices of the slots that have gradients."""

    gradients: Layout = field(init=False)
    """Layout of the gradients, as real numbers. It contains the trainable slots only."""

    gradient_starts: Sequence[int] = field(init=False)
    """Index of each gradient's first element in this rank's gradient shard, as real numbers."""

    _own_gradients: Sequence[Place] = field(init=False)
    """Place of each gradient's elements in this rank's gradient shard."""

    _hidden: Sequence[Tensor] = field(init=False, default=())
    """The placeholder expanded to the shape of each slot."""

    def __post_init__(self) -> None:
        self.memory = self.local
        self.follow_requires_grad()

    def trainable_now(self) -> tuple[int, ...]:
        """Return the indices of the slots whose parameters require gradients."""
        return tuple(compress(range(len(self.params)), requires_grad_of(self.params)))

    def follow_requires_grad(self) -> None:
        """Read `requires_grad` of the parameters, and update the record of slots that have gradients."""
        self.trainable_slots = self.trainable_now()
        trained = self.layout.only(self.trainable_slots, self.layout.dtype)
        self.gradients = replace(trained.real, dtype=self.reduce)
        self._own_gradients = _places(trained, self.own_range(trained))
        own = self.own_range(self.gradients)
        self.gradient_starts = [slot.within(*own)[0] for slot in self.gradients.slots]

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full weights."""
        return self.layout.full_numel * self.compute.itemsize

    @cached_property
    def master(self) -> torch.dtype:
        """Dtype of the weights that the optimizer steps."""
        return self.local.dtype if self.low is None else torch.float32

    def weights(self, first: int = 0, stop: int | None = None) -> Tensor:
        """Return elements `[first, stop)` of this rank's weights in full precision.

        The result is a view of `local`, or an fp32 copy of split weights.
        """
        part = slice(first, stop)
        return self.local[part] if self.low is None else joined(self.local[part], self.lower(part))

    def settle(self) -> None:
        """Let the host wait until `low` may be read and written, if it is in host memory."""
        if self.states is not None:
            self.states.settle()

    def lower(self, part: slice) -> Tensor:
        """Return elements `part` of the lower part of split weights, on the device of the weights."""
        assert self.low is not None, "the weights are split"
        self.settle()
        return self.low[part].to(self.local.device)

    def write(self, weights: Tensor, begin: int = 0) -> None:
        """Overwrite elements `[begin, begin + n)` of this rank's weights with `weights` [n] (any float dtype)."""
        part = slice(begin, begin + weights.numel())
        if self.low is None:
            self.local[part].copy_(weights)
        else:
            low = self.lower(part)
            split(self.local[part], low, weights.to(self.local.device, torch.float32).contiguous())
            if self.states is not None:
                self.low[part].copy_(low)
            torch.autograd.graph.increment_version(self.local)  # kernels do not increment the version

    def write_param(self, index: int, weights: Tensor) -> None:
        """Overwrite this rank's elements of slot `index` with `weights`: as many elements, in any float dtype."""
        self.write(weights.reshape(-1), self.layout.slots[index].within(*self.own_range(self.layout))[0])

    def shard_tensor(self, index: int, gather: Gather) -> Tensor:
        """Return this rank's elements of slot `index` in full precision, for a state dict.

        Args:
            index: index of the slot.
            gather: function that gathers the full tensor.

        Returns:
            A plain tensor if this rank keeps the full parameter, else a `ShardTensor`.
        """
        slot, own = self.layout.slots[index], self.own_range(self.layout)
        start, stop = slot.within(*own)
        if slot.numel == 0:  # no rank has elements of an empty parameter
            return torch.empty(slot.shape, dtype=self.master, device=self.local.device)
        if self.low is None:
            (local,) = views(self.local, [_place(slot, start, stop)])
            if self.rank is None:
                return apart(local)
            if self.states is not None:
                local = late(local, self.states.wait_for_step)
            return ShardTensor(local, slot.shape, self.range_of(index)[0], gather=gather, is_weight=True)
        high, low, shape = self.local[start:stop], self.low[start:stop], self.shards[index].shape
        if self.states is not None:
            low = late(low, self.states.settle)  # behind the step of the upper part
        return ShardTensor(
            lambda high, low: joined(high, low.to(high.device)).view(shape),
            slot.shape,
            self.range_of(index)[0],
            sources=(high, low),
            numel=stop - start,
            dtype=torch.float32,
            device=high.device,
            encode=partial(self.write_param, index),
            gather=gather,
            is_weight=True,
        )

    @property
    def in_place(self) -> bool:
        """Whether `local` lies in the permanent memory of the full weights."""
        return self.full is not None and storage_key(self.full) == storage_key(self.local)

    def own_range(self, layout: Layout) -> tuple[int, int]:
        """Return the range of a full buffer that this rank keeps, given the buffer's layout."""
        return (0, layout.full_numel) if self.rank is None else layout.shard_range(self.rank)

    def own_part(self, full: Tensor) -> Tensor:
        """Return the part of the full weights [W*S] that this rank keeps: its shard [S], or all weights [W*S]."""
        return full[slice(*self.own_range(self.layout))]

    def unbind(self) -> None:
        """Turn the module's parameters into placeholders: one NaN, expanded to the shape of each parameter."""
        if self.placeholder is None:
            nan = float("nan") if self.compute.to_real().is_floating_point else 0
            self.placeholder = torch.full((), nan, dtype=self.compute, device=self.local.device)
            self._hidden = [self.placeholder.expand(slot.shape) for slot in self.layout.slots]
        become(Placeholder, zip(self.params, self._hidden, strict=True))

    def places(self, start: int) -> list[Place]:
        """Return the place of each slot in memory of the dtype `compute`, in which the flat begins at byte `start`."""
        first = start // self.compute.itemsize
        return [(slot.shape, slot.stride, first + slot.start) for slot in self.layout.slots]

    def views(self, full: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """For each of the module's parameters, return a pair: the parameter, and its view of the full buffer [W*S]."""
        return zip(self.params, self.layout.views(full), strict=True)

    def shard_views(self, local: Tensor) -> list[Tensor]:
        """For each shard, return a view of its part of the argument `local`, which is laid out like the weights."""
        return views(local, _places(self.layout, self.own_range(self.layout)))

    def part_of(self, index: int, tensor: Tensor) -> Tensor:
        """Return the part of `tensor` that belongs to the shard of slot `index`. `tensor` has the parameter's shape."""
        first, stop = self.range_of(index)
        return tensor.reshape(-1)[first:stop].view(self.shards[index].shape)

    def range_of(self, index: int) -> tuple[int, int]:
        """Return the range of the elements of slot `index` that this rank keeps. `(0, 0)` stands for no elements."""
        slot, own = self.layout.slots[index], self.own_range(self.layout)
        first, stop = slot.within(*own)
        return (own[0] + first - slot.start, own[0] + stop - slot.start) if first < stop else (0, 0)

    def cuts_of(self, index: int) -> list[int]:
        """Return the `W + 1` cuts between ranks, as indices of elements of slot `index`."""
        return self.layout.slots[index].cut(self.layout.cuts)

    def gradient_views(self, mean: Tensor) -> list[Tensor]:
        """Return the part of a gradient shard that belongs to each trainable slot."""
        return mark_padded(views(mean.view(self.master), self._own_gradients))


class OffloadedFlat(Flat):
    """A flat with optimizer states in host memory. Readers of `local` wait for its latest step."""

    @property
    def local(self) -> Tensor:
        """Weights that this rank keeps. The current stream is ordered after their latest step."""
        if self.states is not None:
            self.states.wait_for_step()
        return self.memory

    @local.setter
    def local(self, value: Tensor) -> None:
        self.memory = value

    def end_step(self) -> None:
        """Order the current stream after the latest step. The shards are read as before it."""
        if self.states is not None:
            self.states.wait_for_step()
        end_steps(self.shards)


def _places(layout: Layout, own: tuple[int, int]) -> list[Place]:
    """Return the place of each slot's elements in the range `own` of a full buffer."""
    return [_place(slot, *slot.within(*own)) for slot in layout.slots]


def _place(slot: Slot, first: int, stop: int) -> Place:
    """Return the place of elements `[first, stop)` of a slot.

    If the range is the whole slot, the shape is that of the parameter. Otherwise the shape is `[k, 1, ...]`, with the
    same number of dimensions, so that rules like "no weight decay where `ndim < 2`" still work.
    """
    if stop - first == slot.numel:
        return slot.shape, slot.stride, first
    ones = (1,) * max(len(slot.shape), 1)
    return (stop - first, *ones[1:]), ones, first
