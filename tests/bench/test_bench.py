"""The benches run, their rows are complete, and a system with wrong results is not timed."""

from dataclasses import replace
from functools import partial

import pytest

from bench import step
from shardlite.lab.compared.check import ResultError, verify
from shardlite.lab.compared.matrix import Setting, settings, systems_in
from shardlite.lab.compared.systems import SYSTEMS, build_ddp
from shardlite.lab.compared.trainer import Trainer
from shardlite.lab.compared.workloads import gpt, perceptrons
from shardlite.lab.table import read_rows, render
from shardlite.lab.train.settings import GPTConfig
from tests.support.ranks.scripts import run_command

TINY = perceptrons("tiny", blocks=2, width=32, batch=4)
TINY_GPT = gpt("tiny gpt", GPTConfig(layers=2, width=32, heads=2, context=8), batch=2)
KEYS = set(
    """
    bench model words parameters units optimizer precision accumulation clip
    ranks threads transport rounds machine torch python date per_second item
    system tolerance_used ms_p20 ms_p50 ms_p80 cpu_ms_p50 ms_above_floor above_floor_vs_fsdp2 ms_vs_ddp
    peak_bytes activation_bytes held_vs_fsdp2
    """.split()  # noqa: SIM905
)


OPTIONS = ["--ranks", "2", "--model", "tiny", "--steps", "2", "--systems", *SYSTEMS, "--out"]


def assert_complete(rows):
    assert [row["system"] for row in rows] == list(SYSTEMS)
    assert all(set(row) == KEYS for row in rows)
    assert all(row["tolerance_used"] <= 1 for row in rows)
    assert [row["held_vs_fsdp2"] is None for row in rows] == [row["system"] == "floor" for row in rows]


def assert_prints_what_it_writes(out, folder):
    rows = read_rows(folder.glob("*.jsonl"))
    assert_complete(rows)
    for row in rows:
        assert row["per_second"] == pytest.approx(2 * 4 / row["ms_p50"] * 1e3, rel=0.02)
    assert render(rows) in out


def test_the_command_has_a_row_for_each_system(cluster, tmp_path):
    first, second = run_command(cluster, step.main, *OPTIONS, tmp_path)
    assert first.status == second.status == 0
    assert second.out == ""
    assert_prints_what_it_writes(first.out, tmp_path)
    ddp = next(row for row in read_rows(tmp_path.glob("*.jsonl")) if row["system"] == "ddp")
    state = 16 * ddp["parameters"]  # weights, gradients (its buckets) and two moments in fp32
    assert state <= ddp["peak_bytes"] - ddp["activation_bytes"] <= 1.5 * state


@pytest.mark.parametrize("wrong", ["learning rate", "gradient scale", "a parameter that is not stepped"])
def test_a_wrong_system_is_found_on_every_rank(group, wrong):
    systems = {"ddp": build_ddp, "wrong": lambda workload, group: _build_wrong(workload, group, wrong)}
    with pytest.raises(ResultError, match="wrong on tiny is"):
        verify(TINY, systems, group)


def _build_wrong(workload, group, wrong):
    trainer = build_ddp(workload, group)
    if wrong == "learning rate":
        trainer.optimizer.param_groups[0]["lr"] *= 1.001
    elif wrong == "gradient scale":
        trainer.model.register_comm_hook(group, _sum)
    else:
        trainer.optimizer.param_groups[0]["params"].pop()
    return trainer


def _sum(group, bucket):
    """A reduction that forgets to divide by the number of ranks: AdamW's steps hardly differ."""
    work = group.allreduce([bucket.buffer()])
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize("wrong", ["micro-batches that are not averaged", "a norm of this rank", "no clipping"])
def test_a_wrong_setting_is_found_on_every_rank(group, wrong):
    setting = Setting("fp32", 2, 0.01)
    ddp = setting.build(build_ddp)
    systems = {"ddp": ddp, "wrong": lambda *given: _WRONG[wrong](ddp(*given))}
    with pytest.raises(ResultError):
        verify(setting.workload(TINY), systems, group, setting)


class _NotAveraged(Trainer):
    def _backward(self, batch, parts):
        return super()._backward(batch, 1) / parts


class _OwnNorm(Trainer):
    def clip(self, max_norm):
        return super().clip(max_norm) * 0.5**0.5  # of half of the elements


def _as(kind, trainer):
    return kind(**vars(trainer))


_WRONG = {
    "micro-batches that are not averaged": partial(_as, _NotAveraged),
    "a norm of this rank": partial(_as, _OwnNorm),
    "no clipping": lambda trainer: replace(trainer, max_norm=None),
}

CHOSEN = ["ddp", "zero", "fsdp2", "stage3", "split24"]
SETTING = ["--precision", "bf16", "--accumulation", "2", "--clip", "0.1"]


def test_a_setting_is_verified_and_stands_in_its_rows(cluster, tmp_path):
    arguments = ["--model", "tiny", "--steps", "1", *SETTING, "--systems", *CHOSEN, "in_backward", "--out", tmp_path]
    first, _ = run_command(cluster, step.main, *arguments)
    assert first.status == 0
    assert "not supported by: in_backward" in first.err
    rows = read_rows(tmp_path.glob("*.jsonl"))
    assert [row["system"] for row in rows] == CHOSEN
    for row in rows:
        assert (row["precision"], row["accumulation"], row["clip"]) == ("bf16", 2, 0.1)
        assert 0 < row["tolerance_used"] <= 1
    table = render(rows)
    assert "in each of 2 micro-batches" in table
    assert "computing in bf16" in table
    assert "clipping to 0.1" in table
    assert "| samples/s |" in table


@pytest.mark.slow
@pytest.mark.ranks(1, 2)
def test_all_systems_pass_in_all_settings(group):
    found = {}
    for setting in settings(["fp32", "bf16"], [1, 4], [None, 1.0]):
        shares = verify(setting.workload(TINY_GPT), systems_in(setting), group, setting)
        found |= {f"{name}, {setting.words}": share for name, share in shares.items()}
    assert max(found.values()) <= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--systems", "floor", "stage3"], "--systems must include ddp"),
        (["--accumulation", "0"], "must be at least 1"),
        (["--clip", "0"], "must be none or a positive norm"),
    ],
)
def test_bad_options_are_refused(options, words, refusal):
    assert words in refusal(step.main, options)
