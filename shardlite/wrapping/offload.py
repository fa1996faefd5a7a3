"""The option `offload`: which optimizer states are kept in host memory. In: bytes of units. Out: a choice for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from shardlite_kernels import FORMATS, SCALE_BLOCK


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Which optimizer states are kept in host memory, and copied to the GPU for a step. `offload_of` makes it.

    States are the moments and the low bits of split weights. In the order of the units (the root first, then in order
    of registration), a unit keeps its states on the GPU if they fit into what is left of the part that stays. The
    states of the other units are offloaded.
    """

    share: float = 1.0
    """The share of the states' bytes that is offloaded at least, in (0, 1]."""

    resident: int | None = None
    """Bytes of states that may stay on the GPU, instead of a share."""

    @property
    def argument(self) -> bool | float:
        """The argument `offload` of `ShardLite`."""
        if self.resident is not None:
            return self.resident
        return True if self.share == 1 else self.share

    def choose(self, nbytes: Sequence[int]) -> list[bool]:
        """Return whether the states of each unit are offloaded, given their bytes in the order of the units.

        Raises:
            ValueError: no unit fits into the bytes that may stay on the GPU.
        """
        left = self.resident if self.resident is not None else int((1 - self.share) * sum(nbytes))
        smallest = min((each for each in nbytes if each), default=0)
        if self.resident is not None and left < smallest:
            raise ValueError(
                f"offload={self.resident} is the number of bytes of states that stay on the GPU, but the smallest unit "
                f"has {smallest}: pass more, or offload=True to keep all states in host memory"
            )
        offloaded = []
        for each in nbytes:
            offloaded.append(each > left)
            left -= 0 if offloaded[-1] else each
        return offloaded


def offload_of(given: bool | float | Offload | None) -> Offload | None:
    """Return the option `offload` of `ShardLite` as an `Offload`, or `None` if all states stay on the GPU.

    Raises:
        TypeError: `given` is not a bool, a share or a number of bytes.
        ValueError: a share is not from 0 to 1, or a number of bytes is negative.
    """
    if given is None or given is False or isinstance(given, Offload):
        return given or None
    if given is True:
        return Offload()
    if not isinstance(given, int | float):
        raise TypeError(
            "offload takes True, the share of states in host memory (0.5), or the bytes of states that stay on the "
            f"GPU (4 * 10**9); got {given!r}"
        )
    if isinstance(given, int) and given >= 0:
        return Offload(resident=given)
    if isinstance(given, int) or not 0 <= given <= 1:
        raise ValueError(f"offload must be a share from 0.0 to 1.0, or a number of bytes of at least 0; got {given!r}")
    return Offload(share=given) if given else None


def can_offload(device: torch.device) -> bool:
    """Return whether states of a model on `device` can be kept in other memory. A CPU has no other memory."""
    return device.type != "cpu"


def moment_nbytes(numel: int, master: torch.dtype, state: str) -> int:
    """Return the bytes of both moments of `numel` elements that are stepped in `master`, in the format `state`."""
    dtype = master.to_real() if state == "fp32" else FORMATS[state]
    exponents = 2 * (numel // SCALE_BLOCK) if state == "int8" else 0
    return 2 * numel * dtype.itemsize + exponents
