"""Formulas that others have published for the bytes and the traffic of data parallel training, for comparison.

They count model states (weights, gradients, optimizer state), neither activations nor buffers.

Legend: `n` parameters, `W` ranks, `M` bytes of the gradients or weights.
"""

from __future__ import annotations


def model_states(n: float, stage: int = 0, world_size: int = 1) -> float:
    """Return the bytes per rank in mixed precision at a stage of ZeRO: table 1 of Rajbhandari et al. 2020.

    16 n without sharding, for example 5.12 GB for BERT-Large (0.32 billion), 24 GB for GPT-2 (1.5), 275 GB for
    Turing-NLG (17.2) and 2800 GB for GPT-3 (175).
    """
    weights, gradients, optimizer = 2 * n, 2 * n, 12 * n
    shares = {
        0: weights + gradients + optimizer,
        1: weights + gradients + optimizer / world_size,
        2: weights + (gradients + optimizer) / world_size,
        3: (weights + gradients + optimizer) / world_size,
    }
    return shares[stage]


def zero2_by_deepspeed(n: float, world_size: int) -> float:
    """Return DeepSpeed's estimate for ZeRO-2 without offload: `4 n + 16 n / W`.

    deepspeed.readthedocs.io, "Memory Requirements" (docs/code-docs/source/memory.rst). Weights count as 4 bytes, and
    all gradients as sharded fp32.
    """
    return 4 * n + 16 * n / world_size


def zero3_by_deepspeed(n: float, largest: float, world_size: int) -> float:
    """Return DeepSpeed's estimate for ZeRO-3 without offload: `4 l + 18 n / W`.

    The same page. The largest layer, of `l` parameters, is gathered in 16 bits, and its gradients are as large.
    """
    return 4 * largest + 18 * n / world_size


def ring_all_reduce(nbytes: float, world_size: int) -> float:
    """Return what each rank sends to all-reduce a buffer over a ring: `2 (W-1)/W M` (Patarasuk and Yuan 2009)."""
    return 2 * (world_size - 1) / world_size * nbytes


def fully_sharded(nbytes: float, world_size: int) -> float:
    """Return what each rank sends in a step of ZeRO-3: two gathers and a reduction, `3 (W-1)/W M` (ZeRO, section 7)."""
    return 3 * (world_size - 1) / world_size * nbytes
