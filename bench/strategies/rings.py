"""Strategies in which all ranks average gradients together. Each rank sends only to its right neighbour.

Legend: `W` ranks (`ranks`), `n` elements in a flat buffer.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.strategies.problem import Batch, adamw

BUCKET = 1 << 16
"""Minimum number of elements in a bucket, except for the last bucket."""


def ring_all_reduce(flat: Tensor) -> None:
    """Replace `flat` [n] by its sum over the ranks of a ring. Each rank sends to the right, receives from the left."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = flat.tensor_split(ranks)

    for t in range(ranks - 1):  # reduce-scatter: each rank adds its own chunk to a partial sum and forwards it
        outgoing, partial = chunks[(rank - t) % ranks], chunks[(rank - t - 1) % ranks]
        incoming = torch.empty_like(partial)
        sending = dist.isend(outgoing, right)
        dist.recv(incoming, left)
        sending.wait()
        partial += incoming

    for t in range(ranks - 1):  # all-gather: each rank keeps a copy of a finished sum and forwards it
        sending = dist.isend(chunks[(rank - t + 1) % ranks], right)
        dist.recv(chunks[(rank - t) % ranks], left)
        sending.wait()


def ring(model: nn.Module, batches: Iterable[Batch]) -> Iterator[float]:
    """Average all gradients with one ring all-reduce after the backward."""
    params, ranks = list(model.parameters()), dist.get_world_size()
    optimizer = adamw(params)
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        flat = torch.cat([param.grad.flatten() for param in params])
        ring_all_reduce(flat)
        flat /= ranks
        for param, mean in zip(params, flat.split([param.numel() for param in params]), strict=True):
            param.grad.copy_(mean.view_as(param))
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def bucketed_ddp(model: nn.Module, batches: Iterable[Batch]) -> Iterator[float]:
    """Average a bucket of gradients in the background as soon as the backward has filled the bucket."""
    params, ranks = list(model.parameters()), dist.get_world_size()
    buckets: list[list[nn.Parameter]] = [[]]
    for param in reversed(params):  # approximately the order in which the backward computes gradients
        if sum(each.numel() for each in buckets[-1]) >= BUCKET:
            buckets.append([])
        buckets[-1].append(param)
    flats = [torch.empty(sum(param.numel() for param in bucket)) for bucket in buckets]
    missing, reductions, queue = {}, {}, ThreadPoolExecutor(1)

    def fill(b: int, param: nn.Parameter, part: Tensor) -> None:
        part.copy_(param.grad)
        param.grad = part  # from now on, the gradient is a view of the bucket
        missing[b] -= 1
        while (ready := len(reductions)) < len(flats) and missing[ready] == 0:  # in the same order on all ranks
            reductions[ready] = queue.submit(ring_all_reduce, flats[ready])

    for b, (bucket, flat) in enumerate(zip(buckets, flats, strict=True)):
        for param, part in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
            param.register_post_accumulate_grad_hook(lambda p, b=b, part=part: fill(b, p, part.view_as(p)))
    optimizer = adamw(params)
    for x, y in batches:
        missing.update({b: len(bucket) for b, bucket in enumerate(buckets)})
        loss = model(x, y)
        loss.backward()  # calls `fill` for each gradient
        for b, flat in enumerate(flats):
            reductions.pop(b).result()
            flat /= ranks
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
