"""A unit: the parameters that are gathered together. It holds tensors and a phase; others decide when it moves.

Three things stand for one parameter. The module's own `nn.Parameter` is what forward and autograd see: a view of the
full buffer while there is one, else a placeholder. The shard is what the optimizer sees: a view of the arena under the
original name. The slot says where both lie.

Legend: `W` ranks, `r` this rank, `S` elements per shard; a full buffer has `W*S` elements. A shard has the original
shape if this rank has all of the parameter, else `[k, 1, ...]`.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardlite.errors import LayoutError
from shardlite.lane import Flight
from shardlite.layout import Layout, Slot, round_up
from shardlite.ledger import Ledger
from shardlite.phase import Weights, check_move
from shardlite.trace import Trace
from shardlite.transport import Transport

_FLAT_ALIGN = 128
"""Bytes: where the flats start in a buffer, so that every access can be a wide one."""


@dataclass(frozen=True)
class Shared:
    """What all units of one wrapped model share."""

    instance: int
    """A number that tells wrapped models apart, the same on every rank."""

    transport: Transport
    trace: Trace
    ledger: Ledger

    @property
    def label(self) -> str:
        """The model in the name of an operation, so that no two models hear each other's messages."""
        return f"of model {self.instance}"


class Buffer:
    """Memory for one unit's full weights, and the means to tell whether somebody else still looks at it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.key = storage_key(self.bytes)
        self._own_uses = torch._C._storage_Use_Count(self.key)

    def escaped(self) -> bool:
        """Whether tensors that are not ours still view this buffer; to be asked after our own views are gone."""
        return bool(torch._C._storage_Use_Count(self.key) > self._own_uses)

    def poison(self) -> None:
        """Fill with NaN: all bits set is a NaN in every floating-point dtype."""
        self.bytes.fill_(0xFF)


def storage_key(tensor: Tensor) -> int:
    """Return what all views of one storage, and only they, have in common."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(eq=False, kw_only=True)
class Flat:
    """The parameters of one kind (dtype, trainable) in a unit."""

    layout: Layout
    params: Sequence[nn.Parameter]
    """The module's own, one per slot."""

    local: Tensor
    """What this rank keeps: its shard [S] in the arena, or all [W*S] where parameters are not sharded."""

    shards: Sequence[nn.Parameter]
    """The parts of `local` that belong to each slot, as the optimizer sees them."""

    placeholder: Tensor | None = None
    """The one element that parameters show while they are not full: NaN where the dtype has it."""

    sharded_range: tuple[int, int] | None
    """The elements of the full buffer that `local` is, or `None` where it is all of it."""

    def own_part(self, full: Tensor) -> Tensor:
        """Return what of a full buffer [W*S] this rank keeps: [S], or all of it where nothing is sharded."""
        return full if self.sharded_range is None else full[slice(*self.sharded_range)]

    def slots(self) -> Iterator[tuple[Slot, nn.Parameter, nn.Parameter]]:
        """Yield every slot with the module's parameter and the shard."""
        return zip(self.layout.slots, self.params, self.shards, strict=True)

    def views(self, full: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the module's parameters, each with its view of a full buffer [W*S]."""
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            yield param, full[slot.start : slot.stop].view(slot.shape)

    def shard_views(self, local: Tensor) -> list[Tensor]:
        """Cut something laid out like `local`, such as a gradient, into what belongs to each shard."""
        start = 0 if self.sharded_range is None else self.sharded_range[0]
        stop = start + local.numel()
        return [_cut(local, slot, *slot.within(start, stop)) for slot in self.layout.slots]


def _cut(local: Tensor, slot: Slot, first: int, stop: int) -> Tensor:
    """Return elements `[first, stop)`: in the original shape if that is the whole slot, else as `[k, 1, ...]`.

    The number of dimensions stays, so that rules like "no weight decay where `ndim < 2`" still work.
    """
    part = local[first:stop]
    if stop - first == slot.numel:
        return part.view(slot.shape)
    return part.view(stop - first, *[1] * (len(slot.shape) - 1))


def make_flat(layout: Layout, params: Sequence[nn.Parameter], local: Tensor, rank: int | None) -> Flat:
    """Tie a layout to the parameters and to this rank's memory; `rank` is `None` where parameters are not sharded."""
    flat = Flat(
        layout=layout,
        params=params,
        # `.data` gives this part of the arena a version counter of its own, which all its shards share. A counter per
        # shard would not do: a shard may be empty, and code that skips empty tensors would leave ranks with different
        # opinions on whether a gather is stale.
        local=local.data,
        shards=[],
        sharded_range=None if rank is None else layout.shard_range(rank),
    )
    flat.shards = [nn.Parameter(view, requires_grad=layout.trainable) for view in flat.shard_views(flat.local)]
    return flat


@dataclass(eq=False)
class Unit:
    """What is gathered together. `holds` counts those who need the full weights; they stay while it is not 0."""

    index: int
    name: str
    flats: Sequence[Flat]
    resident: bool = False
    """Never evicted for the sake of another unit: the root, whose parameters are used all through a pass."""

    phase: Weights = Weights.SHARDED
    holds: int = 0
    buffer: Buffer | None = None
    flight: Flight | None = None
    gathered_version: int = -1
    stale: bool = False
    """Whether the full weights may have been written to, so that the next use must gather anew."""

    gathers: int = 0
    escapes: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)
    """Buffers of this unit that somebody else views."""

    trainable: Sequence[Flat] = field(init=False)
    """The flats that have gradients."""

    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.trainable = [flat for flat in self.flats if flat.layout.trainable]
        self.nbytes = sum(round_up(flat.layout.full_nbytes, _FLAT_ALIGN) for flat in self.flats)

    def move(self, to: Weights) -> None:
        """Change the phase.

        Raises:
            PhaseError: the move is illegal.
        """
        check_move(self.name, self.phase, to)
        self.phase = to

    def params(self) -> Iterator[nn.Parameter]:
        """Yield the module's own parameters."""
        for flat in self.flats:
            yield from flat.params

    def writes(self) -> int:
        """Return a number that grows with every write into the full parameters while they are there."""
        return sum(param._version for param in self.params())

    def version(self) -> int:
        """Return a number that grows with every change of this rank's shards, whoever makes it."""
        return sum(flat.local._version for flat in self.flats)

    def full_views(self, buffer: Buffer) -> list[Tensor]:
        """View a buffer as one full tensor [W*S] per flat."""
        views, start = [], 0
        for flat in self.flats:
            nbytes = flat.layout.full_nbytes
            views.append(buffer.bytes[start : start + nbytes].view(flat.layout.dtype))
            start += round_up(nbytes, _FLAT_ALIGN)
        return views

    def bind(self, buffer: Buffer) -> None:
        """Let the module's parameters be views of `buffer`.

        Raises:
            LayoutError: somebody has let a parameter be something else meanwhile.
        """
        for flat, full in zip(self.flats, self.full_views(buffer), strict=True):
            expected = None if flat.placeholder is None else storage_key(flat.placeholder)
            for slot, (param, view) in zip(flat.layout.slots, flat.views(full), strict=True):
                if expected is not None and storage_key(param) != expected:
                    raise LayoutError(
                        f"parameter {slot.name!r} was given other memory (`.data = ...`) while it was sharded, which "
                        "would be lost. Write into it inside `gathered()`"
                    )
                param.data = view

    def unbind(self) -> None:
        """Let the module's parameters be placeholders: the shape of the parameter, the memory of one NaN."""
        for flat in self.flats:
            if flat.placeholder is None:
                flat.placeholder = _placeholder(flat.layout.dtype, flat.local.device)
            for slot, param in zip(flat.layout.slots, flat.params, strict=True):
                param.data = flat.placeholder.expand(slot.shape)


def _placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
