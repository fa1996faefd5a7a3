"""Systems that train one model on the same batches. Each function returns the results of a system.

    sharded        by ShardLite, at any stage
    replicated     by plain twins, whose gradients are averaged in rank order or in ring order
    data_parallel  by `torch.nn.parallel.DistributedDataParallel`
    one_process    rank 0 alone, on the batches of all ranks
    elastic        by ShardLite with order="tree", on different numbers of ranks
    survey         each rank separately, in several precisions; only the first step, without an update
    exact          one process in fp64; only the first step, without an update

`sharded`, `replicated` and `elastic` apply `Precision`. The others compute in the model's own dtypes.

Legend: `W` ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardlite.checkpoint import load, save
from shardlite.comm import all_gather_json
from shardlite.config import Route
from shardlite.lab.verify.plain import Mean, PaddedAdamW, Twin, simple_mean
from shardlite.lab.verify.task import Task, doubled, joined_batch, mean_loss
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
    """The loss [] of each step: this rank's loss, or the mean over all ranks if one process trained on all batches."""

    gradients: Gradients
    """Full gradients of the first step, averaged over the ranks. `None` for a parameter that no rank used."""

    weights: Weights
    """Full parameters and floating-point buffers after the last step."""


@dataclass(frozen=True)
class Step:
    """Values of the first step: one for the loss, [], and one for each element of the gradients."""

    loss: Tensor
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Survey:
    """Quantities of the first step, which each rank runs alone with `Precision`. All are fp64 means over the ranks."""

    magnitudes: Step
    """Absolute values of the loss and of the gradients."""

    casts: Step
    """Distances to the results of plain PyTorch.

    They are zero if nothing is cast and the gradients of each parameter are added in the dtype of the parameter.
    """

    errors: Step | None
    """Distances to the results of plain PyTorch in fp64. `None` if `exact` returns `None` on any rank."""


# ---- the systems ----------------------------------------------------------------------------------------------------


def sharded(task: Task, stage: int) -> Record:
    """Train with ShardLite at `stage`."""
    module = task.model()
    shapes = {name: param.shape for name, param in module.named_parameters()}
    model, optimizer = _sharded(task, module, stage=stage, group=task.group)

    def run(step: int) -> Tensor:
        return _backward(model(*task.batch(step, task.rank)))

    gradients = partial(_full_gradients, task, model, shapes, stage)
    return _train(task, optimizer, run, gradients, model.full_state_dict)


def replicated(task: Task, mean: Mean) -> tuple[Record, bool]:
    """Train plain twins whose gradients are averaged by `mean`.

    Also return whether, in any step, a rank did not use a parameter.
    """
    twin = _twin(task, mean)
    optimizer = PaddedAdamW(twin.masters.values(), lr=task.lr, weight_decay=task.weight_decay)

    def run(step: int) -> Tensor:
        loss: Tensor = twin.backward(lambda: _backward(twin(*task.batch(step, task.rank))))
        return loss

    return _train(task, optimizer, run, lambda: _gradients(twin.masters.items()), twin.state_dict), twin.unused


def data_parallel(task: Task, *, unused: bool) -> Record:
    """Train with PyTorch's data parallelism. Set `unused` if a rank does not use all parameters in some step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        warnings.filterwarnings("ignore", ".*[Gg]rad strides do not match")
        module = task.model()
        options: dict[str, Any] = {"broadcast_buffers": False, "find_unused_parameters": unused}
        model = DistributedDataParallel(module, process_group=task.group, **options)
        return _train_in_torch(task, module, lambda step: model(*task.batch(step, task.rank)))


def one_process(task: Task, *, join: bool) -> Record:
    """Train on the batches of all ranks in this process.

    With `join`, the batches are joined into one batch if possible. Otherwise the loss is the mean of the ranks' losses.
    """
    module, ranks = task.model(), range(task.world_size)

    def loss(step: int) -> Tensor:
        joined = joined_batch([task.batch(step, rank) for rank in ranks]) if join else None
        return mean_loss(task, module, step, ranks) if joined is None else module(*joined)

    return _train_in_torch(task, module, loss)


def elastic(task: Task) -> tuple[Mapping[int, Weights], Weights, Sequence[int]]:
    """Train with order="tree": on each of 1, 2, 4, ... ranks, and once on a decreasing number of ranks. Collective.

    A smaller run uses the first ranks. The other ranks wait.

    Returns:
        The full parameters of the runs by their numbers of ranks; the full parameters of the run on a decreasing
        number of ranks; and the numbers of ranks of the latter run. Only rank 0 gets parameters.
    """
    counts = [1 << i for i in range(task.world_size.bit_length())]
    made = {count: dist.new_group(range(count)) for count in counts}  # ranks outside a group must also call `new_group`
    groups = {count: group if task.rank < count else None for count, group in made.items()}
    path = counts[::-1][: task.steps]
    edges = [i * task.steps // len(path) for i in range(len(path) + 1)]
    fixed = {count: _train_parts(task, groups[count], range(task.steps), None) for count in counts}
    changing: Weights = {}
    with TemporaryDirectory() as own:
        folder = Path(all_gather_json(task.group, own, "a folder")[0])
        for count, (start, stop) in zip(path, pairwise(edges), strict=True):
            changing = _train_parts(task, groups[count], range(start, stop), folder)
            all_gather_json(task.group, None, "a run on fewer ranks")  # after this call, no rank uses the folder
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
    """Compute the first step in fp64, with the mean of the losses on the batches of `ranks`.

    Return `None` if the model does not run in fp64, or if it has fp64 parameters, for which fp64 is not more exact.
    """
    if any(param.dtype == torch.float64 for param in module.parameters()):
        return None
    try:
        return _first_step(task, doubled(module), ranks)
    except RuntimeError:  # the forward creates tensors of a different dtype
        return None


# ---- training -------------------------------------------------------------------------------------------------------


def _train(
    task: Task,
    optimizer: Optimizer,
    run: Callable[[int], Tensor],
    gradients: Callable[[], Gradients],
    state: Callable[[], Mapping[str, Any]],
) -> Record:
    """Take all steps. `run` runs forward and backward, averages the gradients over the ranks and returns the loss."""
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

    return _train(task, optimizer, run, lambda: _gradients(module.named_parameters()), module.state_dict)


def _train_parts(task: Task, group: dist.ProcessGroup | None, steps: range, folder: Path | None) -> Weights:
    """Train on the ranks of a group, and return the full parameters on rank 0.

    If there is a folder, resume from its checkpoint and save a checkpoint.
    """
    if group is None:
        return {}
    model, optimizer = _sharded(task, task.model(), route=Route(order="tree", parts=task.parts), group=group)
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


def _sharded(task: Task, module: nn.Module, **options: Any) -> tuple[ShardLite, AdamW]:
    model = ShardLite(module, units=task.units, precision=task.precision, buffers="own", **options)
    return model, AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay)


def _backward(loss: Tensor) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _first_step(task: Task, module: nn.Module, ranks: Sequence[int]) -> Step:
    """Run forward and backward on the batches of `ranks`."""
    loss = _backward(mean_loss(task, module, 0, ranks))
    _densify(module)
    return _step(loss, _gradients(module.named_parameters()), dict(module.named_parameters()))


def _step(loss: Tensor, gradients: Gradients, params: Mapping[str, nn.Parameter]) -> Step:
    """Return a step in fp64. A parameter that this rank did not use has a zero gradient."""
    full = {}
    for name, param in params.items():
        if param.requires_grad:
            grad = gradients.get(name)
            full[name] = (torch.zeros_like(param).detach() if grad is None else grad).double()
    return Step(loss.detach().double(), full)


def _replicated(task: Task) -> nn.Module:
    """Make the model, with the values of rank 0 on every rank."""
    module = task.model()
    for value in module.state_dict().values():
        if isinstance(value, Tensor):
            content = value.contiguous().view(-1).view(torch.uint8)  # gloo does not support all dtypes
            dist.broadcast(content, group=task.group, group_src=0)
            value.copy_(content.view(value.dtype).view(value.shape))
    return module


def _twin(task: Task, mean: Mean) -> Twin:
    return Twin(_replicated(task), task.world_size, task.units, mean, precision=task.precision, group=task.group)


# ---- what a model holds ---------------------------------------------------------------------------------------------


def _gradients(params: Iterable[tuple[str, nn.Parameter]]) -> Gradients:
    """Copy the gradients of the trainable parameters."""
    return {name: None if param.grad is None else param.grad.clone() for name, param in params if param.requires_grad}


def _densify(module: nn.Module) -> None:
    """Make gradients dense. PyTorch's AdamW rejects sparse gradients."""
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


def _full_gradients(task: Task, model: ShardLite, shapes: Mapping[str, torch.Size], stage: int) -> Gradients:
    """Return the full gradients. From stage 1 on, assemble each gradient from the consecutive shards of all ranks."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    with as_they_are():  # do not unshard the parameters
        own = {n: None if p.grad is None else p.grad.as_subclass(Tensor).flatten().clone() for n, p in params.items()}
    numels = {name: None if grad is None else grad.numel() for name, grad in own.items()}
    counts = all_gather_json(task.group, numels, "gradients")
    pieces = {name: [] if grad is None or stage > 0 else [grad] for name, grad in own.items()}
    for name, grad in own.items() if stage > 0 else ():
        for rank, numel in enumerate(count[name] for count in counts):
            if numel is not None:
                piece = (
                    grad if grad is not None and rank == dist.get_rank(task.group) else params[name].new_empty(numel)
                )
                if numel:
                    dist.broadcast(piece, group=task.group, group_src=rank)
                pieces[name].append(piece)
    return {name: torch.cat(each).view(shapes[name]) if each else None for name, each in pieces.items()}
