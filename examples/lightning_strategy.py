"""A strategy for Lightning's Trainer that trains an unchanged `LightningModule` with ShardLite. Copy this file.

    Trainer(strategy=ShardLiteStrategy(stage=3), ...)    # takes the options of ShardLite

The Trainer handles clipping, accumulation, schedulers, validation and callbacks. A checkpoint contains the unsharded
weights, and the optimizer state of each rank. So training resumes only with the same world size and stage.
`lightning_fit.py` uses this strategy.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardlite import ShardLite


class ShardLiteStrategy(DDPStrategy):
    """Start ranks as `DDPStrategy` does, but shard the module instead of replicating it."""

    restore_checkpoint_after_setup = True  # weights are loaded into the sharded model

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._sharded: ShardLite | None = None

    def setup(self, trainer: Trainer) -> None:
        """Wrap the module, unless an earlier call of the Trainer has wrapped it."""
        self.accelerator.setup(trainer)
        module = self.precision_plugin.convert_module(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)  # before the module is wrapped, so optimizers get its full parameters
        if self._sharded is None or self._sharded.module is not module:
            if not any(param.is_meta for param in module.parameters()):
                self.model_to_device()
            self._sharded = ShardLite(module, device=self.root_device, **self._options)
        self.model = self._sharded
        self._hand_over_shards()
        self.setup_precision_plugin()

    def _hand_over_shards(self) -> None:
        """Replace full parameters in the optimizers by shards. ShardLite's AdamW already has shards."""
        shards = dict(zip(self.model.module.parameters(), self.model.parameters(), strict=True))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [shards.get(param, param) for param in group["params"]]

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Return a context that accumulates gradients. The Trainer enters it for all batches of a step but the last."""
        return self.model.no_sync()

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Return the weights on rank 0, which writes the checkpoint."""
        return self.model.full_state_dict(rank=0)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load rank 0's weights."""
        self.model.load_full_state_dict(checkpoint["state_dict"])

    def optimizer_state(self, optimizer: Optimizer) -> list[Any] | None:
        """Return the optimizer states of all ranks on rank 0, and `None` on other ranks."""
        own = tree_map_only(Tensor, _copy, super().optimizer_state(optimizer))
        states = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(own, states)
        return states

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's optimizer states."""
        for optimizer, states in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if len(states) != self.world_size:
                raise ValueError(f"the checkpoint was saved by {len(states)} ranks, but this run has {self.world_size}")
            optimizer.load_state_dict(states[self.global_rank])

    def teardown(self) -> None:
        """Tear down without moving the model to the CPU, because a sharded model cannot be moved."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU. A view would be pickled together with its whole storage."""
    return tensor.to("cpu", copy=True)
