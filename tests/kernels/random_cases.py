"""Random bits as a launch over many parameters sees them."""

import torch
from shardlite_kernels.noise import keys, random_bits_reference


def random_by_rows(numel, rows=64):
    """32 random bits for each of `numel` elements, with another key for every `rows`-th part of them."""
    steps, zeros = torch.arange(1, rows + 1, dtype=torch.float32), torch.zeros(rows, dtype=torch.int64)
    row = torch.arange(numel) * rows // max(numel, 1)
    return random_bits_reference(torch.arange(numel), keys(steps, zeros, zeros).long()[row])
