"""Strategies in which each rank has a shard of the parameters, gradients and optimizer state.

Legend: `W` ranks (`ranks`), `S` elements in a shard of a unit, `W S` in its full buffer.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.strategies.problem import ADAMW, Batch, adamw
from shardlite import AdamW, ShardLite


class Unit:
    """Parameters that are gathered together: `full` [W S] has all of them, `shard` [S] is this rank's part."""

    def __init__(self, module: nn.Module, params: Iterable[nn.Parameter]) -> None:
        self.params, self.ranks = list(params), dist.get_world_size()
        self.sizes = [param.numel() for param in self.params]
        flat = torch.cat([param.detach().flatten() for param in self.params])
        self.full = F.pad(flat, (0, -len(flat) % self.ranks))
        self.nbytes = self.full.nbytes
        self.shard = nn.Parameter(self.full.chunk(self.ranks)[dist.get_rank()].clone())
        for param, part in zip(self.params, self.full[: len(flat)].split(self.sizes), strict=True):
            param.data = part.view_as(param)
            param.register_post_accumulate_grad_hook(self.collect)
        module.register_forward_pre_hook(lambda *_: self.unshard())
        module.register_forward_hook(self.after_forward)
        self.reshard()

    def unshard(self) -> None:
        """Gather the parameters: allocate `full` again, and fill it with the shards of all ranks."""
        self.full.untyped_storage().resize_(self.nbytes)
        dist.all_gather(list(self.full.chunk(self.ranks)), self.shard.detach())
        self.missing = len(self.params)

    def reshard(self) -> None:
        """Free the memory of `full`. Parameters and autograd's saved tensors remain views of `full`."""
        self.full.untyped_storage().resize_(0)

    def after_forward(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        """Free the parameters until the backward reaches the output."""
        self.reshard()
        output.register_hook(lambda grad: self.unshard())

    def collect(self, _: nn.Parameter) -> None:
        """Count a gradient of this unit. After the last, keep this rank's shard of the mean and free the gradients."""
        self.missing -= 1
        if self.missing == 0:
            self.reshard()
            grads = [param.grad.flatten() for param in self.params]
            full = F.pad(torch.cat(grads), (0, self.shard.numel() * self.ranks - sum(self.sizes)))
            for param in self.params:
                param.grad = None
            self.shard.grad = torch.empty_like(self.shard)
            dist.reduce_scatter(self.shard.grad, list(full.chunk(self.ranks)))
            self.shard.grad /= self.ranks


def sharded(model: nn.Module, batches: Iterable[Batch]) -> Iterator[float]:
    """Shard by hand: each block is a unit, and the other parameters are one unit. The optimizer has only shards."""
    units = [Unit(block, block.parameters()) for block in model.blocks]
    rest = [param for name, param in model.named_parameters() if not name.startswith("blocks.")]
    units.append(Unit(model, rest))
    optimizer = adamw([unit.shard for unit in units])
    for x, y in batches:
        loss = model(x, y)  # gather a unit, forward, free it
        loss.backward()  # gather a unit, backward, reduce-scatter its gradients
        optimizer.step()  # each rank steps its own shards
        optimizer.zero_grad()
        yield loss.item()


def fsdp2(model: nn.Module, batches: Iterable[Batch]) -> Iterator[float]:
    """Shard with PyTorch's `fully_shard`, block by block."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def shardlite(model: nn.Module, batches: Iterable[Batch]) -> Iterator[float]:
    """Shard with ShardLite, which finds the blocks automatically."""
    model = ShardLite(model)
    optimizer = AdamW(model.parameters(), **ADAMW)
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
