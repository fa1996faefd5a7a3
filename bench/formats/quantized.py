"""Measure the effect of quantized gathers on the loss of a small GPT and on the bytes that its ranks send.

    python -m bench.formats.quantized --ranks 2

starts two ranks and writes `bench/results/quantized-gpt-Nranks.jsonl`, one JSON object for each seed. For each seed
there are five runs: with plain gathers, with quantized gathers, and three more runs with plain gathers to measure the
noise of a loss. Of these three, two start from weights that differ by a relative 2^-22, and one has other batches.

| key | meaning |
|---|---|
| `train_loss` | loss of each run: the mean over the last tenth of the steps and over the ranks, in nats per byte |
| `validation_loss` | loss of each run at the end, on validation text |
| `difference` | difference of the run with quantized gathers from the plain run, in both losses |
| `noise` | the larger difference of the two perturbed runs from the plain run, in both losses |
| `chance` | difference of the run on other batches from the plain run, in both losses |
| `gather_bytes_per_step`, `bytes_per_step` | bytes that a rank sends in a training step: for gathers, and in total |
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardlite import AdamW, Precision, ShardLite
from shardlite.lab.compared.gpt import GPT
from shardlite.lab.memory.machine import machine
from shardlite.lab.ranks import run_bench
from shardlite.lab.table import Row, report
from shardlite.lab.train.settings import GPTConfig
from shardlite.lab.train.text import Bytes, Corpus, draw_batch, read_corpus

CONFIG = GPTConfig(layers=3, width=96, heads=3, context=64)
BATCH = 8
LR = 2e-3
PERTURBATION = 2.0**-22
PERTURBED = ("perturbed", "perturbed again")
RUNS = ("plain", "quantized", *PERTURBED, "other batches")
LOSSES = ("train_loss", "validation_loss")

_TRAIN, _VALIDATION, _OTHER = 0, 1, 2  # entries of a batch's random key that distinguish the kinds of batches
_VALIDATION_BATCHES = 16


@dataclass(frozen=True)
class Task:
    """Settings that all runs share."""

    config: GPTConfig
    corpus: Corpus
    steps: int
    seed: int
    group: dist.ProcessGroup

    def draw(self, text: Bytes, part: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's inputs and targets of batch number `turn`, each [BATCH, context]."""
        key = (self.seed, part, self.group.rank(), turn)
        return draw_batch(text, shape=(BATCH, self.config.context), key=key)


def train(task: Task, run: str) -> Row:
    """Train once, and return losses and bytes per step. Collective."""
    model = ShardLite(_make(task, run), group=task.group, precision=Precision(quantized_gather=run == "quantized"))
    optimizer = AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share_of_lr(step / task.steps))
    part = _OTHER if run == "other batches" else _TRAIN
    losses, before = [], _sent(model)
    for step in range(task.steps):
        loss = model(*task.draw(task.corpus.train, part, step))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    gathered, everything = (round((n - b) / task.steps) for n, b in zip(_sent(model), before, strict=True))
    last = losses[-max(1, task.steps // 10) :]
    return {
        "train_loss": _mean(sum(last) / len(last), task.group),
        "validation_loss": _mean(_validate(model, task), task.group),
        "gather_bytes_per_step": gathered,
        "bytes_per_step": everything,
    }


def measure(task: Task) -> Row:
    """Train all runs of a seed, and compare them. Collective."""
    runs = {run: train(task, run) for run in RUNS}
    return {
        "bench": "quantized",
        "model": "gpt",
        "words": f"a GPT of {task.config.layers} blocks, {task.config.width} wide, on {task.corpus.source}",
        "parameters": sum(param.numel() for param in GPT(task.config).parameters()),
        "compute": "fp32",
        "optimizer": f"AdamW, lr {LR} with a warm-up and a cosine, clipped to a norm of 1",
        "ranks": task.group.size(),
        "threads": torch.get_num_threads(),
        "batch": BATCH,
        "context": task.config.context,
        "steps": task.steps,
        "seed": task.seed,
        **machine(),
        **{loss: {run: round(runs[run][loss], 6) for run in RUNS} for loss in LOSSES},
        "difference": _differences(runs, "quantized"),
        "noise": _differences(runs, *PERTURBED),
        "chance": _differences(runs, "other batches"),
        **{key: {run: runs[run][key] for run in RUNS[:2]} for key in ("gather_bytes_per_step", "bytes_per_step")},
    }


def _differences(runs: dict[str, Row], *names: str) -> Row:
    """Return the difference of each loss from the plain run. With several `names`, return the largest difference."""
    plain = runs["plain"]
    found = {loss: [runs[name][loss] - plain[loss] for name in names] for loss in LOSSES}
    return {loss: round(max(differences, key=abs), 6) for loss, differences in found.items()}


@torch.no_grad()
def _make(task: Task, run: str) -> GPT:
    torch.manual_seed(task.seed)
    model = GPT(task.config)
    if run in PERTURBED:
        chance = torch.Generator().manual_seed(RUNS.index(run))
        for param in model.parameters():
            sign = torch.randint(0, 2, param.shape, generator=chance) * 2 - 1
            param.mul_(1 + PERTURBATION * sign)
    return model


def _share_of_lr(progress: float) -> float:
    """Return the factor of the learning rate: a warm-up of a twentieth of the steps, then a cosine decay."""
    return min(progress * 20 + 0.01, 0.55 + 0.45 * math.cos(math.pi * min(progress, 1.0)))


@torch.no_grad()
def _validate(model: ShardLite, task: Task) -> float:
    batches = [task.draw(task.corpus.validation, _VALIDATION, turn) for turn in range(_VALIDATION_BATCHES)]
    return sum(model(*batch).item() for batch in batches) / len(batches)


def _sent(model: ShardLite) -> tuple[int, int]:
    """Return the bytes that this rank has sent for gathers, and in total."""
    purposes = [item for by_purpose in model.traffic().values() for item in by_purpose.items()]
    gathered = sum(sent.nbytes for purpose, sent in purposes if purpose in ("gather", "take part"))
    return gathered, sum(sent.nbytes for _, sent in purposes)


def _mean(value: float, group: dist.ProcessGroup) -> float:
    mean = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(mean, group=group)
    return float(mean) / group.size()


def _run_rank(options: argparse.Namespace, group: dist.ProcessGroup) -> None:
    """Measure as one of the ranks."""
    corpus = read_corpus(None, context=CONFIG.context)
    rows = [measure(Task(CONFIG, corpus, options.steps, seed, group)) for seed in range(options.seeds)]
    if group.rank() == 0:
        report(rows, options.out / f"quantized-gpt-{group.size()}ranks.jsonl")


def main(arguments: list[str]) -> int:
    """Start the ranks, or measure if a launcher started this process as a rank. Return the exit status."""
    return run_bench("bench.formats.quantized", arguments, _run_rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
