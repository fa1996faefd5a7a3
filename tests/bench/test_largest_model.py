"""The search finds the largest model that fits, and a trial of each system reports correctly whether a model fits."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # where the script finds what it compares

import largest_model as example
from largest_systems import BASE, SYSTEMS, Shape

from shardlite.cli.launch import process_group
from tests.support.ranks.scripts import launched

MB = 10**6
STANDARD = "ShardLite"
TRIAL = example.Trial(STANDARD, 12 * MB // 10, 60 * MB)
PARAMETERS = Shape.near(TRIAL.size).parameters()


# ---- the search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 7, 99, 100, 101, 640, 998])
def test_the_largest_fits_and_the_next_does_not(limit):
    assert example.bisect(lambda size: size <= limit, first=100, most=1000, within=0.0) == (limit, limit + 1)


def trial_of(bytes_per_parameter, calls=None):
    """A system that takes this many bytes per parameter."""

    def run(trial, ranks):
        if calls is not None:
            calls.append(trial)
        peak = int(bytes_per_parameter * Shape.near(trial.size).parameters() / ranks)
        return example.Outcome(fits=peak <= trial.budget, peak=peak, losses=(5.0, 4.0, 3.0))

    return run


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("need", [5.5, 16.4, 40])
def test_a_row_says_what_fits_and_what_does_not(need, ranks):
    budget = 1000 * MB
    row = example.largest(STANDARD, budget, ranks, 0.02, trial_of(need))
    assert row["parameters"] * need <= ranks * budget < row["too_many_parameters"] * need
    assert 1 < row["too_many_parameters"] / row["parameters"] < 1.025
    assert row["bytes_per_parameter"] == pytest.approx(need, abs=1e-3)
    assert row["peak_bytes"] <= budget
    assert row["error"] is None


def test_an_error_ends_the_search_and_is_told():
    calls = []

    def run(trial, ranks):
        calls.append(trial)
        return example.Outcome(error="TypeError: no such thing")

    row = example.largest(STANDARD, MB, 1, 0.02, run)
    assert (row["error"], row["parameters"], len(calls)) == ("TypeError: no such thing", None, 1)
    assert example.largest(STANDARD, MB, 1, 0.02, trial_of(1e9))["error"] == "not even the smallest model fits"


# ---- the family -----------------------------------------------------------------------------------------------------


# ---- trials ---------------------------------------------------------------------------------------------------------


def attempts(group, trial):
    """Body of a rank: run a trial in this process, without the last step."""
    with (
        mock.patch.object(example, "STEPS", 2),
        launched(group, ["largest_model.py"], Path.cwd(), "error"),
        process_group() as device,
    ):
        return example.attempt(trial, device)


@pytest.fixture(scope="module")
def outcome_of(cluster):
    """Return a function that tries a system on one rank, once."""
    return cache(lambda system: cluster.run(attempts, 1, replace(TRIAL, system=system))[0])


@pytest.mark.parametrize("system", list(SYSTEMS))
@pytest.mark.sample(2)
def test_every_system_trains_and_begins_alike(system, outcome_of):
    outcome, base, standard = map(outcome_of, (system, BASE, STANDARD))
    assert outcome.fits, outcome.error
    # All compute in bf16, with weights that are drawn alike; split ones are rounded twice on the way to bf16, so that a
    # few of them (next to the middle of two bf16 numbers, one in 2^9) are a unit away.
    tolerance = 2**-9 if "split24" in system else 0
    assert outcome.losses[0] == pytest.approx(base.losses[0], rel=tolerance, abs=0)
    if system in (BASE, STANDARD):
        assert outcome.losses == base.losses
        assert 16 < outcome.peak / PARAMETERS < 20  # weights, gradients and two moments in fp32
    else:
        assert outcome.peak < standard.peak


def test_what_is_too_large_does_not_fit_and_is_no_error(cluster):
    (outcome,) = cluster.run(attempts, 1, replace(TRIAL, budget=12 * MB))
    assert not outcome.fits
    assert outcome.error is None


@pytest.mark.parametrize("system", [pytest.param(BASE, marks=pytest.mark.slow), STANDARD])
def test_two_ranks_hold_half_each(system, cluster):
    for outcome in cluster.run(attempts, 2, replace(TRIAL, system=system, budget=18 * MB)):
        assert outcome.fits, outcome.error
        assert 16 < 2 * outcome.peak / PARAMETERS < 28


@pytest.mark.parametrize("losses", [[5.0, float("nan"), 4.0], [5.0, 4.0, 5.0]])
def test_who_does_not_learn_is_not_believed(losses):
    assert "the loss does not fall: 5.0000" in example.judged(losses, 1).error


# ---- the command ----------------------------------------------------------------------------------------------------
