"""Scaling is measured on the stated batches, and simulated from measurements on one and two ranks."""

import pytest
import torch

from bench.scale import run, simulated
from shardlite.lab.compared.workloads import WORKLOADS
from shardlite.lab.memory.machine import machine

TINY = WORKLOADS["tiny"]


def measured(ranks, mode, ms):
    return {
        "bench": "scale",
        "kind": "measured",
        "cluster": simulated.HERE,
        "mode": mode,
        "ranks": ranks,
        "model": "tiny",
        "words": TINY.words,
        "rounds": 3,
        "ms_p50": ms,
        "per_second": 4e3 * (ranks if mode == "weak" else 1) / ms,
        "item": "samples",
        **machine(),
    }


def test_strong_scaling_divides_the_batch():
    half = run.divided(TINY, 2)
    assert half.items == 2
    assert half.terms == TINY.terms // 2
    assert half.batch(0, 1)[0].equal(TINY.batch(0, 1)[0][:2])
    with pytest.raises(ValueError, match="a batch of 4 cannot be divided among 3 ranks"):
        run.divided(TINY, 3)


def test_both_modes_are_verified_and_timed(group):
    torch.set_num_threads(1)
    found = run.measure(TINY, 1, group)
    assert [(row["mode"], row["ranks"]) for row in found] == [("weak", 2), ("strong", 2)]
    for row in found:
        items = 2 * 4 if row["mode"] == "weak" else 4
        assert row["per_second"] == pytest.approx(items / row["ms_p50"] * 1e3, rel=0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "4"], "must include 1 and 2"),
        (["--ranks", "1", "2", "3"], "a batch of 8 cannot be divided among 3 ranks"),
        (["--planned", "gpt5"], "'gpt5' is neither a preset"),
        (["--steps", "0"], "must be at least 1"),
    ],
)
def test_what_cannot_end_well_is_not_begun(options, words, refusal):
    assert words in refusal(run.main, options)
