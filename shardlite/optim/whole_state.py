"""`WholeStateOptimizer`: base class of optimizers that keep the state of a whole parameter on one rank.

`shardlite.whole` derives from it. The rooms below recognize such optimizers by this class.
"""

from torch import Tensor
from torch.optim import Optimizer


class WholeStateOptimizer(Optimizer):
    """An optimizer that holds shards, and steps whole parameters."""

    def holds_whole(self, param: Tensor) -> bool:
        """Return whether the state of `param` belongs to the whole parameter. Only the owner has such a state."""
        raise NotImplementedError

    def owned(self) -> list[int]:
        """Return the indices of the parameters whose whole states this rank has."""
        raise NotImplementedError
