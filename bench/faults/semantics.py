"""Try cases in which FSDP2's behaviour is not documented. `docs/compared.md` marks their results with *tried*.

    python -m bench.faults.semantics

runs each case on two new gloo ranks, because some cases crash the process, and prints a line for each case. All ranks
have the same batch, so they should have the gradients of a plain copy of the model.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Block(nn.Module):
    """A residual block around a layer, by default a linear layer."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, WIDTH] -> [B, WIDTH]."""
        y = self.layer(x)
        return x + torch.tanh(y[0] if isinstance(y, tuple) else y)


class Attention(nn.MultiheadAttention):
    """Self-attention over a batch of one."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, WIDTH] -> [T, WIDTH]."""
        return super().forward(x, x, x, need_weights=False)[0]


class Query(nn.Module):
    """A module that returns a view of its parameter, like learnt queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[B, WIDTH] -> [B, WIDTH]."""
        return self.query.expand(x.shape)


class Keeps(torch.autograd.Function):
    """A function that returns `x @ w.T` and keeps `w` as an attribute of the context, as some quantized layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """[B, WIDTH] -> [B, WIDTH]."""
        ctx.save_for_backward(x)
        ctx.kept = w.t()
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of `x` and `w`."""
        (x,) = ctx.saved_tensors
        return grad @ ctx.kept.t(), grad.t() @ x


class Keeping(nn.Linear):
    """A linear layer that calls `Keeps`."""

    def forward(self, input: Tensor) -> Tensor:
        """[B, WIDTH] -> [B, WIDTH]."""
        return Keeps.apply(input, self.weight) + self.bias


class Viewed(Block):
    """A block that returns a view."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, WIDTH] -> [B, WIDTH]."""
        return super().forward(x)[:]


class InPlace(nn.Sequential):
    """A model that changes the outputs of its blocks in place."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, WIDTH] -> [B, WIDTH]."""
        for block in self:
            x = block(x)
            x += 1
        return x


class Twice(nn.Sequential):
    """A model that calls each of its blocks twice, under reentrant checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, WIDTH] -> [B, WIDTH]."""
        for block in [*self, *self]:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Failing(Block):
    """A block that raises if `fails` is set."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        """[B, WIDTH] -> [B, WIDTH]."""
        if self.fails:
            raise ArithmeticError
        return super().forward(x)


def blocks(layer: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> nn.Sequential:
    """Return three blocks."""
    return nn.Sequential(*(Block(layer()) for _ in range(3)))


def wrapped(module: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Apply `fully_shard` to each child, then to the module itself. The module's unit has the other parameters."""
    for child in module:
        fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def batch() -> Tensor:
    """Return the same random rows in each call, [B, WIDTH]."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def square(module: nn.Module) -> Tensor:
    """Run a forward and return a loss, []."""
    return module(batch()).square().mean()


def penalty(module: nn.Module) -> Tensor:
    """Return a loss with a gradient penalty, []. The penalty requires a double backward."""
    x = batch()
    loss = module(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def preference(module: nn.Module) -> Tensor:
    """Return a loss of two forwards, []."""
    return nn.functional.logsigmoid(module(batch()).sum() - module(2 * batch()).sum())


def offloaded(module: nn.Module) -> Tensor:
    """Return the loss of a forward under `save_on_cpu`, []."""
    with save_on_cpu():
        return square(module)


def gradients(ours: nn.Module, plain: nn.Module) -> str:
    """Describe how the gradients of the sharded model differ from those of the plain copy."""
    pairs = [(p.grad, q.grad) for p, q in zip(ours.parameters(), plain.parameters(), strict=True)]
    missing = sum(got is None and expected is not None for got, expected in pairs)
    kinds = {type(got).__name__ for got, _ in pairs if got is not None}
    if missing or kinds != {"DTensor"}:
        return f"{missing} gradients are missing, the others are {', '.join(kinds)}"
    worst = max((got.full_tensor() - expected).abs().max().item() for got, expected in pairs)
    return "gradients as without it" if worst == 0 else f"gradients are off by up to {worst:.2g}"


def compared(make: Callable[[], nn.Sequential], loss: Callable[[nn.Module], Tensor] = square) -> Callable[..., str]:
    """Return a case that computes the gradients of `loss` with FSDP2 and in a plain copy, and compares them."""

    def case(mesh: DeviceMesh) -> str:
        plain = make()
        ours = wrapped(copy.deepcopy(plain), mesh)
        for each in (plain, ours):
            loss(each).backward()
        return gradients(ours, plain)

    return case


def retained(mesh: DeviceMesh) -> str:
    """Run two backwards of the same graph."""
    plain = blocks()
    ours = wrapped(copy.deepcopy(plain), mesh)
    for each in (plain, ours):
        loss = square(each)
        loss.backward(retain_graph=True)
        loss.backward()
    return gradients(ours, plain)


def stepped_between(mesh: DeviceMesh) -> str:
    """Take a step between a forward and its backward. The plain copy takes no step: its backward would raise."""
    plain = blocks()
    ours = wrapped(copy.deepcopy(plain), mesh)
    for each in (plain, ours):
        square(each).backward()
        loss = square(each)
        if each is ours:
            torch.optim.SGD(ours.parameters(), lr=0.1).step()
        loss.backward()
    return f"no error, {gradients(ours, plain)}"


def after_an_error(mesh: DeviceMesh, *, reset: bool) -> str:
    """Continue training after a forward that raised."""
    plain = nn.Sequential(Block(), Failing(), Block())
    ours: Any = wrapped(copy.deepcopy(plain), mesh)
    ours[1].fails = True
    try:
        ours(batch())
    except ArithmeticError:
        ours[1].fails = False
    if reset:
        ours.reset_iter_state()
    for each in (plain, ours):
        square(each).backward()
    return gradients(ours, plain)


def seen_by_hooks(mesh: DeviceMesh) -> str:
    """Record the tensors that a user's saved-tensor hooks get."""
    shapes = []
    model = wrapped(blocks(), mesh)
    with saved_tensors_hooks(lambda t: (shapes.append(tuple(t.shape)), t)[1], lambda t: t):
        square(model)
    return f"a user's hooks {'get' if (WIDTH, WIDTH) in shapes else 'do not get'} the gathered weights"


def one_bad_rank(mesh: DeviceMesh) -> str:
    """Step with a NaN on one rank."""
    model = wrapped(blocks(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (square(model) * (float("nan") if dist.get_rank() == 1 else 1.0)).backward()
    optimizer.step()
    finite = all(p.full_tensor().isfinite().all() for p in model.parameters())
    return "the weights are finite" if finite else "the weights are NaN on all ranks"


CASES: dict[str, Callable[[DeviceMesh], str]] = {
    "plain blocks": compared(blocks),
    "LSTM": compared(lambda: blocks(lambda: nn.LSTM(WIDTH, WIDTH))),
    "MultiheadAttention": compared(lambda: blocks(lambda: Attention(WIDTH, 2))),
    "weight_norm": compared(lambda: blocks(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))),
    "spectral_norm": compared(lambda: blocks(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))),
    "BatchNorm": compared(lambda: blocks(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))),
    "two forwards, one backward": compared(blocks, preference),
    "save_on_cpu around the model": compared(blocks, offloaded),
    "a block twice, reentrant checkpointing": compared(lambda: Twice(Block(), Block())),
    "create_graph": compared(blocks, penalty),
    "a block returns a view of its parameter": compared(lambda: nn.Sequential(Query(), Query())),
    "a weight as an attribute of the context": compared(lambda: blocks(lambda: Keeping(WIDTH, WIDTH))),
    "an output that is a view, in place": compared(lambda: InPlace(Viewed(), Viewed())),
    "retain_graph": retained,
    "a step between forward and backward": stepped_between,
    "after a forward that raised": lambda mesh: after_an_error(mesh, reset=False),
    "the same, with reset_iter_state()": lambda mesh: after_an_error(mesh, reset=True),
    "saved-tensor hooks of a user": seen_by_hooks,
    "a NaN on one rank": one_bad_rank,
}


def run_rank(rank: int, name: str, store: str, answer: str) -> None:
    """Run one case on one of the two ranks. Rank 0 writes the result."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    limit = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    torch.manual_seed(0)
    try:
        result = CASES[name](init_device_mesh("cpu", (2,)))
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    if rank == 0:
        Path(answer).write_text(result)
    dist.barrier()


def main() -> None:
    """Print the result of each case."""
    print(f"FSDP2 of torch {torch.__version__}, two gloo ranks")
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "answer"
            try:
                mp.spawn(run_rank, (name, f"{folder}/store", str(answer)), nprocs=2)
            except mp.ProcessExitedException as error:
                answer.exists() or answer.write_text(f"the process ends: {error.signal_name or error}")
            print(f"{name:40} {answer.read_text()}", flush=True)


if __name__ == "__main__":
    main()
