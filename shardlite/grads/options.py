"""Compare the options of steps (learning rates, betas, the limit of a norm) between ranks, without a message.

Every rank steps its own shards. If ranks step with different options, no run on one device gives the same result. In
some steps each rank computes two hashes of its options, which travel with the gradient flags:

    rank 0 sends (W-1) * hash, every other rank -hash: the sum over `W` ranks is 0 if all hashes are equal

If the sum is not 0, ranks step with different options. On the CPU the next backward then raises the error on every
rank. On a GPU, all ranks skip steps until the host, which does not wait, has read the sum.
"""

import struct
from collections.abc import Iterable, Sequence
from numbers import Real
from zlib import crc32

from torch import Tensor
from torch.optim import Optimizer

from shardlite.comm import Context
from shardlite.errors import LayoutError
from shardlite.grads.flags import SentNumbers

STEPS, EVERY = 3, 50
"""Options are read in the first `STEPS` of each `EVERY` steps."""

NUMEL = 2
"""Number of integers that a rank sends."""

_COMPARED = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "alpha", "rho", "max_update")
"""Options that must be equal on all ranks. A class may keep other numbers in its groups, such as step counts."""


class StepOptions:
    """The options of the steps since the latest backward of one wrapped model."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sent = SentNumbers(context.device)
        self._facts: list[tuple[str, float]] = []
        self._complete = False  # whether the facts were sent, so that the next ones replace them
        self._sums: Tensor | None = None

    def note(self, facts: Iterable[tuple[str, float]]) -> None:
        """Record options as pairs of a name and a number, if this is a step in which options are read."""
        if self._context.version.number % EVERY >= STEPS:
            return
        if self._complete:
            self._facts, self._complete = [], False
        self._facts += facts

    def message(self) -> Tensor:
        """Return the integers to send, int32 [`NUMEL`]. The caller must not write to them."""
        self._complete = True
        if not self._facts:
            return self._sent((0, 0))
        code = crc32(repr(self._facts).encode())
        factor = self._context.world_size - 1 if self._context.rank == 0 else -1
        return self._sent((factor * (code & 0x7FFF), factor * (code >> 17)))

    def received(self, sums: Tensor) -> None:
        """Take the sums [`NUMEL`] of all ranks. If they are on the host, check them."""
        self._sums = sums
        if not self._context.streams.on_gpu:
            self.check()

    def check(self) -> None:
        """Raise if ranks have stepped with different options. Every rank must call this. The host waits for a GPU.

        Raises:
            LayoutError: ranks have stepped with different options. Raised on every rank.
        """
        if self._sums is None or not self._sums.any():
            return
        own, self._facts, self._sums = self._facts, [], None
        counts = self._context.all_gather_int(len(own), "the number of options")
        codes = [self._context.all_gather_int(_bits(own, i), "options") for i in range(max(counts))]
        differing = next((i for i, row in enumerate(codes) if len(set(row)) > 1), None)
        if differing is None or len(set(counts)) > 1:
            found = f"rank 0 has read {counts[0]} options, and the ranks {counts}"
        else:
            values = [struct.unpack("d", struct.pack("q", each))[0] for each in codes[differing]]
            other = next(rank for rank, each in enumerate(codes[differing]) if each != codes[differing][0])
            found = f"{own[differing][0]} is {values[0]:g} on rank 0 and {values[other]:g} on rank {other}"
        raise LayoutError(
            f"ranks step with different options: {found}. Pass the same options on every rank. A step may have used "
            "them already: load a checkpoint, or start again"
        )


def options_of(optimizer: Optimizer) -> Iterable[tuple[str, float]]:
    """Yield the options of an optimizer that the host can read, as pairs of a name and a number."""
    name, limit = type(optimizer).__name__, getattr(optimizer, "max_norm", None)
    if isinstance(limit, Real):
        yield f"max_norm of {name}", float(limit)
    for number, group in enumerate(optimizer.param_groups):
        for option in _COMPARED:
            value = group.get(option)
            for each in value if isinstance(value, tuple | list) else (value,):
                if isinstance(each, Real):  # a tensor may be on a device, and is not read
                    yield f"{option} of group {number} of {name}", float(each)


def _bits(facts: Sequence[tuple[str, float]], index: int) -> int:
    """Return the bits of one of the numbers as an integer, or 0 if there are fewer numbers."""
    bits: int = struct.unpack("q", struct.pack("d", facts[index][1]))[0] if index < len(facts) else 0
    return bits
