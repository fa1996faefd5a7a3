"""Where optimizer states can be kept, and their bytes."""

import torch
from shardlite_kernels import FORMATS, SCALE_BLOCK


def can_offload(device: torch.device) -> bool:
    """Return whether states of a model on `device` can be kept in other memory. A CPU has no other memory."""
    return device.type != "cpu"


def moment_nbytes(numel: int, master: torch.dtype, state: str) -> int:
    """Return the bytes of both moments of `numel` elements that are stepped in `master`, in the format `state`."""
    dtype = master.to_real() if state == "fp32" else FORMATS[state]
    exponents = 2 * (numel // SCALE_BLOCK) if state == "int8" else 0
    return 2 * numel * dtype.itemsize + exponents
