"""What was written into the full weights of a unit, taken over by this rank's shards.

Every rank writes the same, so each takes what is in its own part.

Legend: `W` ranks that share a model, `S` elements per shard; a full buffer has `W*S` elements.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shardlite.params import Flat, Unit
from shardlite.weights.all_gather import own_as_gathered


def take_over_all(unit: Unit) -> None:
    """Write the full weights of a unit in use back to its shards, and count them as gathered."""
    with torch.no_grad():
        for flat, full in places(unit):
            if differs(flat, full):
                take_over(flat, full)
    unit.gathered_version = unit.version()


def places(unit: Unit) -> Iterator[tuple[Flat, Tensor]]:
    """Yield each flat of a unit in use with its full weights [W*S]."""
    return zip(unit.flats, unit.fulls(), strict=True)


def differs(flat: Flat, full: Tensor) -> bool:
    """Whether this rank's part of the full weights is not what a gather makes of its shard. The host waits."""
    return not flat.in_place and not bool(_kept(flat, full).all())


def take_over(flat: Flat, full: Tensor) -> None:
    """Write changed elements back to the shard. Others keep all their digits: full weights may have fewer.

    (Of a quantized gather they are not even the shard's, rounded.)
    """
    ours = flat.own_part(full)
    flat.keep(torch.where(_kept(flat, full), flat.weights(), ours.to(flat.master)))


def _kept(flat: Flat, full: Tensor) -> Tensor:
    """Return which elements of this rank's part of the full weights are as they were gathered, [S]: NaN may be, too."""
    ours, gathered = flat.own_part(full), own_as_gathered(flat)
    return (ours == gathered) | ((ours != ours) & (gathered != gathered))
