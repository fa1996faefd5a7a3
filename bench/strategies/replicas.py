"""Strategies in which each rank has the whole model. Gradients go to a master, or weights are averaged.

A strategy takes the model and this rank's part of each global batch, and yields this rank's loss after each step. The
process group is already initialized.

Legend: `W` ranks (`ranks`).
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from bench.strategies.problem import Batch, adamw

MASTER = 0
"""The rank that averages."""

AVERAGED_EVERY = 10
"""Number of steps between two averages of the weights."""


def one_process(model: nn.Module, batches: Iterable[Batch]) -> Iterator[float]:
    """Train in one process on whole batches. The other strategies are compared with this one."""
    optimizer = adamw(model.parameters())
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def data_parallel(model: nn.Module, batches: Iterable[Batch]) -> Iterator[float]:
    """Train in one process with a thread per GPU. Each step copies the model to all GPUs.

    GPU 0 scatters the batch, gathers the losses, sums the gradients and runs the optimizer.
    """
    replicated = nn.DataParallel(model.to("cuda" if torch.cuda.is_available() else "cpu"))
    optimizer = adamw(model.parameters())
    for x, y in batches:
        loss = replicated(x, y).mean()  # one loss per GPU
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def cpu_master(model: nn.Module, batches: Iterable[Batch]) -> Iterator[float]:
    """Send each gradient to the CPU of the master. The master returns the mean, and every rank steps its own copy."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    workers = range(1, ranks)
    optimizer = adamw(model.parameters())
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        for param in model.parameters():
            grad = param.grad.cpu()
            if rank == MASTER:
                received = torch.empty_like(grad)
                for worker in workers:
                    dist.recv(received, worker)
                    grad += received
                grad /= ranks
                for worker in workers:
                    dist.send(grad, worker)
            else:
                dist.send(grad, MASTER)
                dist.recv(grad, MASTER)
            param.grad.copy_(grad)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def parameter_server(model: nn.Module, batches: Iterable[Batch]) -> Iterator[float]:
    """Send gradients to the server and receive new weights. Only the server, which also trains, has an optimizer."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    workers = range(1, ranks)
    optimizer = adamw(model.parameters()) if rank == MASTER else None
    for x, y in batches:
        loss = model(x, y)
        loss.backward()
        for param in model.parameters():
            if rank != MASTER:
                dist.send(param.grad, MASTER)
                continue
            received = torch.empty_like(param.grad)
            for worker in workers:
                dist.recv(received, worker)
                param.grad += received
            param.grad /= ranks
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        for param in model.parameters():
            if rank != MASTER:
                dist.recv(param.data, MASTER)
                continue
            for worker in workers:
                dist.send(param.data, worker)
        yield loss.item()


def parameter_averaging(model: nn.Module, batches: Iterable[Batch]) -> Iterator[float]:
    """Train each rank alone, and every few steps replace all weights with their mean over the ranks."""
    ranks = dist.get_world_size()
    optimizer = adamw(model.parameters())
    for step, (x, y) in enumerate(batches, start=1):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % AVERAGED_EVERY == 0:
            for param in model.parameters():
                dist.all_reduce(param.data)
                param.data /= ranks
        yield loss.item()
