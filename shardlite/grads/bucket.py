"""Buckets: the buffers that collect one unit's gradients until they are reduced.

Some of the root's gradients arrive first in a backward, and others last (for example those of a head and of an
embedding). So the root's bucket keeps autograd's tensors, and allocates its own memory only when the last gradient
arrives. On a GPU every bucket keeps autograd's tensors until then.

With order="tree" a bucket also sums the gradients of earlier parts of the global batch, like a binary counter:

    part   kept before        addition               kept after
    0                                                [0]
    1      [0]                0 + 1                  [0+1]
    2      [0+1]                                     [0+1] [2]
    3      [0+1] [2]          2 + 3, then with 0+1   [(0+1)+(2+3)]

So the parts of a rank, whose number is a power of two, are summed as a balanced binary tree. This tree is a branch of
the tree over all parts. For `n` parts at most `log2(n)` sums are kept between backwards.

In: gradients of single parameters. Out: full buffers to reduce. A bucket starts no communication.

Legend: `W` ranks, `S` elements per shard.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from shardlite_kernels import hop
from torch import Tensor, nn

from shardlite.comm import Context, Transport
from shardlite.errors import PhaseError
from shardlite.params import Flat, Slot, Unit, as_real, storage_key
from shardlite.params.layout import shared
from shardlite.params.unit import Gradients, check_move

PURPOSE = "gradient buckets"
"""The ledger's purpose for the memory of buckets, and of gradients that are not yet copied to buckets."""


_LARGEST_SPARE = 1 << 20
"""Largest number of bytes of a bucket whose memory is kept for the next bucket. For larger buckets,
allocation takes little time compared with the reduction, and other code may need the memory."""


class Memory(NamedTuple):
    """The memory of a bucket, and all views that the bucket makes of it."""

    key: object
    """Key that equal buckets share."""

    full: list[Tensor]
    """One full buffer per flat."""

    places: list[Tensor]
    """The place of each gradient."""

    padding: list[Tensor]
    """The elements that belong to no parameter."""

    uses: list[int]
    """The number of references to the memory of each full buffer, if nobody else has a view."""

    def uses_now(self) -> list[int]:
        """Return the number of references to the memory of each full buffer."""
        return [torch._C._storage_Use_Count(storage_key(full)) for full in self.full]


class Spares:
    """Memory of small buckets that were reduced, for the next equal bucket, and the number of buckets in use."""

    def __init__(self) -> None:
        self.in_use = 0
        """Number of buckets that are not empty. The root's bucket does not count."""

        self._free: list[Memory] = []

    def take(self, key: object) -> Memory | None:
        """Return the memory of an equal bucket. If there is none, free all memory, because another kind follows."""
        if self._free and self._free[-1].key is key:
            return self._free.pop()
        self._free.clear()
        return None

    def keep(self, memory: Memory) -> None:
        """Keep memory that its bucket has released. Memory that became a gradient, or that is sent, is not kept."""
        if memory.uses_now() == memory.uses:
            self._free.append(memory)

    def clear(self) -> None:
        """Free all memory."""
        self._free.clear()


class PartSum(NamedTuple):
    """The sum of the gradients of consecutive parts."""

    parts: int
    full: Sequence[Tensor]
    """One full buffer [W*S] per flat."""


@dataclass(eq=False)
class Bucket:
    """One unit's gradients before they are reduced."""

    unit: Unit
    context: Context
    most_parts: int
    """Maximum number of parts in one of `sums`."""

    spares: Spares
    """Memory that all buckets of a model share."""

    sums: list[PartSum] = field(default_factory=list)
    """Sums over earlier parts of the global batch, in the order of the parts. Each sum has more parts than the next."""

    kept: Sequence[Tensor] = ()
    """Sums over the ranks that share a model, of earlier backwards of an accumulation: one [S] per flat."""

    used_earlier: set[int] = field(default_factory=set)
    """The ids of the parameters that an earlier part, or an earlier backward of the accumulation, used."""

    phase: Gradients = Gradients.EMPTY
    flats: list[Flat] = field(init=False)
    """The unit's flats that have gradients."""

    full: list[Tensor] = field(default_factory=list)
    """One full buffer per flat, in the layout and dtype of its gradients."""

    early: dict[int, Tensor] = field(default_factory=dict)
    """Autograd's tensors that arrived before `full` was allocated, by `id` of their parameters.

    Keys are `id`s, because the hash of a tensor is computed in Python.
    """

    places: dict[int, Tensor] = field(default_factory=dict)
    """For each parameter, by `id`: the view of `full` for its gradient, in the parameter's shape (`as_real`)."""

    used: set[int] = field(default_factory=set)
    """The ids of the parameters whose gradients the bucket holds."""

    _memory: Memory | None = None
    """The memory of `full`, if a later bucket may use it."""

    expected: int = field(init=False)
    """Number of parameters that have gradients."""

    def __post_init__(self) -> None:
        self.follow_requires_grad()

    def move(self, to: Gradients) -> None:
        """Change the phase.

        Raises:
            PhaseError: the transition is illegal.
        """
        check_move(self.unit.name, self.phase, to)
        if not self.unit.is_root:  # a move between two other phases changes nothing
            self.spares.in_use += (self.phase is Gradients.EMPTY) - (to is Gradients.EMPTY)
        self.phase = to

    def fill(self) -> None:
        """Take full buffers from `spares`, or allocate them. Then copy early gradients into them."""
        self._memory = self.spares.take(self._key)
        if self._memory is None:
            self.allocate()
            self._memory = self._small_memory()
        else:
            self._use([*self._memory.full], self._memory.places)
        while self.early:
            self.places[(early := self.early.popitem())[0]].copy_(early[1])
            del early  # frees each gradient before the next is copied

    def allocate(self, carrier: Transport | None = None) -> None:
        """Allocate the full buffers. If `carrier` is not `None`, this transport allocates and sends them."""
        full = []
        for flat in self.flats:
            numel = flat.gradients.cuts[-1]
            if carrier is None:
                full.append(self.context.empty(numel, flat.reduce))
            else:
                memory = carrier.empty_persistent(numel * flat.reduce.itemsize, self.context.device)
                full.append(memory.view(flat.reduce))
        self.context.ledger.track(PURPOSE, *full, *self.early.values())
        self._use(
            full, [view for flat, each in zip(self.flats, full, strict=True) for view in flat.gradients.views(each)]
        )

    def _use(self, full: list[Tensor], places: Sequence[Tensor]) -> None:
        """Use full buffers, and the place of each gradient in them."""
        self.full, self.places = full, dict(zip(self._slots, places, strict=True))
        if self.phase is Gradients.EMPTY:
            self.move(Gradients.FILLING)

    def _small_memory(self) -> Memory | None:
        """Return the memory that was allocated, or `None` if it is too large to be kept."""
        if sum(full.nbytes for full in self.full) > _LARGEST_SPARE:
            return None
        both = zip(self.flats, self.full, strict=True)
        padding = [full[start:stop] for flat, full in both for start, stop in flat.gradients.padding]
        memory = Memory(self._key, [*self.full], [*self.places.values()], padding, [])
        memory.uses.extend(memory.uses_now())
        return memory

    def copy_in(self) -> tuple[Callable[[], None], list[Tensor]]:
        """Return a function that fills the full buffers, and the early gradients.

        The function copies the early gradients into the full buffers, and zeroes all other elements. It may run on
        another stream, because it reads no state of the bucket.
        """
        places, early = [self.places[key] for key in self.early], [*self.early.values()]
        self.early.clear()
        return partial(_copy_and_zero, places, early, self._gaps()), early

    def add_gradient(self, param: nn.Parameter, grad: Tensor | None, *, has_user_hooks: bool) -> None:
        """Store a gradient in the dtype of the reduction, or add it to the stored gradient.

        Args:
            param: the module's parameter.
            grad: gradient of `param`. `None` counts as zero, for ranks that `join` excludes.
            has_user_hooks: whether hooks of the program may write to `grad`, so that it must be copied.

        Raises:
            PhaseError: the parameter was frozen between its forward and this backward.
        """
        key = id(param)
        if key not in self._slots:
            raise PhaseError(
                f"parameter {self._name_of(param)!r} got a gradient, but did not require one at the last forward: "
                "change requires_grad after the backward"
            )
        if grad is None:
            return
        dense = as_real(grad.to_dense()) if grad.is_sparse or grad.is_complex() else grad
        if not self.full:
            self.early[key] = early = dense.clone() if has_user_hooks else dense
            if self.unit.is_root:  # its gradients stay until the end of the backward; `allocate` counts others together
                self.context.ledger.track(PURPOSE, early)
            if self.phase is Gradients.EMPTY:
                self.move(Gradients.FILLING)
        elif key in self.used:
            self.places[key].add_(dense)
        else:
            self.places[key].copy_(dense)
        self.used.add(key)

    def gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return the gradient of `param` in the bucket, or `None`."""
        key = id(param)
        if self.phase is not Gradients.FILLING or key not in self.used:
            return None
        # A view, so that `spares` knows whether the program keeps the gradient.
        found = self.early[key] if key in self.early else self.places[key].detach()
        return torch.view_as_complex(found) if self.flats[self._slots[key][0]].master.is_complex else found

    def multiply(self, factor: float) -> None:
        """Multiply all gradients in the bucket by `factor`."""
        for memory in (*self.full, *self.kept):
            memory.mul_(factor)
        for key, grad in self.early.items():
            self.early[key] = grad.to(self.flats[self._slots[key][0]].reduce) * factor

    def drop(self, param: nn.Parameter) -> None:
        """Drop the gradient of `param`, and its gradients of earlier parts."""
        if id(param) in self.used_earlier:
            i, slot = self._slots[id(param)]
            for each in self.sums:
                each.full[i][slot.start : slot.stop].zero_()
            if self.kept:
                first, last = slot.within(*self.flats[i].gradients.shard_range(self.context.transport.rank))
                self.kept[i][first:last].zero_()
            self.used_earlier.discard(id(param))
        if self.phase is Gradients.FILLING:
            self.used.discard(id(param))
            self.early.pop(id(param), None)
            if not self.used:
                self.clear()

    def _name_of(self, param: nn.Parameter) -> str:
        flat = next(flat for flat in self.unit.flats if any(each is param for each in flat.params))
        return next(slot.name for each, slot in zip(flat.params, flat.layout.slots, strict=True) if each is param)

    def zero_the_rest(self) -> None:
        """Zero the uninitialized elements: padding and missing gradients. Zero padding stays zero in a reduction."""
        memory = self._memory if len(self.used) == self.expected else None
        if gaps := self._gaps() if memory is None else memory.padding:
            torch._foreach_zero_(gaps)

    def _gaps(self) -> list[Tensor]:
        gaps: list[Tensor] = []
        for flat, full in zip(self.flats, self.full, strict=True):
            unwritten: Iterable[tuple[int, int]] = flat.gradients.padding
            if len(self.used) < self.expected:
                unwritten = flat.gradients.gaps({i for i, used in enumerate(self.flags(flat)) if used})
            gaps += [full[start:stop] for start, stop in unwritten]
        return gaps

    def flags(self, flat: Flat) -> list[int]:
        """Return one flag per trainable parameter of `flat`: 1 if the bucket holds its gradient, else 0."""
        return [int(id(flat.params[index]) in self.used) for index in flat.trainable_slots]

    def first_bad(self) -> int | None:
        """Return the index in `flags` of the first gradient with a NaN or infinity, or `None`.

        The host waits for the device.
        """
        for place, (key, (i, slot)) in enumerate(self._slots.items()):
            own = self.early.get(key)
            grads = [own.to(self.flats[i].reduce)] if own is not None else []
            fulls = (self.full, *(each.full for each in self.sums))
            grads += [full[i][slot.start : slot.stop] for full in fulls if full]
            if key in self.used and not all(grad.isfinite().all() for grad in grads):
                return place
        return None

    @property
    def accumulates(self) -> bool:
        """Whether the bucket has gradients that are not reduced yet."""
        return self.phase is Gradients.FILLING or bool(self.sums or self.kept)

    def keep_sums(self, sums: Sequence[Tensor], used: Sequence[int]) -> None:
        """Keep sums over ranks for the reduction that ends the accumulation. `used` has one flag per parameter."""
        self.kept = sums
        self.used_earlier = {key for key, flag in zip(self._slots, used, strict=True) if flag}

    def take_sums(self) -> Sequence[Tensor]:
        """Return the kept sums. The bucket no longer has them, but has used their parameters."""
        kept, self.kept = self.kept, ()
        if kept:
            self.used |= self.used_earlier
        return kept

    def keep_part(self) -> None:
        """Move the gradients to the sums over earlier parts. Missing gradients and padding must be zero."""
        self.sums.append(PartSum(self._add_sums(), self.full))
        self.used_earlier |= self.used
        self.release()
        self.used = set()
        self.move(Gradients.EMPTY)

    def add_earlier_parts(self) -> int:
        """Add the sums over earlier parts to the gradients. With one rank, the first sum stays separate.

        Return the number of all parts.
        """
        parts = self._add_sums()
        self.used |= self.used_earlier
        return parts + sum(each.parts for each in self.sums)

    def _add_sums(self) -> int:
        """Add the latest sum to the gradients in place, as long as both have the same number of parts.

        Return the number of parts in the gradients.
        """
        parts = 1
        while self.sums and self.sums[-1].parts == parts < self.most_parts:
            for own, earlier in zip(self.full, self.sums.pop().full, strict=True):
                hop(own, earlier, own)
            parts *= 2
        return parts

    def begin_reduction(self) -> None:
        """Refuse gradients until `clear` is called. The bucket may be empty."""
        if self.phase is not Gradients.FILLING:
            self.move(Gradients.FILLING)
        self.phase = Gradients.REDUCING  # always legal from `FILLING`

    def follow_requires_grad(self) -> None:
        """Expect gradients of the parameters that now require gradients. The bucket must be empty."""
        for flat in self.unit.flats:
            flat.follow_requires_grad()
        self.flats = self.unit.trainable
        self._slots: dict[int, tuple[int, Slot]] = {  # index of the flat and slot, by `id` of the parameter
            id(flat.params[index]): (i, slot)
            for i, flat in enumerate(self.flats)
            for index, slot in zip(flat.trainable_slots, flat.gradients.slots, strict=True)
        }
        self.expected = len(self._slots)
        self._key = shared(tuple((flat.reduce, flat.gradients.places_key) for flat in self.flats))

    def release(self) -> None:
        """Drop the references to the full buffers, because their memory may now belong to the gradients of shards."""
        self.full, self.places, self._memory = [], {}, None

    def clear(self) -> None:
        """Empty the bucket. After a reduction, `spares` may keep the memory."""
        memory = self._memory
        self.release()
        if memory is not None and self.phase is Gradients.REDUCING:
            self.spares.keep(memory)
        self.early.clear()
        self.used.clear()
        self.sums.clear()
        self.kept = ()
        self.used_earlier.clear()
        if self.phase is not Gradients.EMPTY:
            self.move(Gradients.EMPTY)


def _copy_and_zero(places: list[Tensor], grads: list[Tensor], gaps: list[Tensor]) -> None:
    if grads:
        torch._foreach_copy_(places, grads)
    if gaps:
        torch._foreach_zero_(gaps)
