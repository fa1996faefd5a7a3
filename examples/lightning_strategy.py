"""A strategy by which Lightning's Trainer trains a `LightningModule`, as it is, with ShardLite: a file to copy.

    Trainer(strategy=ShardLiteStrategy(stage=3), ...)    # takes the options of ShardLite

Clipping, accumulation, schedulers, validation and callbacks are the Trainer's own. A checkpoint holds the weights as an
unsharded module has them, and what each rank's optimizer keeps: training goes on at the same world size and stage.
`lightning_fit.py` uses it.
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
    """Starts and joins ranks as DDP does, but shards the module instead of copying it."""

    restore_checkpoint_after_setup = True  # weights go into the sharded model

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._sharded: ShardLite | None = None

    def setup(self, trainer: Trainer) -> None:
        """Wrap the module: once, whatever the Trainer does with it one after the other."""
        self.accelerator.setup(trainer)
        module = self.precision_plugin.convert_module(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)  # with the module's own parameters, which still are ordinary ones
        if self._sharded is None or self._sharded.module is not module:
            if not any(param.is_meta for param in module.parameters()):
                self.model_to_device()
            self._sharded = ShardLite(module, device=self.root_device, **self._options)
        self.model = self._sharded
        self._hand_over_shards()
        self.setup_precision_plugin()

    def _hand_over_shards(self) -> None:
        """Let optimizers step shards instead of whole parameters. ShardLite's AdamW has done so by itself."""
        shards = dict(zip(self.model.module.parameters(), self.model.parameters(), strict=True))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [shards.get(param, param) for param in group["params"]]

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Accumulate: for all batches but the last one before a step."""
        return self.model.no_sync()

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Return the weights on rank 0, which writes the checkpoint."""
        return self.model.full_state_dict(rank=0)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take over rank 0's weights."""
        self.model.load_full_state_dict(checkpoint["state_dict"])

    def optimizer_state(self, optimizer: Optimizer) -> list[Any] | None:
        """Return what the optimizers of all ranks keep, on rank 0."""
        own = tree_map_only(Tensor, _copy, super().optimizer_state(optimizer))
        states = [None] * self.world_size if self.is_global_zero else None
        dist.gather_object(own, states)
        return states

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part."""
        for optimizer, states in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if len(states) != self.world_size:
                raise ValueError(f"the checkpoint is of {len(states)} ranks, these are {self.world_size}")
            optimizer.load_state_dict(states[self.global_rank])

    def teardown(self) -> None:
        """Leave the model where it is: a sharded one cannot be moved."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _copy(tensor: Tensor) -> Tensor:
    """Copy what is seen only: a view is sent and written with all of the memory that it is a view of."""
    return tensor.to("cpu", copy=True)
