"""Train a model with ShardLite and with reference methods, and report the differences.

ShardLite's highest stage is compared with its lower stages, with replicas whose gradients are averaged in a written-out
order, with PyTorch's data parallelism, and with one process that has all batches. Stages and replicas keep master
weights and cast as `Precision` specifies, so their bits must be equal. PyTorch's data parallelism and the one process
train in the dtypes of the model. If a system rounds a sum in a different order or dtype, the gradients of the first
step have a bound, and later quantities are only reported: Adam divides a gradient by the gradient's own size, so noise
in small gradients becomes noise in Adam's steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlite.comm import agree, all_gather_json, problem_in, ranks_of
from shardlite.config import Precision
from shardlite.errors import LayoutError, check_int
from shardlite.lab.table import aligned
from shardlite.lab.verify import twins
from shardlite.lab.verify.bounds import SAME, Batching, Bounds, Judge, Sum, difference, in_ulps, same_bits, unlike
from shardlite.lab.verify.plain import ring_mean, simple_mean
from shardlite.lab.verify.task import Batch, Task, joins
from shardlite.wrapping import UnitPolicy
from shardlite.wrapping.validate import STAGES

_OURS = f"stage {STAGES[-1]}"

Tensors: TypeAlias = Mapping[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """One comparison, merged over all ranks."""

    opponent: str
    """The system with which the highest stage is compared."""

    quantity: str
    """The compared quantity."""

    absolute: float = 0.0
    """Largest difference. Infinite if a value is NaN."""

    ulps: float = 0.0
    """Largest difference in units in the last place of the larger number, in the coarser of the two dtypes."""

    equal: bool = True
    """Whether all bits are equal."""

    share: float | None = 0.0
    """Largest difference as a share of its bound; `None` if there is no bound."""

    failure: str | None = None
    """Description of the first tensor beyond its bound, or `None`."""

    @property
    def verdict(self) -> str:
        """The result as text."""
        if self.failure is not None:
            return "BEYOND ITS BOUND"
        if self.equal:
            return "equal to the bit"
        return "not judged" if self.share is None else f"within its bound ({math.ceil(100 * self.share)}%)"


@dataclass(frozen=True)
class Report:
    """The result of `verify`. Every rank has the same report."""

    world_size: int
    steps: int
    rows: tuple[ReportRow, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is equal to the bit or within its bound."""
        return self.first_failure is None

    @property
    def first_failure(self) -> str | None:
        """The first tensor beyond its bound, or `None`.

        The text names the rank, the tensor and the system, and contains both values and the bound.
        """
        return next((row.failure for row in self.rows if row.failure is not None), None)

    def table(self) -> str:
        """Format all comparisons and the result as a table."""
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
    """Train a model with ShardLite at each stage and with reference methods, and compare. The optimizer is AdamW.

    Collective over an initialized process group on the CPU. The model is made about fifteen times, and a few copies of
    its weights and gradients exist at the same time. At the end, rank 0 trains on the batches of all ranks. The other
    ranks wait for rank 0, at most for the group's timeout.

    Random numbers are seeded before the model is made. They are seeded again for each step and rank before the batch is
    made, so dropout is the same in each system. The model and the batches must depend only on these random numbers.

    Args:
        make_model: function that returns the model. The forward of the model returns the mean loss [] of a batch.
        make_batch: function of step and rank that returns the positional arguments of the model.
        steps: number of optimizer steps. Gradients of the first step and weights after the last step are compared.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        units: as in `ShardLite`.
        precision: as in `ShardLite`. PyTorch's data parallelism and the one process ignore it.
        seed: seed of all random numbers.
        group: the ranks; `None` is the default group.
        elastic: also train with `order="tree"` on 1, 2, 4, ... ranks, and once on a decreasing number of ranks, from
            all to one. The latter run uses checkpoints in a temporary folder, which all ranks must be able to access.
            Parameters must be equal to the bit. In these runs, `make_batch` gets step and part, and its result must
            depend only on step and part.

    Returns:
        All comparisons. Every rank gets the same report.

    Raises:
        LayoutError: there is no process group, or ShardLite does not accept the model. With `elastic`: the number of
            ranks is not a power of two, or the group does not contain all ranks of the program.
        RuntimeError: PyTorch's data parallelism does not accept the model, for example if a module is called inside and
            outside of a reentrant checkpoint.
        TypeError: `steps` is not an int, or a function is not callable.
        ValueError: `steps` is less than 1.

    Example:
        >>> report = verify(make_model, lambda step, rank: (torch.randn(8, 64),))
        >>> print(report.table())
        >>> assert report.ok
    """

    def check() -> None:
        check_int("verify: steps", steps, 1)
        for name, function in (("make_model", make_model), ("make_batch", make_batch)):
            if not callable(function):
                raise TypeError(f"verify: {name} must be callable, got {function!r}")

    problem = problem_in(check)
    if not dist.is_available() or not dist.is_initialized():
        raise problem or LayoutError(
            "there is no process group: call torch.distributed.init_process_group('gloo') first, and start the ranks "
            "with `torchrun --nproc-per-node N script.py`"
        )
    agree(ranks_of(group), [], problem, what="verify")
    task = Task(make_model, make_batch, steps, lr, weight_decay, units, precision, seed, group)
    if elastic:
        _check_elastic(task)
    with torch.random.fork_rng(devices=[]):
        rows = list(_compare_elastic(task)) if elastic else []
        rows = [*_compare_all(task), *rows]
    return Report(task.world_size, steps, _over_ranks(task, rows))


def _compare_all(task: Task) -> Iterator[ReportRow]:
    """Train one system after the other, and compare each with ShardLite's highest stage."""
    world_size = task.world_size
    ours = twins.sharded(task, STAGES[-1])
    for stage in STAGES[:-1]:
        yield from _compare(ours, f"stage {stage}", twins.sharded(task, stage), SAME)
    survey = twins.survey(task)
    summed = Sum(world_size, survey.magnitudes.gradients, survey.casts.gradients, task.precision)
    # Two terms have the same sum in either order. The ring and the twin add more than two terms in different orders.
    bounds = SAME if world_size <= 2 else {"first loss": same_bits, "gradients": summed.simple}
    simple, unused = twins.replicated(task, simple_mean)
    yield from _compare(ours, "simple twin", simple, bounds)
    if world_size > 2:
        yield from _compare(ours, "twin in ring order", twins.replicated(task, ring_mean)[0], SAME)
    bounds = {"gradients": summed.data_parallel} | ({} if task.casts else {"first loss": same_bits})
    opponent = f"DistributedDataParallel{_plain(task)}"
    yield from _compare(ours, opponent, twins.data_parallel(task, unused=unused), bounds)
    ours = replace(ours, losses=_mean_losses(task, ours))
    if task.rank == 0:
        yield from _compare_one_process(task, ours, summed, survey)


def _compare_one_process(task: Task, ours: twins.Record, summed: Sum, survey: twins.Survey) -> Iterator[ReportRow]:
    exact = twins.exact(task, task.model(), range(task.world_size))
    bounds: Bounds = {}
    join, way = False, " (no fp64)"
    if survey.errors is not None and exact is not None:
        join = joins(task, exact.loss)
        batching = Batching(summed, survey.magnitudes.loss, survey.errors, exact)
        bounds = {"first loss": batching.loss, "gradients": batching.gradient}
        way = ", one batch" if join else ", batch by batch"
    opponent = f"one process{way}{_plain(task)}"
    yield from _compare(ours, opponent, twins.one_process(task, join=join), bounds)


def _check_elastic(task: Task) -> None:
    """Check that order="tree" supports the number of ranks, and that groups of fewer ranks can be created.

    Raises:
        LayoutError: the number of ranks is not a power of two, or the group does not contain all ranks of the program.
    """
    if task.world_size.bit_count() != 1:
        raise LayoutError(f"verify(elastic=True) compares powers of two of ranks, got {task.world_size} ranks")
    if task.world_size != dist.get_world_size():
        raise LayoutError(
            f"verify(elastic=True) creates groups, which requires all {dist.get_world_size()} ranks of the program; "
            f"got a group of {task.world_size}: use group=None"
        )


def _compare_elastic(task: Task) -> Iterator[ReportRow]:
    """Compare the run on all ranks with the runs on fewer ranks, and with the run whose number of ranks decreases.

    Only rank 0 yields rows: one row for all runs on fewer ranks, and one row for the run on a decreasing number
    of ranks, if there is such a run.
    """
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
    """Return the label of systems that do not apply `Precision`. The label is empty if nothing is cast."""
    return ", no casts" if task.casts else ""


# ---- comparing ------------------------------------------------------------------------------------------------------


def _compare(ours: twins.Record, opponent: str, theirs: twins.Record, bounds: Bounds) -> Iterator[ReportRow]:
    """Compare the records of two systems in order of time, because the first difference may cause the others."""
    steps = len(ours.losses)

    def row(quantity: str, label: str, judged: str, of: Callable[[twins.Record], Tensors]) -> ReportRow:
        return _row(opponent, quantity, label, [of(ours), of(theirs)], bounds.get(judged))

    yield row("loss of step 1", "loss of step {}", "first loss", lambda record: {"1": record.losses[0]})
    yield row("gradients of step 1", "gradient of {!r} in step 1", "gradients", lambda record: record.gradients)
    if steps > 1:
        yield row("later losses", "loss of step {}", "later losses", _later_losses)
    yield row(
        f"weights after step {steps}", f"weight {{!r}} after step {steps}", "weights", lambda record: record.weights
    )


def _later_losses(record: twins.Record) -> Tensors:
    return {str(step): loss for step, loss in enumerate(record.losses[1:], 2)}


def _row(opponent: str, quantity: str, label: str, tensors: Sequence[Tensors], judge: Judge | None) -> ReportRow:
    """Compare one quantity, tensor by tensor."""
    equal = ReportRow(opponent=opponent, quantity=quantity, share=None if judge is None else 0.0)
    ours, theirs = tensors
    rows = (_compared(equal, label.format(name), (name, ours[name], theirs.get(name)), judge) for name in ours)
    return _worst([equal, *rows], who="")


def _compared(
    equal: ReportRow, what: str, pair: tuple[str, Tensor | None, Tensor | None], judge: Judge | None
) -> ReportRow:
    """Return the row of one tensor, made from `equal`, the row for two equal tensors."""
    name, ours, theirs = pair
    if ours is None and theirs is None:
        return equal
    if ours is None or theirs is None:
        there, missing = (equal.opponent, _OURS) if ours is None else (_OURS, equal.opponent)
        failure = None if judge is None else f"{what}: {there} has one, {missing} has none"
        return replace(equal, absolute=math.inf, ulps=math.inf, equal=False, failure=failure)
    if not ours.numel():
        return equal
    apart = difference(ours, theirs)
    absolute, ulps = float(apart.max()), float(in_ulps(apart, ours, theirs).max())
    row = replace(equal, absolute=absolute, ulps=ulps, equal=not unlike(ours, theirs).any())
    if judge is None:
        return row
    judgement = judge(name, ours, theirs)
    failure = None if judgement.share <= 1 else f"{what}, {_OURS} against {equal.opponent}: {judgement.detail}"
    return replace(row, share=judgement.share, failure=failure)


def _over_ranks(task: Task, rows: Sequence[ReportRow]) -> tuple[ReportRow, ...]:
    """Merge the rows of all ranks. Rank 0 has all rows. Other ranks may have fewer."""
    said = all_gather_json(task.group, [asdict(row) for row in rows], "the results")
    ranks = [[ReportRow(**row) for row in each] for each in said]
    return tuple(_worst([each[i] for each in ranks if i < len(each)]) for i in range(len(ranks[0])))


def _worst(rows: Sequence[ReportRow], who: str = "rank {}: ") -> ReportRow:
    """Merge the rows of ranks (in rank order), runs or tensors. `who` is the prefix of a failure text."""
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
