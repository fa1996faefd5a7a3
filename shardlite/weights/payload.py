"""What a gather sends for a flat: the weights that are computed with or, quantized, codes of 8 bits for them.

    plain       shard [S] -> cast into its place in the full weights [W*S] -> all-gather
    quantized   shard [S] -> codes into its row of a wire [W*R] -> all-gather -> full weights [W*S]

    row   | S codes | S/32 scales | padding |     R bytes, a multiple of 16

Blocks of 32 lie within one parameter and within one shard, so what is sent for a weight does not depend on `W`. A rank
reads its own weights from its own codes as well: all ranks compute with the same. The shard itself keeps its digits.

Legend: `W` ranks, `S` elements per shard, a multiple of 32, `R` bytes per row.
"""

import torch
from shardlite_kernels import cast, dequantise, quantise
from torch import Tensor

from shardlite.params import ALIGN, Empty, Flat, round_up

_ROW_ALIGN = 16
"""Bytes: where rows start, so that every access can be a wide one."""


def place_own(flat: Flat, full: Tensor) -> None:
    """Cast this rank's shard into its place in the full weights [W*S], if it is not there already."""
    if flat.in_place:
        return
    own = flat.own_part(full)
    if own.dtype == flat.local.dtype:
        own.copy_(flat.local)
    else:
        cast(own, flat.local)


def pack(flat: Flat, empty: Empty) -> Tensor:
    """Return a wire [W*R] that `empty` makes, of which this rank's row has the codes of its shard."""
    assert flat.rank is not None, "who has all weights gathers none"
    wire = empty(flat.layout.world_size * _row_nbytes(flat), torch.uint8)
    codes, scales = _columns(flat, wire)
    quantise(codes[flat.rank], scales[flat.rank], flat.local)
    return wire


def unpack(flat: Flat, wire: Tensor, full: Tensor) -> None:
    """Fill the full weights [W*S] with what the codes of all ranks mean."""
    dequantise(full, *_columns(flat, wire))


def own_as_gathered(flat: Flat) -> Tensor:
    """Return what a gather makes of this rank's shard, [S] in the dtype of the full weights."""
    if not flat.quantized:
        return flat.local.to(flat.compute)
    numel = flat.local.numel()
    codes = flat.local.new_empty(numel, dtype=torch.int8)
    scales = flat.local.new_empty(numel // ALIGN, dtype=torch.uint8)
    own = flat.local.new_empty(numel, dtype=flat.compute)
    quantise(codes, scales, flat.local)
    dequantise(own, codes, scales)
    return own


def _row_nbytes(flat: Flat) -> int:
    """`R`."""
    shard = flat.layout.shard_numel
    return round_up(shard + shard // ALIGN, _ROW_ALIGN)


def _columns(flat: Flat, wire: Tensor) -> tuple[Tensor, Tensor]:
    """View the codes [W, S] and scales [W, S/32] in a wire."""
    shard = flat.layout.shard_numel
    rows = wire.view(flat.layout.world_size, _row_nbytes(flat))
    return rows[:, :shard].view(torch.int8), rows[:, shard : shard + shard // ALIGN]
