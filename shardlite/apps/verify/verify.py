"""Train a model by ShardLite and by reference methods, and report the differences.

ShardLite's last stage is compared with its other stages, with replicas whose gradients rank 0 averages, with PyTorch's
data parallelism, and with one process that has all batches. Where bits must be equal, bits are compared: stages and
replicas keep masters and cast as `Precision` says. The last two train in the dtypes of the model. Where a sum is
rounded in another order or another dtype, the gradients of one step have a bound, and later quantities are only
reported: Adam divides a gradient by its own size, so noise in small gradients becomes noise in its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlite.apps.tables import aligned
from shardlite.apps.verify import twins
from shardlite.apps.verify.bounds import SAME, Batching, Bounds, Judge, Sum, difference, in_ulps, same_bits, unlike
from shardlite.apps.verify.plain import ring_mean, simple_mean
from shardlite.apps.verify.task import Batch, Task, joins
from shardlite.build import STAGES, UnitPolicy
from shardlite.comm import all_gather_json
from shardlite.config import Precision
from shardlite.errors import LayoutError

_OURS = f"stage {STAGES[-1]}"


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """One comparison, over all ranks."""

    opponent: str
    """The system compared with the last stage."""

    quantity: str
    """The quantity compared."""

    absolute: float = 0.0
    """Largest difference. Infinite if a value is NaN."""

    ulps: float = 0.0
    """Largest difference in units in the last place of the larger number, in the coarser of the two dtypes."""

    equal: bool = True
    """Whether all bits are equal."""

    share: float | None = 0.0
    """Largest used share of a bound; `None`: there is no bound."""

    failure: str | None = None
    """The first tensor beyond its bound, or `None`."""

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.failure is not None:
            return "BEYOND ITS BOUND"
        if self.equal:
            return "equal to the bit"
        return "not judged" if self.share is None else f"within its bound ({math.ceil(100 * self.share)}%)"


@dataclass(frozen=True)
class Report:
    """The result of `verify`, equal on every rank."""

    world_size: int
    steps: int
    rows: tuple[ReportRow, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is equal to the bit or within its bound."""
        return self.first_failure is None

    @property
    def first_failure(self) -> str | None:
        """The first tensor beyond its bound: system, name, rank, both values and the bound; or `None`."""
        return next((row.failure for row in self.rows if row.failure is not None), None)

    def table(self) -> str:
        """Format all comparisons, and the result."""
        cells, opponent = [[f"{_OURS} against", "", "", "difference", "ulps"]], ""
        for row in self.rows:
            label = "" if row.opponent == opponent else row.opponent
            cells.append([label, row.quantity, row.verdict, f"{row.absolute:.3g}", f"{row.ulps:.3g}"])
            opponent = row.opponent
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        result = "ok" if self.first_failure is None else f"FAILED: {self.first_failure}"
        return f"{aligned(cells, words=3)}\n{_ranks(self.world_size)}, {steps}: {result}"


def verify(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int, int], Batch],
    steps: int = 4,
    *,
    lr: float = 1e-3,
    weight_decay: float = 1e-2,
    units: UnitPolicy = None,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    elastic: bool = False,
) -> Report:
    """Train a model by ShardLite at each stage and by reference methods, with AdamW, and compare.

    Collective over an initialized process group on the CPU; every rank gets the same report. The model is made about
    fifteen times, and a few copies of its weights and gradients exist at once. At the end rank 0 trains on the batches
    of all ranks, while the others wait for it, at most for the group's timeout.

    Random numbers are seeded before the model is made, and for each step and rank before its batch is made and the
    model runs. So dropout is the same in each system. The model and the batches must depend on nothing else.

    Args:
        make_model: returns the model. Its forward returns the mean loss over a batch, [].
        make_batch: returns the positional arguments of the model, from step and rank.
        steps: optimizer steps. Gradients of the first step and weights after the last are compared.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        units: as in `ShardLite`.
        precision: as in `ShardLite`. PyTorch's data parallelism and one process train without it.
        seed: seed of all random numbers.
        group: the ranks; `None` is the default group.
        elastic: also train with `order="tree"` on 1, 2, 4, ... of the ranks, and from all down to one of them by way of
            checkpoints in a temporary folder, which all ranks must see; and compare the parameters to the bit. What
            `make_batch` returns for a part must then follow from step and part.

    Raises:
        LayoutError: there is no process group, ShardLite does not accept the model, or `elastic` is set and the ranks
            are no power of two, or not all of the program.
        RuntimeError: PyTorch's data parallelism does not accept the model, for example if a module is called inside and
            outside of a reentrant checkpoint.
        ValueError: `steps` is less than 1.

    Example:
        >>> report = verify(make_model, lambda step, rank: (torch.randn(8, 64),))
        >>> print(report.table())
        >>> assert report.ok
    """
    if steps < 1:
        raise ValueError(f"verify: steps must be at least 1, got {steps}")
    if not dist.is_available() or not dist.is_initialized():
        raise LayoutError(
            "there is no process group: call torch.distributed.init_process_group('gloo') first, and start the ranks "
            "with `torchrun --nproc-per-node N script.py`"
        )
    task = Task(
        make_model=make_model,
        make_batch=make_batch,
        steps=steps,
        lr=lr,
        weight_decay=weight_decay,
        units=units,
        precision=precision,
        seed=seed,
        group=group,
    )
    if elastic:
        _check_elastic(task)
    with torch.random.fork_rng(devices=[]):
        rows = list(_compare_elastic(task)) if elastic else []
        rows = [*_compare_all(task), *rows]
    return Report(task.world_size, steps, _over_ranks(task, rows))


def _compare_all(task: Task) -> Iterator[ReportRow]:
    """Train one system after the other, and compare each with ShardLite's last stage."""
    world_size = task.world_size
    ours = twins.sharded(task, STAGES[-1])
    for stage in STAGES[:-1]:
        yield from _compare(ours, f"stage {stage}", twins.sharded(task, stage), SAME)
    survey = twins.survey(task)
    summed = Sum(world_size, survey.magnitudes.gradients, survey.casts.gradients, task.precision)
    # A sum of two commutes; more are added in another order by the ring.
    bounds = SAME if world_size <= 2 else Bounds(first_loss=same_bits, gradients=summed.simple)
    simple, unused = twins.replicated(task, simple_mean)
    yield from _compare(ours, "simple twin", simple, bounds)
    if world_size > 2:
        yield from _compare(ours, "twin in ring order", twins.replicated(task, ring_mean)[0], SAME)
    bounds = Bounds(first_loss=None if task.casts else same_bits, gradients=summed.data_parallel)
    opponent = f"DistributedDataParallel{_plain(task)}"
    yield from _compare(ours, opponent, twins.data_parallel(task, unused=unused), bounds)
    ours = replace(ours, losses=_mean_losses(task, ours))
    if task.rank == 0:
        yield from _compare_one_process(task, ours, summed, survey)


def _compare_one_process(task: Task, ours: twins.Record, summed: Sum, survey: twins.Survey) -> Iterator[ReportRow]:
    exact = twins.exact(task, task.model(), range(task.world_size)) if survey.errors is not None else None
    if exact is None:
        opponent = f"one process (no fp64){_plain(task)}"
        yield from _compare(ours, opponent, twins.one_process(task, join=False), Bounds())
        return
    join = joins(task, exact.loss)
    batching = Batching(summed, survey, exact)
    bounds = Bounds(first_loss=batching.loss, gradients=batching.gradient)
    opponent = f"one process, {'one batch' if join else 'batch by batch'}{_plain(task)}"
    yield from _compare(ours, opponent, twins.one_process(task, join=join), bounds)


def _check_elastic(task: Task) -> None:
    """Check that there is a tree over the ranks, and that some of them can make a group.

    Raises:
        LayoutError: their number is no power of two, or they are not all of the program.
    """
    if task.world_size.bit_count() != 1:
        raise LayoutError(f"verify(elastic=True) compares powers of two of ranks, got {task.world_size} ranks")
    if task.world_size != dist.get_world_size():
        raise LayoutError(
            f"verify(elastic=True) makes groups of ranks, for which PyTorch calls all {dist.get_world_size()} of the "
            f"program: leave group=None, instead of a group of {task.world_size}"
        )


def _compare_elastic(task: Task) -> Iterator[ReportRow]:
    """Compare runs on fewer ranks with that on all of them, on rank 0: a row, and one for the run that changed."""
    fixed, changing, path = twins.elastic(task)
    if task.rank > 0:
        return
    opponent = f"itself, order='tree', {task.parts} parts"
    ours = fixed[task.world_size]

    def against(theirs: Mapping[str, Tensor], where: str) -> ReportRow:
        label = f"weight {{!r}} after step {task.steps} {where}"
        return _row(opponent, where, label, [ours, theirs], same_bits)

    others = [against(theirs, f"on {_ranks(count)}") for count, theirs in fixed.items()]
    yield replace(_worst(others, who=""), quantity=f"on {', '.join(map(str, fixed))} ranks")
    if len(path) > 1:
        yield against(changing, f"from {' to '.join(map(str, path))} ranks")


def _plain(task: Task) -> str:
    """Return a label for systems without `Precision`, if the model's results depend on it."""
    return ", no casts" if task.casts else ""


# ---- comparing ------------------------------------------------------------------------------------------------------


def _compare(ours: twins.Record, opponent: str, theirs: twins.Record, bounds: Bounds) -> Iterator[ReportRow]:
    """Compare all that two systems recorded, in order of time: the first difference may cause the others."""
    steps = len(ours.losses)
    first = [{"1": record.losses[0]} for record in (ours, theirs)]
    later = [{str(i): loss for i, loss in enumerate(record.losses[1:], 2)} for record in (ours, theirs)]
    yield _row(opponent, "loss of step 1", "loss of step {}", first, bounds.first_loss)
    gradients = [ours.gradients, theirs.gradients]
    yield _row(opponent, "gradients of step 1", "gradient of {!r} in step 1", gradients, bounds.gradients)
    if steps > 1:
        yield _row(opponent, "later losses", "loss of step {}", later, bounds.later_losses)
    weights = [ours.weights, theirs.weights]
    yield _row(opponent, f"weights after step {steps}", f"weight {{!r}} after step {steps}", weights, bounds.weights)


def _row(
    opponent: str, quantity: str, label: str, tensors: Sequence[Mapping[str, Tensor | None]], judge: Judge | None
) -> ReportRow:
    """Compare one quantity, tensor by tensor."""
    row = ReportRow(opponent=opponent, quantity=quantity, share=None if judge is None else 0.0)
    ours, theirs = tensors
    for name in ours:
        row = _with_tensor(row, label.format(name), (name, ours[name], theirs.get(name)), judge)
    return row


def _with_tensor(
    row: ReportRow, what: str, pair: tuple[str, Tensor | None, Tensor | None], judge: Judge | None
) -> ReportRow:
    """Add one tensor to a row."""
    name, ours, theirs = pair
    if ours is None and theirs is None:
        return row
    if ours is None or theirs is None:
        there, missing = (row.opponent, _OURS) if ours is None else (_OURS, row.opponent)
        failure = None if judge is None else f"{what}: {there} has one, {missing} has none"
        return replace(row, absolute=math.inf, ulps=math.inf, equal=False, failure=row.failure or failure)
    if not ours.numel():
        return row
    apart = difference(ours, theirs)
    row = replace(
        row,
        absolute=max(row.absolute, float(apart.max())),
        ulps=max(row.ulps, float(in_ulps(apart, ours, theirs).max())),
        equal=row.equal and not bool(unlike(ours, theirs).any()),
    )
    if judge is None or row.share is None:
        return row
    judgement = judge(name, ours, theirs)
    failure = None if judgement.share <= 1 else f"{what}, {_OURS} against {row.opponent}: {judgement.detail}"
    return replace(row, share=max(row.share, judgement.share), failure=row.failure or failure)


def _over_ranks(task: Task, rows: Sequence[ReportRow]) -> tuple[ReportRow, ...]:
    """Merge the rows of all ranks. Rank 0 has all rows, the others may have fewer."""
    said = all_gather_json(task.group, [asdict(row) for row in rows], "the results")
    ranks = [[ReportRow(**row) for row in each] for each in said]
    return tuple(_worst([each[i] for each in ranks if i < len(each)]) for i in range(len(ranks[0])))


def _worst(rows: Sequence[ReportRow], who: str = "rank {}: ") -> ReportRow:
    """Merge the rows of some ranks, in rank order, or of some runs."""
    failures = [who.format(number) + row.failure for number, row in enumerate(rows) if row.failure is not None]
    return replace(
        rows[0],
        absolute=max(row.absolute for row in rows),
        ulps=max(row.ulps for row in rows),
        equal=all(row.equal for row in rows),
        share=max((row.share for row in rows if row.share is not None), default=None),
        failure=failures[0] if failures else None,
    )


def _mean_losses(task: Task, record: twins.Record) -> list[Tensor]:
    """Average the losses over the ranks, in fp64."""
    total = torch.stack(record.losses).double()
    dist.all_reduce(total, group=task.group)
    return list((total / task.world_size).to(record.losses[0].dtype).unbind())


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
