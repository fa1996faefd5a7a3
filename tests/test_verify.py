"""`verify` finds nothing where all is well, and names what was spoilt where something was."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardlite import AdamW, LayoutError, cli, launch, reduce, ring, verify
from shardlite.verification import twins
from shardlite.verification.bounds import Sum, difference, in_ulps, same_bits
from shardlite.verification.task import joined_batch
from shardlite.verification.verify import Report, Row
from tests.models import MLP, VOCABULARY, Branches, Branching, LanguageModel, MixedDtypes, Shared

ROOT = Path(__file__).parent.parent
EQUAL = "equal to the bit"


class Tokens(nn.Module):
    """How wrong a language model is, []."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Rows(nn.Module):
    """The mean square of what a model makes of rows, []."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Tensor:
        return self.model(*args).square().mean()


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


ONE, EACH, NO_FP64 = "one process, one batch", "one process, batch by batch", "one process (no fp64)"
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any], str]] = {
    "language-model": (lambda: Tokens(LanguageModel()), tokens, ONE),
    "dropout": (lambda: Tokens(LanguageModel(dropout=0.2, reentrant=False)), tokens, EACH),
    "reentrant": (lambda: Tokens(LanguageModel(reentrant=True)), tokens, ONE),
    "called-twice-or-never": (lambda: Rows(Shared()), rows(6), ONE),
    "used-on-one-rank": (lambda: Rows(Branching()), branches, EACH),
    "mixed-dtypes": (lambda: Rows(MixedDtypes()), rows(7), NO_FP64),
    "batch-norm": (lambda: Rows(normed()), rows(6), EACH),
    "uneven": (lambda: Rows(MLP([7, 30, 1])), rows(7, more=1), EACH),
    "bf16": (lambda: Rows(MLP([7, 30, 1])).bfloat16(), lambda s, r: (rows(7)(s, r)[0].bfloat16(),), ONE),
    "fp64": (lambda: Rows(MLP([7, 30, 1])).double(), lambda s, r: (rows(7)(s, r)[0].double(),), NO_FP64),
    "sparse": (lambda: Rows(sparse()), lambda s, r: (torch.randint(0, 20, (4,)),), ONE),
}


def verified(group: Any, name: str, steps: int = 3, **options: Any) -> Report:
    """Body of a rank."""
    make_model, make_batch, _ = CASES[name]
    return verify(make_model, make_batch, steps, group=group, **options)


def verdicts(report: Report) -> dict[tuple[str, str], str]:
    return {(row.opponent, row.quantity): row.verdict for row in report.rows}


# ---- all is well ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world_size"),
    [(name, w) for name in CASES for w in (2, 3)] + [("used-on-one-rank", w) for w in (1, 4)] + [("mixed-dtypes", 4)],
)
def test_all_is_equal_or_within_its_bound(cluster, name, world_size):
    reports = cluster.run(verified, world_size, name)
    assert all(report == reports[0] for report in reports)
    assert reports[0].ok, reports[0].table()
    equal_to_the_bit = {"stage 0", "twin in ring order" if world_size > 2 else "simple twin"}
    for row in reports[0].rows:
        if row.opponent in equal_to_the_bit:
            assert (row.verdict, row.absolute, row.ulps, row.share) == (EQUAL, 0, 0, 0), row
    opponents = list(dict.fromkeys(row.opponent for row in reports[0].rows))
    ring_twin = ["twin in ring order"] if world_size > 2 else []
    assert opponents[:-1] == ["stage 0", "simple twin", *ring_twin, "DistributedDataParallel"]
    if world_size > 1:
        assert opponents[-1] == CASES[name][2]


def test_units_and_hyper_parameters_are_passed_on(cluster):
    default, other = (
        cluster.run(verified, 3, "used-on-one-rank", **options)[0]
        for options in ({}, {"units": Branches, "lr": 0.5, "weight_decay": 0.3, "seed": 5})
    )
    assert default.ok
    assert other.ok
    assert default != other


def test_one_step_has_no_later_losses(cluster):
    report = cluster.run(verified, 2, "language-model", steps=1)[0]
    assert report.ok
    assert {row.quantity for row in report.rows} == {"loss of step 1", "gradients of step 1", "weights after step 1"}


def keeps_random_state(group: Any) -> bool:
    state = torch.get_rng_state()
    verified(group, "language-model", 1)
    return torch.equal(state, torch.get_rng_state())


def test_the_random_numbers_of_the_caller_stay(cluster):
    assert cluster.run(keeps_random_state, 1) == [True]


def test_what_cannot_be_done_is_said():
    with pytest.raises(LayoutError, match=r"no process group: call torch.distributed.init_process_group"):
        verify(nn.Identity, tokens)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        verify(nn.Identity, tokens, 0)


# ---- something is spoilt --------------------------------------------------------------------------------------------

SPOILT = "model.blocks.1.up.weight"


def spoilt_model(group: Any, which: int, rank: int) -> Report:
    """Body of a rank: one of the models that are made has, on one rank, a gradient that is off by a millionth."""
    made = 0

    def make() -> nn.Module:
        nonlocal made
        model = Tokens(LanguageModel())
        made += 1
        if made == which and torch.distributed.get_rank(group) == rank:
            model.get_parameter(SPOILT).register_hook(lambda grad: grad * (1 + 2**-20))
        return model

    return verify(make, tokens, 2, group=group)


IN_ORDER, DDP = "twin in ring order", "DistributedDataParallel"
MADE = ("stage 3", "stage 0", "survey", "survey in fp64", "simple twin", IN_ORDER, DDP)


@pytest.mark.parametrize(
    ("world_size", "spoilt"),
    [(2, "stage 0"), (2, "simple twin"), (2, DDP), (3, "stage 0"), (3, "simple twin"), (3, IN_ORDER), (3, DDP)],
)
def test_a_gradient_that_is_off_by_a_millionth_is_named(cluster, world_size, spoilt):
    systems = [system for system in MADE if world_size > 2 or system != IN_ORDER]
    report = cluster.run(spoilt_model, world_size, 1 + systems.index(spoilt), 1)[0]
    assert report.first_failure.startswith(f"rank 0: gradient of {SPOILT!r} in step 1, stage 3 against {spoilt}: at [")
    assert {row.opponent for row in report.rows if row.failure} == {spoilt}


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_of_ours_that_is_off_by_a_millionth_is_off_from_everything(cluster, world_size):
    reports = cluster.run(spoilt_model, world_size, 1, 1)
    assert all(report == reports[0] for report in reports)
    failed = [row for row in reports[0].rows if row.failure and row.quantity == "gradients of step 1"]
    assert {row.opponent for row in failed} == {row.opponent for row in reports[0].rows}
    assert all(
        f"gradient of {SPOILT!r} in step 1, stage 3 against {row.opponent}: at [" in row.failure for row in failed
    )


def forgets_to_divide(group: Any, stages: str) -> Report:
    """Body of a rank: sums instead of means."""

    def undivided(collective: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, divisor=1, **options: collective(*args, **options)

    with ExitStack() as patches:
        for name in stages.split():
            patches.enter_context(mock.patch.object(reduce, name, undivided(getattr(ring, name))))
        return verified(group, "language-model")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sum_that_is_not_divided_is_found(cluster, world_size):
    report = cluster.run(forgets_to_divide, world_size, "reduce_scatter")[0]
    first = "rank 0: gradient of 'model.embed.weight' in step 1, stage 3 against"
    assert report.first_failure.startswith(f"{first} stage 0: at [")
    report = cluster.run(forgets_to_divide, world_size, "reduce_scatter all_reduce")[0]
    assert report.first_failure.startswith(f"{first} simple twin: at [")
    failed = {row.opponent for row in report.rows if row.failure and row.quantity == "gradients of step 1"}
    others = {row.opponent for row in report.rows} - {"stage 0"}
    assert failed == others


def steps_otherwise(group: Any) -> Report:
    """Body of a rank: an optimizer that is not the one that was asked for."""
    with mock.patch.object(twins, "AdamW", lambda params, lr, weight_decay: AdamW(params, lr=lr, weight_decay=0)):
        return verified(group, "mixed-dtypes", 1)


def test_a_wrong_step_is_found_in_the_weights(cluster):
    report = cluster.run(steps_otherwise, 2)[0]
    assert report.first_failure.startswith(
        "rank 0: weight 'model.0.0.wide' after step 1, stage 3 against simple twin: at ["
    )
    assert verdicts(report)["simple twin", "gradients of step 1"] == EQUAL


def draws_anew(group: Any, rank: int) -> Report:
    """Body of a rank: a rank whose batches are other ones each time."""
    drawn = 0

    def make_batch(step: int, of_rank: int) -> tuple[Tensor]:
        nonlocal drawn
        drawn += 1
        shift = drawn if of_rank == torch.distributed.get_rank(group) == rank else 0
        return ((tokens(step, of_rank)[0] + shift) % VOCABULARY,)

    return verify(CASES["language-model"][0], make_batch, 2, group=group)


def test_a_rank_with_other_batches_is_named(cluster):
    for report in cluster.run(draws_anew, 3, 2):
        assert report.first_failure.startswith("rank 2: loss of step 1, stage 3 against stage 0: ")


def is_not_a_number(group: Any) -> Report:
    """Body of a rank."""
    return verify(lambda: Rows(MLP([3, 1])), lambda s, r: (torch.full((2, 3), math.nan),), 2, group=group)


def test_what_is_not_a_number_is_never_right(cluster):
    report = cluster.run(is_not_a_number, 2)[0]
    assert report.first_failure.startswith("rank 0: loss of step 1, stage 3 against stage 0: nan and nan, nan apart")
    assert all(row.absolute == math.inf for row in report.rows)


def uses_another_parameter(group: Any) -> Report:
    """Body of a rank: the second model takes another branch than the first."""
    made = 0

    def make() -> nn.Module:
        nonlocal made
        made += 1
        model, branch = Branching(), made % 2
        take = model.forward
        model.forward = lambda x: take(x, branch) * 0
        return Rows(model)

    return verify(make, rows(6), 1, group=group)


def test_a_gradient_that_only_one_has_is_named(cluster):
    report = cluster.run(uses_another_parameter, 2)[0]
    name = "'model.blocks.0.choices.branch0.weight'"
    assert report.first_failure == f"rank 0: gradient of {name} in step 1: stage 0 has one, stage 3 has none"


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_differences_and_units_of_last_place():
    ours = torch.tensor([1.0, 1.0, 0.0, -0.0, math.inf, math.nan, 1e-45, 3.0, math.inf])
    theirs = torch.tensor([1.0, 1 + 2**-23, 0.0, 0.0, math.inf, 1.0, 0.0, -3.0, 1.0])
    apart = difference(ours, theirs)
    assert apart.tolist() == [0, 2**-23, 0, 0, 0, math.inf, 2**-149, 6, math.inf]
    assert in_ulps(apart, ours, theirs).tolist() == [0, 1, 0, 0, 0, math.inf, 1, 6 * 2**22, math.inf]


@pytest.mark.parametrize(
    ("ours", "theirs", "same"), [(1.0, 1.0, True), (0.0, -0.0, False), (math.nan, math.nan, False)]
)
def test_same_bits(ours, theirs, same):
    judgement = same_bits("", torch.tensor([2.0, ours]), torch.tensor([2.0, theirs]))
    assert judgement.share == (0 if same else math.inf)
    assert same or judgement.detail.startswith("at [1] ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [3, 8, 64])
def test_the_bound_of_a_sum_holds_in_any_order_and_is_not_far_off(world_size, dtype):
    """Means of one set of gradients, added in two orders, one divided before and one after."""
    gradients = torch.randn(world_size, 4096).to(dtype)
    one, other = torch.zeros(4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    for gradient in gradients:
        one += gradient
    for gradient in gradients.flip(0):
        other += gradient * (1 / world_size)
    within = Sum(world_size, {"x": gradients.double().abs().mean(0)}).within(2 * world_size + 1)
    share = within("x", one / world_size, other).share
    assert 0.3 / world_size < share <= 1
    assert within("x", one / world_size * (1 + 8 * world_size * torch.finfo(dtype).eps), other).share > 1


def test_batches_are_joined_where_that_means_something():
    a, b, few = torch.zeros(2, 3), torch.ones(2, 3), torch.ones(1, 3)
    (joined, mode), expected = joined_batch([({"x": a}, "mode"), ({"x": b}, "mode")]), torch.cat([a, b])
    assert mode == "mode"
    assert torch.equal(joined["x"], expected)
    for left, right in [((a,), (few,)), ((a,), (b.double(),)), ((a, 1), (b, 2)), ((a,), (b, 1)), ((a,), (1,))]:
        assert joined_batch([left, right]) is None
    assert joined_batch([(torch.zeros(()),)] * 2) is None


# ---- the table and the command line ---------------------------------------------------------------------------------

OK = [
    Row(opponent="stage 0", quantity="loss of step 1"),
    Row(opponent="stage 0", quantity="gradients of step 1"),
    Row(opponent="DDP", quantity="gradients of step 1", absolute=1.5e-8, ulps=3, equal=False, share=0.251),
    Row(opponent="DDP", quantity="weights after step 2", absolute=0.01, ulps=1e6, equal=False, share=None),
]


def test_the_table_lists_every_comparison():
    assert Report(2, 2, tuple(OK)).table().splitlines() == [
        "stage 3 against                        difference   ulps",
        "stage 0          loss of step 1                 0      0  equal to the bit",
        "                 gradients of step 1            0      0  equal to the bit",
        "DDP              gradients of step 1      1.5e-08      3  within its bound (26%)",
        "                 weights after step 2        0.01  1e+06  not judged",
        "2 ranks, 2 steps: ok",
    ]
    failed = Row(opponent="DDP", quantity="x", absolute=1, ulps=2, equal=False, share=9, failure="rank 1: x")
    report = Report(1, 1, (*OK, failed))
    assert not report.ok
    assert report.first_failure == "rank 1: x"
    assert report.table().splitlines()[-2].endswith("2  BEYOND ITS BOUND")
    assert report.table().splitlines()[-1] == "1 rank, 1 step: FAILED: rank 1: x"


SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "8", "--steps", "2"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_command_compares_a_small_gpt():
    done = run("-m", "shardlite", "verify", "--ranks", "3", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "twin in ring order" in done.stdout
    assert done.stdout.splitlines()[-1] == "3 ranks, 2 steps: ok"


def test_the_command_fails_on_all_ranks_where_one_is_spoilt(tmp_path):
    script = tmp_path / "spoilt.py"
    script.write_text(
        "import os, sys\n"
        "from shardlite import AdamW, cli\nfrom shardlite.verification import twins\n"
        "if os.environ['RANK'] == '1':\n"
        "    twins.AdamW = lambda params, lr, weight_decay: AdamW(params, lr=2 * lr)\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    launcher = launch.torchrun(2, [])[1:-2]  # without `-m shardlite`
    done = run(*launcher, str(script), "verify", "--ranks", "2", *SMALL)
    assert done.returncode == 1, done.stderr
    # Rank 1's whole copy of the weights steps otherwise at stage 0, its shards at stage 3.
    assert "2 ranks, 2 steps: FAILED: rank 0: loss of step 2, stage 3 against stage 0: " in done.stdout
    assert "BEYOND ITS BOUND" in done.stdout


def test_verify_starts_itself_once_per_rank(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "launch", lambda ranks, arguments: started.append((ranks, arguments)) or 7)
    assert cli.main(["verify"]) == 7
    assert cli.main(["verify", "--ranks", "4", "--size", "demo"]) == 7
    assert started == [(2, ["verify"]), (4, ["verify", "--ranks", "4", "--size", "demo"])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks is 0; it must be at least 1"),
        (["--steps", "0"], "steps must be positive, got 0"),
        (["--heads", "5"], "multiple of twice the heads: width 64, heads 5"),
    ],
)
def test_wrong_usage_is_refused_before_any_rank_starts(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(launch, "launch", None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["verify", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
