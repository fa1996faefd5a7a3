"""Published formulas for the bytes and the traffic of data parallel training, for comparison.

The formulas count model states (weights, gradients, optimizer state) but neither activations nor buffers.

Legend: `n` parameters, `W` ranks, `M` bytes of all gradients or all weights.
"""


def model_states(n: float, stage: int = 0, world_size: int = 1) -> float:
    """Return the bytes per rank in mixed precision at a stage of ZeRO (table 1 of Rajbhandari et al. 2020).

    Without sharding, the states take 16 n bytes: for example 5.12 GB for BERT-Large (0.32 billion parameters), 24 GB
    for GPT-2 (1.5), 275 GB for Turing-NLG (17.2) and 2800 GB for GPT-3 (175).
    """
    states = 12 * n, 2 * n, 2 * n  # optimizer state, gradients, weights: each stage shards one more of them
    return sum(states[:stage]) / world_size + sum(states[stage:])


def zero2_by_deepspeed(n: float, world_size: int) -> float:
    """Return DeepSpeed's estimate of bytes per rank for ZeRO-2 without offload: `4 n + 16 n / W`.

    Source: deepspeed.readthedocs.io, "Memory Requirements" (docs/code-docs/source/memory.rst). A weight counts
    as 4 bytes on each rank. Gradients count as fp32 and are sharded.
    """
    return 4 * n + 16 * n / world_size


def zero3_by_deepspeed(n: float, largest: float, world_size: int) -> float:
    """Return DeepSpeed's estimate of bytes per rank for ZeRO-3 without offload: `4 l + 18 n / W`.

    The source is the page that `zero2_by_deepspeed` names. The largest layer has `l` parameters. The layer is gathered
    in 16 bits, and its gradients have the same size.
    """
    return 4 * largest + 18 * n / world_size


def ring_all_reduce(nbytes: float, world_size: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce: `2 (W-1)/W M` (Patarasuk and Yuan 2009)."""
    return 2 * (world_size - 1) / world_size * nbytes


def fully_sharded(nbytes: float, world_size: int) -> float:
    """Return the bytes that each rank sends in a step of ZeRO-3, `3 (W-1)/W M`: two gathers and a reduction.

    Source: Rajbhandari et al. 2020, section 7.
    """
    return 3 * (world_size - 1) / world_size * nbytes
