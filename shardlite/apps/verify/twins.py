"""Systems that train one model on the same batches, each returning a record of its results. Judging is done elsewhere.

    sharded               by ShardLite, at any stage
    simple, ring_ordered  plain twins, whose gradients are averaged in the simplest way, or in ring order
    data_parallel         by `torch.nn.parallel.DistributedDataParallel`
    one_process           rank 0 alone, on the batches of all ranks
    survey, exact         no training, only the first step: each rank separately, and in fp64

The first three compute as `Precision` says, the others in the model's own dtypes.

Legend: `W` ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardlite.apps.verify.plain import Mean, PaddedAdamW, Twin, ring_mean, simple_mean
from shardlite.apps.verify.task import Batch, Task, doubled, joined_batch, mean_loss
from shardlite.comm import all_gather_json
from shardlite.model import ShardLite
from shardlite.optim import AdamW
from shardlite.params import as_they_are

Gradients: TypeAlias = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Record:
    """The results of a system."""

    losses: list[Tensor]
    """[] per step; of this rank, or of all ranks if one process trained on all."""

    gradients: Gradients
    """Whole gradients of the first step, averaged over the ranks; `None` where no rank used a parameter."""

    weights: Mapping[str, Tensor]
    """Whole parameters and floating-point buffers after the last step."""


@dataclass(frozen=True)
class Step:
    """One number for the loss of the first step, [], and for each element of its gradients."""

    loss: Tensor
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Survey:
    """Results of each rank alone in the first step, with `Precision`; means over the ranks, in fp64."""

    magnitudes: Step
    """Absolute values."""

    casts: Step
    """Distances to the results of plain PyTorch. Zero if nothing is cast, and no gradients of one parameter are added
    in another dtype.
    """

    errors: Step | None
    """Distances to the results of plain PyTorch in fp64; `None` if the model does not run in fp64, or always does."""


# ---- the systems ----------------------------------------------------------------------------------------------------


def sharded(task: Task, stage: int) -> Record:
    """Train by ShardLite."""
    return _train(_Sharded(task, stage))


def simple(task: Task) -> tuple[Record, bool]:
    """Train plain twins whose gradients are averaged in the simplest way.

    Also return whether any rank did not use a parameter in any step.
    """
    system = _Plain(task, _twin(task, simple_mean))
    return _train(system), system.twin.unused


def ring_ordered(task: Task) -> Record:
    """Train plain twins whose gradients are averaged in the order of ShardLite's ring."""
    return _train(_Plain(task, _twin(task, ring_mean)))


def data_parallel(task: Task, *, unused: bool) -> Record:
    """Train by PyTorch's data parallelism. `unused`: whether some rank does not use all parameters."""
    with _silent_data_parallel():
        return _train(_DataParallel(task, unused))


def one_process(task: Task, *, join: bool) -> Record:
    """Train on the batches of all ranks in this process: in one batch, or by the mean of the ranks' losses."""
    return _train(_OneProcess(task, join))


def survey(task: Task) -> Survey:
    """Run the first step on each rank separately: with `Precision`, in the model's own dtypes, and in fp64."""
    twin = _twin(task, simple_mean)
    with twin.caught() as sums:
        loss = mean_loss(task, twin, 0, [task.rank])
        loss.backward()  # type: ignore[no-untyped-call]
    own = _step(loss, sums, twin.masters)
    plain = _first_step(task, _replicated(task), [task.rank])
    true = exact(task, _replicated(task), [task.rank])
    errors = None
    if not _any_rank(task, true is None):
        assert true is not None
        errors = _mean_over_ranks(task, _apart(own, true))
    sizes = {name: grad.abs() for name, grad in own.gradients.items()}
    magnitudes = _mean_over_ranks(task, Step(own.loss.abs(), sizes))
    return Survey(magnitudes, _mean_over_ranks(task, _apart(own, plain)), errors)


def exact(task: Task, module: nn.Module, ranks: Sequence[int]) -> Step | None:
    """Compute the first step on the batches of `ranks` in fp64, as the mean of their losses.

    `None` if the model does not run in fp64, or has fp64 parameters, so that this would not be more exact.
    """
    if any(param.dtype == torch.float64 for param in module.parameters()):
        return None
    try:
        return _first_step(task, module.double(), ranks, doubled)
    except RuntimeError:  # forward makes tensors of another dtype
        return None


# ---- training -------------------------------------------------------------------------------------------------------


class _System:
    """A module, trained on this rank's batches. Subclasses override what differs."""

    def __init__(self, task: Task, module: nn.Module, optimizer: Callable[..., Optimizer]) -> None:
        self.task = task
        self.module = module
        self.optimizer = optimizer(module.parameters(), lr=task.lr, weight_decay=task.weight_decay)

    def loss(self, step: int) -> Tensor:
        """Run forward."""
        value: Tensor = self.module(*self.task.batch(step, self.task.rank))
        return value

    def run(self, step: int) -> Tensor:
        """Run forward and backward, and average the gradients over the ranks."""
        loss = self.loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        _densify(self.module)
        return loss

    def gradients(self) -> Gradients:
        """Return the whole gradients."""
        return _gradients(_trainable(self.module))

    def weights(self) -> Mapping[str, Any]:
        """Return a whole state dict."""
        state: dict[str, Any] = self.module.state_dict()
        return state


class _Sharded(_System):
    def __init__(self, task: Task, stage: int) -> None:
        module = task.model()
        self._shapes = {name: param.shape for name, param in module.named_parameters()}
        self._model = ShardLite(
            module, stage=stage, units=task.units, precision=task.precision, group=task.group, buffers="own"
        )
        super().__init__(task, self._model, AdamW)

    def gradients(self) -> Gradients:
        """Assemble each gradient from the consecutive shards of all ranks, or return it if it is whole."""
        params, group = _trainable(self.module), self.task.group
        with as_they_are():  # gradients of placeholders and shards, without unsharding them
            own = {n: None if p.grad is None else p.grad.as_subclass(Tensor).reshape(-1) for n, p in params.items()}
        counts = all_gather_json(
            group, {name: None if grad is None else grad.numel() for name, grad in own.items()}, "gradients"
        )
        whole: dict[str, Tensor | None] = {}
        for name, grad in own.items():
            dtype, device = params[name].dtype, params[name].device
            parts = [
                None if each[name] is None else torch.empty(each[name], dtype=dtype, device=device) for each in counts
            ]
            parts[dist.get_rank(group)] = grad
            for rank, part in enumerate(parts):
                if part is not None and part.numel():
                    dist.broadcast(part, group=group, group_src=rank)
            whole[name] = _assembled(parts, grad, self._shapes[name])
        return whole

    def weights(self) -> Mapping[str, Any]:
        return self._model.full_state_dict()


class _Plain(_System):
    def __init__(self, task: Task, twin: Twin) -> None:
        self.task, self.twin = task, twin
        self.optimizer = PaddedAdamW(twin.masters.values(), lr=task.lr, weight_decay=task.weight_decay)

    def run(self, step: int) -> Tensor:
        def backward() -> Tensor:
            loss: Tensor = self.twin(*self.task.batch(step, self.task.rank))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss: Tensor = self.twin.backward(backward)
        return loss

    def gradients(self) -> Gradients:
        return _gradients({name: master for name, master in self.twin.masters.items() if master.requires_grad})

    def weights(self) -> Mapping[str, Any]:
        return self.twin.state_dict()


class _DataParallel(_System):
    def __init__(self, task: Task, unused: bool) -> None:
        super().__init__(task, task.model(), _fused_adamw)
        self._model = DistributedDataParallel(
            self.module, process_group=task.group, broadcast_buffers=False, find_unused_parameters=unused
        )

    def loss(self, step: int) -> Tensor:
        value: Tensor = self._model(*self.task.batch(step, self.task.rank))
        return value


class _OneProcess(_System):
    def __init__(self, task: Task, join: bool) -> None:
        super().__init__(task, task.model(), _fused_adamw)
        self._join = join

    def loss(self, step: int) -> Tensor:
        batches = [self.task.batch(step, rank) for rank in range(self.task.world_size)]
        joined = joined_batch(batches) if self._join else None
        return mean_loss(self.task, self.module, step, range(len(batches))) if joined is None else self.module(*joined)


def _train(system: _System) -> Record:
    """Run all steps."""
    losses: list[Tensor] = []
    first: Gradients = {}
    for step in range(system.task.steps):
        loss = system.run(step)
        first = first or system.gradients()
        system.optimizer.step()
        system.optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return Record(losses, first, _floats(system.weights()))


def _first_step(task: Task, module: nn.Module, ranks: Sequence[int], convert: Callable[[Batch], Batch] = tuple) -> Step:
    """Run forward and backward. An unused parameter has a zero gradient."""
    loss = mean_loss(task, module, 0, ranks, convert)
    loss.backward()  # type: ignore[no-untyped-call]
    _densify(module)
    params = _trainable(module)
    return _step(loss, _gradients(params), params)


def _step(loss: Tensor, gradients: Gradients, params: Mapping[str, nn.Parameter]) -> Step:
    """Return a step in fp64; a parameter that this rank did not use has a zero gradient."""
    whole = {}
    for name, param in params.items():
        if param.requires_grad:
            grad = gradients.get(name)
            whole[name] = (torch.zeros_like(param).detach() if grad is None else grad).double()
    return Step(loss.detach().double(), whole)


def _replicated(task: Task) -> nn.Module:
    """Make the model, with rank 0's values on every rank."""
    module = task.model()
    for value in module.state_dict().values():
        if isinstance(value, Tensor):
            content = value.contiguous().view(-1).view(torch.uint8)  # gloo does not know all dtypes
            dist.broadcast(content, group=task.group, group_src=0)
            value.copy_(content.view(value.dtype).view(value.shape))
    return module


def _twin(task: Task, mean: Mean) -> Twin:
    group = dist.group.WORLD if task.group is None else task.group
    return Twin(_replicated(task), task.world_size, task.units, mean, precision=task.precision, group=group)


def _fused_adamw(*args: Any, **options: Any) -> Optimizer:
    return torch.optim.AdamW(*args, **options, fused=True)


# ---- what a model holds ---------------------------------------------------------------------------------------------


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def _gradients(params: Mapping[str, nn.Parameter]) -> Gradients:
    return {name: None if param.grad is None else param.grad.clone() for name, param in params.items()}


def _floats(state: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: value.clone() for name, value in tensors.items() if value.is_floating_point()}


def _densify(module: nn.Module) -> None:
    """Make gradients dense: AdamW accepts no others."""
    for param in module.parameters():
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.to_dense()


def _mean_over_ranks(task: Task, step: Step) -> Step:
    """Average over the ranks in place."""
    for tensor in (step.loss, *step.gradients.values()):
        dist.all_reduce(tensor, group=task.group)
        tensor /= task.world_size
    return step


def _any_rank(task: Task, yes: bool) -> bool:
    ranks = torch.tensor(int(yes))
    dist.all_reduce(ranks, group=task.group)
    return bool(ranks.item())


def _apart(one: Step, other: Step) -> Step:
    gradients = {name: (grad - other.gradients[name]).abs() for name, grad in one.gradients.items()}
    return Step((one.loss - other.loss).abs(), gradients)


def _assembled(pieces: Sequence[Tensor | None], own: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Join the pieces of all ranks if they make up a whole; otherwise return the own one, which must be whole."""
    there = [piece for piece in pieces if piece is not None]
    if there and sum(piece.numel() for piece in there) == shape.numel():
        return torch.cat(there).view(shape)
    return None if own is None else own.clone().view(shape)


@contextmanager
def _silent_data_parallel() -> Iterator[None]:
    """Suppress warnings about slow data parallelism, and about the new name of one of its arguments."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        warnings.filterwarnings("ignore", ".*[Gg]rad strides do not match")
        yield
