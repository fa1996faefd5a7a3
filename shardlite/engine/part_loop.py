"""Loops over the parts of a global batch, of which each rank runs some consecutive ones (order="tree").

    2 ranks, 8 parts    rank 0    0  1  2  3*        * its backward reduces what all of them have brought
                        rank 1    4  5  6  7*

All that a part computes must depend on the part alone. So each starts from its own state of the random number
generators, which follows from the seed, the step and the part: dropout is the same on any number of ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

from shardlite.comm import Context
from shardlite.errors import PhaseError


class PartLoop:
    """The loops of one wrapped model."""

    def __init__(self, total: int, context: Context) -> None:
        """`total` parts are divided among the ranks of `context`."""
        self.total = total
        count = total // context.world_size
        self.own = range(context.rank * count, (context.rank + 1) * count)
        """The parts of this rank."""

        self.finished = 0
        """Number of loops that were run to their end, and so of the step of the next one. Checkpoints keep it."""

        self._device = context.device
        self._now: int | None = None
        self._had_backward = False

    def over(self, step: int | None, seed: int) -> Iterator[int]:
        """Yield this rank's parts, each from its own random state. The states of before come back at the end.

        Raises:
            PhaseError: a loop is running, or a part had no backward.
        """
        number = self.finished if step is None else step
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            for part in self.own:
                self._seed(f"{seed} {number} {part}")
                with self._inside(part):
                    yield part
        self.finished = number + 1

    def _seed(self, words: str) -> None:
        number = int.from_bytes(blake2b(words.encode(), digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(number)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index].manual_seed(number)

    @contextmanager
    def _inside(self, part: int) -> Iterator[None]:
        if self._now is not None:
            raise PhaseError(f"a loop over parts() is in part {self._now} already: finish it before the next one")
        self._now, self._had_backward = part, False
        try:
            yield
            if not self._had_backward:
                raise PhaseError(f"part {part} had no backward: call backward() once for each part, with gradients")
        finally:
            self._now = None

    def begin_backward(self) -> None:
        """Note the first gradient of a backward.

        Raises:
            PhaseError: it is not the only backward of a part.
        """
        if self._now is None:
            raise PhaseError(
                "order='tree' adds gradients by parts of the global batch, and this backward belongs to none: run "
                "forward and backward in a loop, `for part in model.parts(): ...`, once for each part"
            )
        if self._had_backward:
            raise PhaseError(
                f"part {self._now} has had its backward: add up the losses of a part, and call backward() once"
            )

    def end_backward(self) -> None:
        """Note that the backward of the part is over."""
        self._had_backward = True
