"""`verify` passes correct systems, and names the tensor that was spoilt in a wrong one."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardlite import AdamW, LayoutError, Precision, verify
from shardlite.grads import reduce
from shardlite.lab.verify import twins
from shardlite.lab.verify.plain import simple_mean
from shardlite.lab.verify.task import Task
from shardlite.lab.verify.verify import Report, _compare_elastic
from tests.support.models.small import MLP, VOCABULARY, Branches, Branching, Context, LanguageModel, MixedDtypes
from tests.support.twins.sharded import slow, without_warnings

EQUAL = "equal to the bit"
STAGES = ("stage 0", "stage 1", "stage 2")
TWINS = ("simple twin", "twin in ring order")
DDP = "DistributedDataParallel"
BF16 = Precision(compute=torch.bfloat16)


class Rows(nn.Module):
    """The mean square of a model's output for rows, []."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Tensor:
        return self.model(*args).square().mean()


class Tokens(Rows):
    """The cross-entropy of a language model, []."""

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tokens(step: int, rank: int) -> tuple[Tensor]:
    return (torch.randint(0, VOCABULARY, (2, 8)),)


def rows(width: int, more: int = 0) -> Callable[[int, int], tuple[Tensor]]:
    """Draw rows; each rank has `more` of them than the one before."""
    return lambda step, rank: (torch.randn(5 + more * rank, width),)


def branches(step: int, rank: int) -> tuple[Tensor, int | None]:
    """Branch 0 is used by one rank only, branch 1 by the others and not at every step, branch 2 by none."""
    return torch.randn(5, 6), 0 if rank == 1 else 1 if step % 2 == 0 else None


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 1))


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, 5, sparse=True), nn.Linear(5, 1))


def low(dtype: torch.dtype) -> tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Tensor]]]:
    """Return functions that make a model with weights in `dtype`, and rows for it."""
    return lambda: Rows(MLP([7, 30, 1])).to(dtype), lambda step, rank: (rows(7)(step, rank)[0].to(dtype),)


ONE, EACH, NO_FP64 = "one process, one batch", "one process, batch by batch", "one process (no fp64)"
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any], str]] = {
    "language-model": (lambda: Tokens(LanguageModel(blocks=2)), tokens, ONE),
    "dropout": (lambda: Tokens(LanguageModel(blocks=2, dropout=0.2, reentrant=False)), tokens, EACH),
    "reentrant": (lambda: Tokens(LanguageModel(blocks=2, reentrant=True)), tokens, ONE),
    "called-twice-or-never": (lambda: Rows(Context()), rows(6), ONE),
    "used-on-one-rank": (lambda: Rows(Branching()), branches, EACH),
    "mixed-dtypes": (lambda: Rows(MixedDtypes()), rows(7), NO_FP64),
    "batch-norm": (lambda: Rows(normed()), rows(6), EACH),
    "uneven": (lambda: Rows(MLP([7, 30, 1])), rows(7, more=1), EACH),
    "bf16": (*low(torch.bfloat16), ONE),
    "fp16": (*low(torch.float16), ONE),
    "fp64": (*low(torch.float64), NO_FP64),
    "sparse": (lambda: Rows(sparse()), lambda s, r: (torch.randint(0, 20, (4,)),), ONE),
}


def verified(group: Any, name: str, steps: int = 2, **options: Any) -> Report:
    """Body of a rank."""
    make_model, make_batch, _ = CASES[name]
    return verify(make_model, make_batch, steps, group=group, **options)


def verdicts(report: Report) -> dict[tuple[str, str], str]:
    return {(row.opponent, row.quantity): row.verdict for row in report.rows}


def opponents(report: Report) -> list[str]:
    return list(dict.fromkeys(row.opponent for row in report.rows))


def assert_equal_to_the_bit(report: Report, systems: set[str]) -> None:
    for row in report.rows:
        if row.opponent in systems:
            assert (row.verdict, row.absolute, row.ulps, row.share) == (EQUAL, 0, 0, 0), row


# ---- all is well ----------------------------------------------------------------------------------------------------


SLOW = {"reentrant", "bf16", "dropout", "fp64", "batch-norm"}  # like "language-model" and "fp16"


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 2) for name in CASES if name not in {*SLOW, "uneven"}),
        ("used-on-one-rank", 1),
        ("uneven", 3),
        slow("uneven", 2),
        *(slow(name, 2) for name in sorted(SLOW)),
        *(slow(name, 3) for name in CASES if name != "uneven"),
        slow("used-on-one-rank", 4),
        slow("mixed-dtypes", 4),
    ],
)
@pytest.mark.sample(3)
def test_all_is_equal_or_within_its_bound(cluster, name, world_size):
    reports = cluster.run(verified, world_size, name)
    assert all(report == reports[0] for report in reports)
    assert reports[0].ok, reports[0].table()
    twins_of = TWINS[:1] if world_size <= 2 else TWINS
    assert opponents(reports[0])[:-1] == [*STAGES, *twins_of, DDP]
    assert_equal_to_the_bit(reports[0], {*STAGES, twins_of[-1]})
    if world_size > 1:
        assert opponents(reports[0])[-1] == CASES[name][2]


@pytest.mark.parametrize(
    ("name", "precision", "world_size"),
    [
        ("language-model", BF16, 2),
        slow("reentrant", replace(BF16, reduce=torch.bfloat16, output=torch.float32), 3),
        slow("dropout", Precision(compute=torch.float16, reduce=torch.bfloat16), 3),
        slow("mixed-dtypes", Precision(reduce=torch.bfloat16), 3),
        ("bf16", Precision(compute=torch.float32, reduce=torch.float16), 2),
        slow("called-twice-or-never", Precision(compute=torch.float64), 2),
        ("uneven", Precision(reduce=torch.bfloat16), 1),
        ("uneven", replace(BF16, reduce=torch.bfloat16), 1),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_replicas_cast_as_sharded_models_do(cluster, name, precision, world_size):
    report = cluster.run(verified, world_size, name, precision=precision)[0]
    assert report.ok, report.table()
    assert_equal_to_the_bit(report, {*STAGES, TWINS[world_size > 2]})
    casts = precision.compute is not None
    assert [each.endswith(", no casts") for each in opponents(report)[-2:]] == [casts, casts]
    judged = [row for row in report.rows if row.opponent.startswith(DDP) and row.share is not None]
    assert [row.quantity for row in judged] == ["loss of step 1"] * (not casts) + ["gradients of step 1"]


def test_several_gradients_of_one_parameter_are_added_in_the_dtype_of_the_sum(group: Any) -> None:
    """A bf16 model that `DistributedDataParallel` does not take."""
    task = Task(
        make_model=lambda: Rows(Context(reentrant=True)).bfloat16(),
        make_batch=lambda step, rank: (rows(6)(step, rank)[0].bfloat16(),),
        steps=2,
        lr=1e-2,
        weight_decay=0.1,
        units=None,
        precision=Precision(),
        seed=0,
        group=group,
    )
    ours, theirs = twins.sharded(task, 3).weights, twins.replicated(task, simple_mean)[0].weights
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("group", "wrong"),
    [
        (2, {"compute": torch.float32}),
        slow(2, {"compute": torch.float16}),
        (3, {"reduce": torch.bfloat16}),  # at two ranks no partial sum is rounded
    ],
    indirect=["group"],
)
def test_another_precision_than_was_asked_for_is_found(group: Any, wrong: dict[str, torch.dtype]) -> None:
    make = twins.ShardLite
    other = replace(BF16, **wrong)
    with mock.patch.object(twins, "ShardLite", lambda *args, precision, **more: make(*args, precision=other, **more)):
        report = verified(group, "language-model", 1, precision=BF16)
    what = "gradient of 'model.embed.weight' in" if "reduce" in wrong else "loss of"
    assert report.first_failure.startswith(f"rank 0: {what} step 1, stage 3 against simple twin: ")


def test_units_and_hyper_parameters_are_passed_on(cluster):
    default, other = (
        cluster.run(verified, 2, "used-on-one-rank", **options)[0]
        for options in ({}, {"units": Branches, "lr": 0.5, "weight_decay": 0.3, "seed": 5})
    )
    assert default.ok
    assert other.ok
    assert default != other


def test_one_step_has_no_later_losses(group: Any) -> None:
    report = verified(group, "uneven", steps=1)
    assert report.ok
    assert {row.quantity for row in report.rows} == {"loss of step 1", "gradients of step 1", "weights after step 1"}


@pytest.mark.ranks(1)
def test_the_random_numbers_of_the_caller_stay(group: Any) -> None:
    state = torch.get_rng_state()
    verified(group, "language-model", 1)
    assert torch.equal(state, torch.get_rng_state())


def test_what_cannot_be_done_is_said():
    with pytest.raises(LayoutError, match=r"no process group: call torch.distributed.init_process_group"):
        verify(nn.Identity, tokens)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        verify(nn.Identity, tokens, 0)


# ---- something is spoilt --------------------------------------------------------------------------------------------

SPOILT = "model.blocks.1.up.weight"


def spoilt_model(group: Any, which: int, rank: int) -> Report:
    """Body of a rank: on one rank, a gradient of one of the models is off by a millionth."""
    made = 0

    def make() -> nn.Module:
        nonlocal made
        model = Tokens(LanguageModel(blocks=2))
        made += 1
        if made == which and torch.distributed.get_rank(group) == rank:
            model.get_parameter(SPOILT).register_hook(lambda grad: grad * (1 + 2**-20))
        return model

    return verify(make, tokens, 1, group=group)


MADE = ("stage 3", *STAGES, "survey", "survey without casts", "survey in fp64", *TWINS, DDP)


@pytest.mark.parametrize(
    ("world_size", "spoilt"),
    [
        (2, "simple twin"),
        (3, "twin in ring order"),
        slow(2, "stage 0"),
        slow(2, "stage 2"),
        slow(2, DDP),
        slow(3, "stage 1"),
        slow(3, "simple twin"),
        slow(3, DDP),
    ],
)
def test_a_gradient_that_is_off_by_a_millionth_is_named(cluster, world_size, spoilt):
    systems = [system for system in MADE if world_size > 2 or system != TWINS[1]]
    report = cluster.run(spoilt_model, world_size, 1 + systems.index(spoilt), 1)[0]
    assert report.first_failure.startswith(f"rank 0: gradient of {SPOILT!r} in step 1, stage 3 against {spoilt}: at [")
    assert {row.opponent for row in report.rows if row.failure} == {spoilt}


@pytest.mark.parametrize("world_size", [2, slow(3)])
def test_a_gradient_of_ours_that_is_off_by_a_millionth_is_off_from_everything(cluster, world_size):
    reports = cluster.run(spoilt_model, world_size, 1, 1)
    assert all(report == reports[0] for report in reports)
    failed = [row for row in reports[0].rows if row.failure and row.quantity == "gradients of step 1"]
    assert {row.opponent for row in failed} == {row.opponent for row in reports[0].rows}
    assert all(f"{SPOILT!r} in step 1, stage 3 against {row.opponent}: at [" in row.failure for row in failed)


@pytest.mark.ranks(2, slow(3))
def test_a_sum_that_is_not_divided_is_found(group: Any) -> None:
    """All stages return sums instead of means."""
    collective = reduce.reduce_scatter

    def undivided(*args: Any, last: Any, **more: Any) -> Any:
        return collective(*args, last=last._replace(divisor=1), **more)

    with mock.patch.object(reduce, "reduce_scatter", undivided):
        report = verified(group, "language-model", 1)
    first = "rank 0: gradient of 'model.embed.weight' in step 1, stage 3 against simple twin: at ["
    assert report.first_failure.startswith(first)
    failed = {row.opponent for row in report.rows if row.failure and row.quantity == "gradients of step 1"}
    assert failed == set(opponents(report)) - set(STAGES)


def test_a_wrong_step_is_found_in_the_weights(group: Any) -> None:
    """The sharded models have an optimizer without weight decay."""
    with mock.patch.object(twins, "AdamW", lambda params, lr, weight_decay: AdamW(params, lr=lr, weight_decay=0)):
        report = verified(group, "mixed-dtypes", 1)
    words = "rank 0: weight 'model.0.0.wide' after step 1, stage 3 against simple twin: at ["
    assert report.first_failure.startswith(words)
    assert verdicts(report)["simple twin", "gradients of step 1"] == EQUAL


def test_a_rank_with_other_batches_is_named(group: Any) -> None:
    """Rank 1 draws other batches each time."""
    drawn = 0

    def make_batch(step: int, of_rank: int) -> tuple[Tensor]:
        nonlocal drawn
        drawn += 1
        shift = drawn if of_rank == torch.distributed.get_rank(group) == 1 else 0
        return ((tokens(step, of_rank)[0] + shift) % VOCABULARY,)

    report = verify(CASES["language-model"][0], make_batch, 1, group=group)
    assert report.first_failure.startswith("rank 1: loss of step 1, stage 3 against stage 0: ")


@without_warnings
def test_what_is_not_a_number_is_never_right(group: Any) -> None:
    report = verify(lambda: Rows(MLP([3, 1])), lambda s, r: (torch.full((2, 3), math.nan),), 2, group=group)
    assert report.first_failure.startswith("rank 0: loss of step 1, stage 3 against stage 0: nan and nan, nan apart")
    assert all(row.absolute == math.inf for row in report.rows if "weights" not in row.quantity)


@without_warnings
def test_replicas_leave_out_a_step_as_sharded_models_do(group: Any) -> None:
    """A gradient is infinite."""

    def make() -> nn.Module:
        model = Rows(MLP([7, 30, 1]))
        next(model.parameters()).register_hook(lambda grad: grad + math.inf)
        return model

    report = verify(make, rows(7), 2, group=group)
    assert report.ok, report.table()
    assert_equal_to_the_bit(report, {*STAGES, TWINS[0]})
    assert verdicts(report)[DDP, "gradients of step 1"] == EQUAL
    assert verdicts(report)[DDP, "weights after step 2"] == "not judged"


def test_a_gradient_that_only_one_has_is_named(group: Any) -> None:
    """The second model takes another branch than the first."""
    made = 0

    def make() -> nn.Module:
        nonlocal made
        made += 1
        model, branch = Branching(), made % 2
        take = model.forward
        model.forward = lambda x: take(x, branch) * 0
        return Rows(model)

    report = verify(make, rows(6), 1, group=group)
    name = "'model.blocks.0.choices.branch0.weight'"
    assert report.first_failure == f"rank 0: gradient of {name} in step 1: stage 0 has one, stage 3 has none"


# ---- other numbers of ranks ----------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A model whose loss depends on the number of parts run by its rank, so on the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP([6, 9, 6])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x).square().mean() * self.calls


def elastic_rows(group: Any, make: Callable[[], nn.Module], steps: int) -> list[tuple[str, str, str | None]]:
    """Body of a rank: return the rows about other numbers of ranks, which only rank 0 has."""
    options = {"lr": 1e-2, "weight_decay": 0.1, "units": None, "precision": Precision(), "seed": 0, "group": None}
    task = Task(make_model=make, make_batch=rows(6), steps=steps, **options)
    return [(row.quantity, row.verdict, row.failure) for row in _compare_elastic(task)]


def droppy() -> nn.Module:
    return Rows(nn.Sequential(MLP([6, 40, 40, 6]), nn.Dropout(0.2)))


def test_equal_bits_on_other_numbers_of_ranks_are_told(cluster):
    first, *others = cluster.run(elastic_rows, 4, droppy, 3)
    assert first == [("on 1, 2, 4 ranks", EQUAL, None), ("from 4 to 2 to 1 ranks", EQUAL, None)]
    assert others == [[], [], []]


def test_a_model_that_knows_its_number_of_ranks_is_found_out(cluster):
    (fixed, changing), _ = cluster.run(elastic_rows, 2, Counting, 2)
    assert fixed[:2] == ("on 1, 2 ranks", "BEYOND ITS BOUND")
    assert fixed[2].startswith("weight 'net.0.weight' after step 2 on 1 rank, stage 3 against itself, order='tree'")
    assert changing[:2] == ("from 2 to 1 ranks", "BEYOND ITS BOUND")


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (3, r"verify\(elastic=True\) compares powers of two of ranks, got 3 ranks"),
        (1, "requires all 2 ranks of the program; got a group of 1: use group=None"),
    ],
    indirect=["group"],
)
def test_ranks_that_cannot_be_compared_are_refused(group: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        verify(droppy, rows(6), 1, group=group, elastic=True)
