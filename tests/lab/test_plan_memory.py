"""Compare the memory that a plan predicts for a rank with training ranks: exact where possible, and the peak."""

import gc
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from shardlite_kernels import chunk_memory
from torch import nn

from shardlite import AdamW, Precision, ShardLite
from shardlite.grads.backward_run import HostRun
from shardlite.lab.compared.gpt import GPT
from shardlite.lab.compared.workloads import WithLoss
from shardlite.lab.train.settings import SIZES, GPTConfig
from shardlite.plan import Planner, Setting, Source
from shardlite.telemetry import Meter
from shardlite.wrapping.validate import STAGES
from tests.kernels.all_pairs import all_pairs
from tests.support.patience import passes_over

BF16 = Precision(compute=torch.bfloat16)
SPLIT = Precision(compute=torch.bfloat16, master="split24")


def gpt2(**sizes: int) -> nn.Module:
    """Return GPT-2 small from transformers, or a model of other sizes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return WithLoss(GPT2LMHeadModel(GPT2Config(loss_type="ForCausalLM", **sizes)))


def llama(**sizes: int) -> nn.Module:
    """Return a small Llama of transformers: eight heads that share four keys, embedding and head apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
    return WithLoss(LlamaForCausalLM(LlamaConfig(**heads | sizes)))


def decoder(kind: str, **sizes: int) -> nn.Module:
    """Return a model of the same architecture that requires no other package."""
    return GPT(GPTConfig(kind=kind, vocabulary=500, context=64, source="ours", **sizes))


SMALL = {
    "small demo": partial(GPT, SIZES["tiny"]),
    "small gpt2": partial(decoder, "gpt2", layers=1, width=768, heads=12),
    "small llama": partial(decoder, "llama", layers=3, width=128, heads=8, kv_heads=4, hidden=344),
}
LARGE = {
    "demo": partial(GPT, GPTConfig()),
    "GPT-2, one block": partial(gpt2, n_layer=1, vocab_size=500, n_positions=64),
    "Llama": partial(llama, hidden_size=128, intermediate_size=344, num_hidden_layers=3, vocab_size=500),
}
MODELS = {**SMALL, **LARGE, "GPT-2 small": gpt2}
FORMATS = {
    "fp32": {},
    "in_backward": {"in_backward": True},
    "bf16": {"precision": BF16},
    "bf16 moments": {"precision": BF16, "state": "bf16"},
    "int8": {"precision": BF16, "state": "int8"},
    "split24": {"precision": SPLIT},
    "compact": {"precision": SPLIT, "state": "int8", "in_backward": True},
}
LATE, PROMPT = "late", "prompt"


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 16, dtype=torch.long), torch.ones(1, 16, dtype=torch.long)


_planners: dict[str, Planner] = {}


def planner_of(name: str) -> Planner:
    """Return the planner of a model; a step of it is traced once for all tests."""
    if name not in _planners:
        _planners[name] = Planner(Source(name, MODELS[name], tokens, "batch 1 x 16"))
    return _planners[name]


def tensors() -> int:
    """Bytes in all tensors but those for chunks of a step, which earlier tests may have left."""
    gc.collect()
    with Meter() as meter:
        return meter.live - sum(each.nbytes for each in chunk_memory())


def pin_reductions(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Let every reduction end as late as it can, or before the next gradient."""
    start = HostRun._start

    def wait(self, *unit, **how):
        start(self, *unit, **how)
        self.started[-1].work.wait()

    if ends == LATE:
        monkeypatch.setattr(HostRun, "_land_finished", lambda self: None)
    else:
        monkeypatch.setattr(HostRun, "_start", wait)


def train(group, name: str, setting: Setting, ends: str) -> tuple[int, dict[str, int], dict[str, int], dict[str, int]]:
    """Return peak, and of `memory()` what is held after a backward, peaks in a step; and what a step sends."""
    before = tensors()
    torch.manual_seed(0)
    model = ShardLite(
        MODELS[name](), stage=setting.stage, precision=setting.precision, prefetch=setting.prefetch, group=group
    )
    optimizer = AdamW(model.parameters(), state=setting.state, in_backward=setting.in_backward)
    batch = tokens()

    def backward() -> None:
        for left in reversed(range(setting.accumulate)):
            with model.no_sync(sharded=setting.sharded) if left else nullcontext():
                loss = model(*batch)
                torch.autograd.backward(loss)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    with pytest.MonkeyPatch.context() as patch:
        pin_reductions(patch, ends)
        for _ in range(2):
            backward()
            update()
        gc.collect()
        model.ledger.reset_peak()
        sent = sent_by(model)
        with Meter() as meter:
            backward()
            chunks = sum(each.nbytes for each in chunk_memory())
            after = {purpose: held.now for purpose, held in model.memory().items()}
            update()
        peaks = {purpose: held.peak for purpose, held in model.memory().items()}
    sent = {purpose: nbytes - sent[purpose] for purpose, nbytes in sent_by(model).items()}
    if setting.stage == 3 and setting.world_size > 1:
        passes_over(model)  # their ends run on a queue, which holds the shards until all ranks are there
    return meter.peak - before - chunks, after, peaks, sent


def sent_by(model: ShardLite) -> dict[str, int]:
    units = [purposes for unit, purposes in model.traffic().items() if unit in model.unit_names]
    sent = {
        name: sum(each[name].nbytes for each in units if name in each) for name in ("gather", "take part", "reduce")
    }
    return {"gather": sent["gather"] + sent["take part"], "reduce": sent["reduce"]}


def check(cluster, name: str, setting: Setting, ends: str) -> None:
    plan = planner_of(name).plan(setting)
    peak, after, peaks, sent = cluster.run(train, setting.world_size, name, setting, ends)[0]
    budget = plan.budget
    for purpose in ("parameters", "optimizer state", "buffers"):
        assert after.get(purpose, 0) == budget.held[purpose], purpose
    expected = (plan.peak if ends == LATE else plan.at_least) - budget.held["chunks of a step"]
    assert peak == pytest.approx(expected, rel=0.02)
    if setting.world_size > 1:
        assert after.get("gradients", 0) == sum(flat.mean or flat.bucket for u in budget.units for flat in u.flats) * (
            not setting.in_backward
        )
        assert sent == {"gather": plan.sent_by_gathers, "reduce": plan.sent_by_reductions}
        assert peaks.get("gather buffers", 0) == plan.timeline.most["gather buffers"]
        if ends == LATE and setting.stage >= 2:
            assert peaks["gradient buckets"] == plan.timeline.most["gradient buckets"]


GRID = ("name", "how", "stage", "ranks")
RANKS = (1, 2, 3, 4)


def pairs(names: Iterable[str]) -> list[Any]:
    """Return cases of the grid in which each value meets each of another factor."""
    return [case for case in all_pairs(names, FORMATS, STAGES, RANKS) if not case.marks]


def check_case(cluster, name: str, how: str, stage: int, ranks: int) -> None:
    """Check one case of the grid. Reductions end late in every other one."""
    if name not in SMALL and name != "demo":
        pytest.importorskip("transformers", reason="needs transformers: `make test-all` installs it")
    ends = (LATE, PROMPT)[(stage + ranks) % 2]
    check(cluster, name, Setting(stage=stage, world_size=ranks, on_gpu=False, **FORMATS[how]), ends)


@pytest.mark.parametrize(GRID, pairs(SMALL))
def test_a_rank_holds_and_sends_what_is_planned(cluster, name, how, stage, ranks):
    check_case(cluster, name, how, stage, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(GRID, pairs(["small llama"]))
def test_every_format_at_every_stage(cluster, name, how, stage, ranks):
    check_case(cluster, name, how, stage, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(GRID, [*pairs(LARGE), ("GPT-2 small", "compact", 3, 2)])
def test_large_models(cluster, name, how, stage, ranks):
    check_case(cluster, name, how, stage, ranks)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("name", "stage", "ranks", "how", "accumulate"),
    [
        ("small gpt2", 3, 2, "fp32", 4),
        ("small llama", 3, 4, "bf16", 3),
        ("small gpt2", 2, 2, "fp32", 3),
        ("small llama", 2, 2, "split24", 2),
        ("small gpt2", 1, 2, "fp32", 3),
        ("small llama", 0, 2, "bf16", 3),
    ],
)
def test_accumulated_micro_batches(cluster, name, stage, ranks, how, accumulate, sharded):
    setting = Setting(stage=stage, world_size=ranks, on_gpu=False, accumulate=accumulate, sharded=sharded)
    check(cluster, name, replace(setting, **FORMATS[how]), (LATE, PROMPT)[accumulate % 2])


@pytest.mark.parametrize("how", ["fp32", "bf16"])
def test_accumulated_micro_batches_of_one_rank(cluster, how):
    check(cluster, "small gpt2", Setting(on_gpu=False, accumulate=3, **FORMATS[how]), LATE)
