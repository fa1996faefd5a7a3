"""Loop over the parts of a global batch (`order="tree"`). Each rank runs consecutive parts.

    2 ranks, 8 parts    rank 0    0  1  2  3*        * this part's backward reduces the gradients of all parts
                        rank 1    4  5  6  7*

The results of a part must depend on the part alone. So the random number generators are seeded for each part, from the
seed, the step and the part's number. Dropout is then the same on any number of ranks.
"""

from collections.abc import Iterator
from hashlib import blake2b

import torch

from shardlite.comm import Context
from shardlite.errors import PhaseError


class PartLoop:
    """Runs the loops of one wrapped model."""

    def __init__(self, total: int, context: Context) -> None:
        """Divide `total` parts among the ranks of `context`."""
        self.total = total
        count = total // context.world_size
        self.own = range(context.rank * count, (context.rank + 1) * count)
        """The parts of this rank."""

        self.finished = 0
        """Number of completed loops, which is the step of the next loop. Checkpoints save this number."""

        self._device = context.device
        self._now: int | None = None
        self._had_backward = False

    def over(self, step: int | None, seed: int) -> Iterator[int]:
        """Yield this rank's parts. Set a separate random state for each part, and restore the former state at the end.

        Args:
            step: number of this loop. `None` means `finished`.
            seed: a number that is mixed into the random state of each part.

        Raises:
            PhaseError: another loop is running, or a part had no backward.
        """
        if self._now is not None:
            raise PhaseError(f"a loop over parts() is running, in part {self._now}: finish it before the next loop")
        number = self.finished if step is None else step
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            for part in self.own:
                self._seed(f"{seed} {number} {part}")
                self._now, self._had_backward = part, False
                try:
                    yield part
                    if not self._had_backward:
                        raise PhaseError(f"part {part} had no backward: call backward() once for each part")
                finally:
                    self._now = None
        self.finished = number + 1

    def _seed(self, words: str) -> None:
        number = int.from_bytes(blake2b(words.encode(), digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(number)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index].manual_seed(number)

    def begin_backward(self) -> None:
        """Check, at the first gradient of a backward, that the running part may have a backward.

        Raises:
            PhaseError: no part is running, or the running part has already run its backward.
        """
        if self._now is None:
            raise PhaseError(
                "order='tree' adds gradients by parts of the global batch, and this backward is outside of all parts: "
                "run forward and backward in a loop, `for part in model.parts(): ...`, once for each part"
            )
        if self._had_backward:
            raise PhaseError(
                f"part {self._now} has already run its backward: add up the losses of a part, and call backward() once"
            )

    def end_backward(self) -> None:
        """Record the end of the part's backward."""
        self._had_backward = True
