"""Loop over the parts of a global batch, of which each rank runs consecutive ones (order="tree").

    2 ranks, 8 parts    rank 0    0  1  2  3*        * its backward reduces the gradients of all
                        rank 1    4  5  6  7*

The results of a part must depend on the part alone. So each starts from its own state of the random number
generators, derived from the seed, the step and the part: dropout is the same on any number of ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

from shardlite.comm import Context
from shardlite.errors import PhaseError


class PartLoop:
    """Runs the loops of one wrapped model."""

    def __init__(self, total: int, context: Context) -> None:
        """`total` parts are divided among the ranks of `context`."""
        self.total = total
        count = total // context.world_size
        self.own = range(context.rank * count, (context.rank + 1) * count)
        """The parts of this rank."""

        self.finished = 0
        """Number of completed loops, and so the step of the next one. Checkpoints save it."""

        self._device = context.device
        self._now: int | None = None
        self._had_backward = False

    def over(self, step: int | None, seed: int) -> Iterator[int]:
        """Yield this rank's parts, each with its own random state. The former states are restored at the end.

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
        """Record the first gradient of a backward.

        Raises:
            PhaseError: there is no part, or it has had a backward.
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
        """Record the end of the part's backward."""
        self._had_backward = True
