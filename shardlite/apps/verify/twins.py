"""Systems that train one model on the same batches, each returning a record of its results. Judging is done elsewhere.

    sharded        by ShardLite, at any stage
    replicated     plain twins, whose gradients are averaged in the simplest way, or in ring order
    data_parallel  by `torch.nn.parallel.DistributedDataParallel`
    one_process    rank 0 alone, on the batches of all ranks
    elastic        by ShardLite with order="tree", on different numbers of ranks
    survey, exact  no training, only the first step: each rank separately, and in fp64

`sharded`, `replicated` and `elastic` compute as `Precision` says, the others in the model's own dtypes.

Legend: `W` ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardlite.apps.verify.plain import Mean, PaddedAdamW, Twin, simple_mean
from shardlite.apps.verify.task import Batch, Task, doubled, joined_batch, mean_loss
from shardlite.checkpoint import load, save
from shardlite.comm import all_gather_json
from shardlite.config import Route
from shardlite.model import ShardLite
from shardlite.optim import AdamW
from shardlite.params import as_they_are

_CLIP = 1.0

Gradients: TypeAlias = Mapping[str, Tensor | None]
Weights: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class Record:
    """The results of a system."""

    losses: list[Tensor]
    """[] per step; of this rank, or of all ranks if one process trained on all."""

    gradients: Gradients
    """Whole gradients of the first step, averaged over the ranks; `None` where no rank used a parameter."""

    weights: Weights
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
    module = task.model()
    shapes = {name: param.shape for name, param in module.named_parameters()}
    options: dict[str, Any] = {"units": task.units, "precision": task.precision, "group": task.group}
    model = ShardLite(module, stage=stage, buffers="own", **options)
    optimizer = AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay)

    def run(step: int) -> Tensor:
        return _backward(model(*task.batch(step, task.rank)))

    return _train(task, optimizer, run, lambda: _whole_gradients(model, shapes, task.group), model.full_state_dict)


def replicated(task: Task, mean: Mean) -> tuple[Record, bool]:
    """Train plain twins whose gradients are averaged by `mean`.

    Also return whether any rank did not use a parameter in any step.
    """
    twin = _twin(task, mean)
    optimizer = PaddedAdamW(twin.masters.values(), lr=task.lr, weight_decay=task.weight_decay)

    def run(step: int) -> Tensor:
        loss: Tensor = twin.backward(lambda: _backward(twin(*task.batch(step, task.rank))))
        return loss

    trained = {name: master for name, master in twin.masters.items() if master.requires_grad}
    return _train(task, optimizer, run, lambda: _gradients(trained), twin.state_dict), twin.unused


def data_parallel(task: Task, *, unused: bool) -> Record:
    """Train by PyTorch's data parallelism. `unused`: whether some rank does not use all parameters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        warnings.filterwarnings("ignore", ".*[Gg]rad strides do not match")
        module = task.model()
        options: dict[str, Any] = {"broadcast_buffers": False, "find_unused_parameters": unused}
        model = DistributedDataParallel(module, process_group=task.group, **options)
        return _train_in_torch(task, module, lambda step: model(*task.batch(step, task.rank)))


def one_process(task: Task, *, join: bool) -> Record:
    """Train on the batches of all ranks in this process: in one batch, or by the mean of the ranks' losses."""
    module, ranks = task.model(), range(task.world_size)

    def loss(step: int) -> Tensor:
        joined = joined_batch([task.batch(step, rank) for rank in ranks]) if join else None
        return mean_loss(task, module, step, ranks) if joined is None else module(*joined)

    return _train_in_torch(task, module, loss)


def elastic(task: Task) -> tuple[Mapping[int, Weights], Weights, Sequence[int]]:
    """Train with order="tree" on 1, 2, 4, ... ranks, and on fewer and fewer of them. Collective.

    The ranks of a smaller run are the first ones; the others wait for them.

    Returns:
        The whole parameters of each run by its number of ranks, those of the run whose number of ranks changed, and
        its numbers of ranks. Only rank 0 has parameters.
    """
    counts = [1 << i for i in range(task.world_size.bit_length())]
    made = {count: dist.new_group(range(count)) for count in counts}  # to be called by ranks outside, too
    groups = {count: group if task.rank < count else None for count, group in made.items()}
    path = counts[::-1][: task.steps]
    edges = [i * task.steps // len(path) for i in range(len(path) + 1)]
    fixed = {count: _train_parts(task, groups[count], range(task.steps), None) for count in counts}
    changing: Weights = {}
    with TemporaryDirectory() as own:
        folder = Path(all_gather_json(task.group, own, "a folder")[0])
        for count, (start, stop) in zip(path, pairwise(edges), strict=True):
            changing = _train_parts(task, groups[count], range(start, stop), folder)
            all_gather_json(task.group, None, "a run on fewer ranks")  # the folder is of use until here
    return fixed, changing, path


def survey(task: Task) -> Survey:
    """Run the first step on each rank separately: with `Precision`, in the model's own dtypes, and in fp64."""
    twin = _twin(task, simple_mean)
    with twin.caught() as sums:
        loss = _backward(mean_loss(task, twin, 0, [task.rank]))
    own = _step(loss, sums, twin.masters)
    plain = _first_step(task, _replicated(task), [task.rank])
    true = exact(task, _replicated(task), [task.rank])
    everywhere = all(all_gather_json(task.group, true is not None, "which ranks compute in fp64"))
    errors = _mean_over_ranks(task, _apart(own, true)) if true is not None and everywhere else None
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


def _train(
    task: Task,
    optimizer: Optimizer,
    run: Callable[[int], Tensor],
    gradients: Callable[[], Gradients],
    state: Callable[[], Mapping[str, Any]],
) -> Record:
    """Run all steps. `run` is a forward and backward that averages gradients over the ranks, and returns the loss."""
    losses: list[Tensor] = []
    first: Gradients = {}
    for step in range(task.steps):
        losses.append(run(step).detach().clone())
        first = first or gradients()
        optimizer.step()
        optimizer.zero_grad()
    tensors = {name: value for name, value in state().items() if isinstance(value, Tensor)}
    return Record(losses, first, {name: value.clone() for name, value in tensors.items() if value.is_floating_point()})


def _train_in_torch(task: Task, module: nn.Module, loss: Callable[[int], Tensor]) -> Record:
    """Train an unsharded module with PyTorch's AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=task.lr, weight_decay=task.weight_decay, fused=True)

    def run(step: int) -> Tensor:
        value = _backward(loss(step))
        _densify(module)
        return value

    return _train(task, optimizer, run, lambda: _gradients(_trainable(module)), module.state_dict)


def _train_parts(task: Task, group: dist.ProcessGroup | None, steps: range, folder: Path | None) -> Weights:
    """Train on the ranks of a group from what is in a folder, and save there. Return the parameters, on rank 0."""
    if group is None:
        return {}
    route = Route(order="tree", parts=task.parts)
    options: dict[str, Any] = {"units": task.units, "precision": task.precision, "route": route}
    model = ShardLite(task.model(), group=group, buffers="own", **options)
    optimizer = AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    if folder is not None and steps.start:
        load(folder, model, optimizer)
    for step in steps:
        for part in model.parts(step, seed=task.seed):
            model(*task.make_batch(step, part)).backward()
        model.clip_grad_norm_(_CLIP)
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        save(folder, model, optimizer)
    names = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in model.full_state_dict(rank=0).items() if name in names}


def _backward(loss: Tensor) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _first_step(task: Task, module: nn.Module, ranks: Sequence[int], convert: Callable[[Batch], Batch] = tuple) -> Step:
    """Run forward and backward. An unused parameter has a zero gradient."""
    loss = _backward(mean_loss(task, module, 0, ranks, convert))
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


# ---- what a model holds ---------------------------------------------------------------------------------------------


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def _gradients(params: Mapping[str, nn.Parameter]) -> Gradients:
    return {name: None if param.grad is None else param.grad.clone() for name, param in params.items()}


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


def _apart(one: Step, other: Step) -> Step:
    gradients = {name: (grad - other.gradients[name]).abs() for name, grad in one.gradients.items()}
    return Step((one.loss - other.loss).abs(), gradients)


def _whole_gradients(model: ShardLite, shapes: Mapping[str, torch.Size], group: dist.ProcessGroup | None) -> Gradients:
    """Assemble each gradient from the consecutive shards of all ranks, or return it if it is whole."""
    params = _trainable(model)
    with as_they_are():  # gradients of placeholders and shards, without unsharding them
        own = {n: None if p.grad is None else p.grad.as_subclass(Tensor).reshape(-1) for n, p in params.items()}
    numels = {name: None if grad is None else grad.numel() for name, grad in own.items()}
    counts = all_gather_json(group, numels, "gradients")
    whole: dict[str, Tensor | None] = {}
    for name, grad in own.items():
        pieces = {rank: count[name] for rank, count in enumerate(counts) if count[name] is not None}
        if pieces and sum(pieces.values()) == shapes[name].numel():
            parts = [grad if r == dist.get_rank(group) else params[name].new_empty(n) for r, n in pieces.items()]
            for rank, part in zip(pieces, parts, strict=True):
                if part is not None and part.numel():
                    dist.broadcast(part, group=group, group_src=rank)
            whole[name] = torch.cat([part for part in parts if part is not None]).view(shapes[name])
        else:
            whole[name] = None if grad is None else grad.clone().view(shapes[name])
    return whole
