"""A system of a comparison that has been built: how it takes a step, and what its weights and gradients are.

Legend: `k` elements of one parameter on this rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardlite import ShardLite
from shardlite.lab.compared.workloads import Batch


@dataclass(frozen=True)
class Trainer:
    """A system that has been built. `model(x, y)` returns the loss."""

    model: nn.Module
    optimizer: Optimizer
    full: Callable[[Tensor], Tensor]
    """Function of a shard that returns the full parameter or gradient, flattened. Collective."""

    accumulation: int = 1
    """Number of micro-batches per batch. Gradients are reduced once, in the backward of the last micro-batch."""

    max_norm: float | None = None
    """Norm to which gradients are clipped; `None` does not clip."""

    forward: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(*batch)
    """Function of the model and a batch that returns the loss, []."""

    def backward(self, batch: Batch) -> Tensor:
        """Run forward and backward, and return the loss of this rank's batch, []."""
        if self.accumulation == 1:
            return self._backward(batch, 1)
        micro_batches = list(zip(*(each.chunk(self.accumulation) for each in batch), strict=True))
        with self._unsynced():
            losses = [self._backward(each, self.accumulation) for each in micro_batches[:-1]]
        losses.append(self._backward(micro_batches[-1], self.accumulation))
        return torch.stack(losses).sum()

    def loss(self, batch: Batch) -> Tensor:
        """Run the forward of one micro-batch, and return its loss, []."""
        return self.forward(self.model, batch)

    def differentiate(self, loss: Tensor) -> None:
        """Run the backward of a loss."""
        torch.autograd.backward(loss)

    def update(self) -> Tensor | None:
        """Clip if `max_norm` is set, step, and free the gradients.

        Return the norm before clipping, a scalar tensor, or `None` if the gradients are not clipped.
        """
        norm = None if self.max_norm is None else self.clip(self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients, with the model's own method if it has one. Return the norm before clipping, []."""
        clip: Any = getattr(self.model, "clip_grad_norm_", None)
        norm = clip(max_norm) if clip else nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, batch: Batch) -> Tensor:
        """Take one step of training, and return the loss, []."""
        loss = self.backward(batch)
        self.update()
        return loss

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters, unsharded and flattened, by their names in the plain model."""
        return {name: self.full(param.detach()) for name, param in self._named()}

    def gradients(self) -> dict[str, Tensor]:
        """Return all gradients, unsharded and flattened, by the names of their parameters."""
        return {name: self.full(param.grad) for name, param in self._named() if param.grad is not None}

    def _backward(self, batch: Batch, parts: int) -> Tensor:
        """Run forward and backward of one of `parts` micro-batches, and return its share of the loss, []."""
        loss = self.loss(batch) if parts == 1 else self.loss(batch) / parts
        self.differentiate(loss)
        return loss.detach()

    @contextmanager
    def _unsynced(self) -> Iterator[None]:
        """Do not reduce gradients within the block. A plain model never reduces gradients."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)
        elif isinstance(self.model, DistributedDataParallel | FullyShardedDataParallel | ShardLite):
            with self.model.no_sync():
                yield
        else:
            yield

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        """Yield parameters by their names in the plain model, without the prefixes of DDP and `Cast`."""
        return [(re.sub(r"^(module\.)+", "", name), param) for name, param in self.model.named_parameters()]


class Floor(Trainer):
    """A rank that does not communicate, and steps its shard as if the gradients of the shard were already reduced."""

    def update(self) -> Tensor | None:
        """Step `1/W` of the parameters, and drop the gradients of the model."""
        norm = None
        if self.max_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], self.max_norm)
        self.optimizer.step()
        self.model.zero_grad()
        return norm


class Format(Trainer):
    """A system whose state is not fp32, so only its losses are comparable."""


class Fsdp1(Trainer):
    """An FSDP1 model. Its parameters are views of flat shards, except inside `summon_full_params`."""

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters, unsharded and flattened, by their names in the plain model."""
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return super().weights()

    def gradients(self) -> dict[str, Tensor]:
        """Return all gradients, unsharded and flattened, by the names of their parameters."""
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False, with_grads=True):
            return super().gradients()

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        return [(name.replace("_fsdp_wrapped_module.", ""), param) for name, param in self.model.named_parameters()]


class Autocast(Trainer):
    """A model under autocast to bf16, with weights in fp32."""

    def loss(self, batch: Batch) -> Tensor:
        """Run the forward of one micro-batch, and return its loss, []."""
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            return super().loss(batch)


class InParts(Trainer):
    """A model with `order="tree"`, which requires a loop over `parts()`. Each rank has one part."""

    def backward(self, batch: Batch) -> Tensor:
        """Run forward and backward, and return the loss of this rank's batch, []."""
        assert isinstance(self.model, ShardLite)
        for _ in self.model.parts():
            loss = super().backward(batch)
        return loss


class Cast(nn.Module):
    """A model that runs with weights and inputs cast to `dtype`. Weights and gradients keep their dtype."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = model
        self.dtype = dtype

    def forward(self, *batch: Tensor) -> Tensor:
        """Return the loss, []."""
        cast = {name: param.to(self.dtype) for name, param in self.module.named_parameters()}
        inputs = tuple(each.to(self.dtype) if each.is_floating_point() else each for each in batch)
        loss: Tensor = functional_call(self.module, cast, inputs)
        return loss


class Activations(Trainer):
    """A plain model whose gradients are dropped when they arrive, so nothing is left to update."""

    def update(self) -> None:
        """Do nothing."""


class DeepSpeed(Trainer):
    """DeepSpeed, whose engine has its own backward and step."""

    def differentiate(self, loss: Tensor) -> None:
        """Run the backward of a loss."""
        self.model.backward(loss)  # type: ignore[operator]

    def update(self) -> None:
        """Step the shards."""
        self.model.step()  # type: ignore[operator]


def flat(tensor: Tensor) -> Tensor:
    """Return a flat copy of a tensor."""
    return tensor.detach().reshape(-1).clone()


def full_of_dtensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, flattened. Collective."""
    assert isinstance(tensor, DTensor)
    return flat(tensor.full_tensor())


def join(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the shards [k] of all ranks, in the order of ranks."""
    parts: list[Tensor] = [local] * group.size()
    dist.all_gather_object(parts, local.clone(), group=group)
    return torch.cat([part.reshape(-1) for part in parts])
