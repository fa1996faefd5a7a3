"""Measure the effect of AdamW's state formats on the loss of a small GPT after 1000 steps.

    python -m bench.formats.states

writes `bench/results/formats-gpt.jsonl`, one JSON object for each run. All runs have the same batches and use
`ShardLite` on one rank. Runs whose state is in fp32 are called exact, and measure the noise of a loss: some start from
weights that differ by a relative 2^-22, others from weights of another seed.

A format passes if its loss differs by at most `chance` from the loss of the exact run with the same initial weights.
`chance` is the standard deviation of the losses of exact runs with different seeds. The root mean square difference of
two such runs is `sqrt(2)` standard deviations, and half of all pairs differ by more than `chance`. To detect such a
difference between two formats, 16 runs of each would be needed (two-sided, 5 %, power 80 %: `2 * (1.96 + 0.84)^2`).

The effect of a difference of 2^-22 (`rounding`) would not be a suitable limit. Training is so stable that such a
difference of the initial weights vanishes. But a format with fewer bits changes each step by a thousandth or more.

To show that the test detects errors, the run `bf16 weights` rounds the master weights to the nearest bf16 number after
each step. Its loss must differ by more than `chance`.

The number in the name of a run is the seed of its initial weights.

| key | meaning |
|---|---|
| `loss` | mean loss over the last tenth of the steps, in nats per byte |
| `difference` | difference from the exact run with the same initial weights |
| `chance` | standard deviation of the losses of exact runs with different seeds |
| `of_chance` | magnitude of `difference` divided by `chance` |
| `rounding` | largest difference from the exact run, among exact runs whose initial weights differ by 2^-22 |
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from shardlite import AdamW, Precision, ShardLite
from shardlite.lab.compared.gpt import GPT
from shardlite.lab.memory.machine import machine
from shardlite.lab.ranks import default_group, parser_of
from shardlite.lab.table import Row, report
from shardlite.lab.train.settings import GPTConfig
from shardlite.lab.train.text import Corpus, draw_batch, read_corpus

CONFIG = GPTConfig(layers=1, width=64, heads=2, context=32)
BATCH = 8
STEPS = 1000
LR = 2e-3  # at 1e-2, training is unstable: losses differ by 1e-2 if initial weights differ by 2^-22
BETAS = (0.9, 0.999)
PERTURBATION = 2.0**-22
_WARM_UP = 50


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of one run."""

    state: str = "fp32"
    """Format of the moments."""

    split: bool = False
    """Whether to compute in bf16 with split weights, and to step these weights in the backward."""

    seed: int = 0
    """Seed of the initial weights."""

    perturbed: int = 0
    """Seed of the perturbation of the initial weights; 0 for no perturbation."""

    rounds_weights: bool = False
    """Whether to round the master weights to bf16 after each step."""


SEEDS = 4
FORMATS = {
    "bf16 moments": Training(state="bf16"),
    "int8 moments": Training(state="int8"),
    "split24 weights, int8 moments, in the backward": Training(state="int8", split=True),
}
EXACT = {f"exact {seed}": Training(seed=seed) for seed in range(SEEDS)}
"""Runs that measure `chance`, one for each seed."""

PERTURBED = {f"exact 0 * (1 +- 2^-22), {n}": Training(perturbed=n) for n in (1, 2, 3)}
CONTROL = {"bf16 weights 0": Training(rounds_weights=True)}


def formats(seeds: int) -> dict[str, Training]:
    """Return a training for each format and seed."""
    return {f"{name} {n}": replace(training, seed=n) for name, training in FORMATS.items() for n in range(seeds)}


def train(training: Training, corpus: Corpus, group: dist.ProcessGroup, steps: int = STEPS) -> float:
    """Return the mean loss over the last tenth of the steps, in nats per byte."""
    precision = Precision(compute=torch.bfloat16, master="split24") if training.split else Precision()
    model = ShardLite(_make(training), precision=precision, group=group)
    optimizer = AdamW(model.parameters(), lr=LR, betas=BETAS, state=training.state, in_backward=training.split)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / _WARM_UP, 1 - step / steps))
    losses = []
    for step in range(steps):
        x, y = draw_batch(corpus.train, shape=(BATCH, CONFIG.context), key=(step,))
        logits: Tensor = model(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())  # in fp32, even if logits are bf16
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if training.rounds_weights:
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(param.bfloat16())
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def measure(group: dist.ProcessGroup, trainings: Mapping[str, Training], steps: int = STEPS) -> list[Row]:
    """Run `trainings`, which must include `EXACT`, and return a row for each training."""
    corpus = read_corpus(None, context=CONFIG.context)
    losses = {name: train(training, corpus, group, steps) for name, training in trainings.items()}
    exact = [losses[name] for name in EXACT]
    common = {**_common(corpus, steps), "chance": torch.tensor(exact, dtype=torch.float64).std().item()}
    common["rounding"] = max((abs(losses[name] - exact[0]) for name in PERTURBED if name in losses), default=None)
    rows = []
    for name, loss in losses.items():
        difference = loss - exact[trainings[name].seed]
        compared = {"difference": difference, "of_chance": abs(difference) / common["chance"]}
        rows.append({**common, "run": name, "loss": loss, **compared})
    return rows


def summary(rows: Sequence[Row]) -> str:
    """Return the paragraph of `kernels/README.md` that summarizes the rows."""
    first, weights = rows[0], len(EXACT)
    worst = max((row for row in rows if row["run"] in formats(weights)), key=lambda row: row["of_chance"])
    control = next(row for row in rows if row["run"] in CONTROL)
    off, control_off, chance = f"{worst['of_chance']:.2f}", f"{control['of_chance']:.1f}", f"{first['chance']:.3f}"
    return (
        f"**Quality.** A small GPT was trained for {first['steps']} steps, from {weights} different initial weights "
        f"per format (`bench.formats.states`).\nDifferent initial weights change the loss by {chance} nats per byte. "
        f"Narrow formats change the loss by at most {off} of this\n"
        f"difference, and weights in bf16 alone by {control_off} of it."
    )


def _common(corpus: Corpus, steps: int) -> Row:
    """Return the keys that all rows share."""
    return {
        "bench": "formats",
        "model": "gpt",
        "words": f"a GPT of {CONFIG.layers} block, {CONFIG.width} wide, on {corpus.source}",
        "parameters": sum(param.numel() for param in GPT(CONFIG).parameters()),
        "optimizer": f"AdamW, lr {LR} with a warm-up and a decay to zero, betas {BETAS}",
        "ranks": 1,
        "threads": torch.get_num_threads(),
        "batch": BATCH,
        "context": CONFIG.context,
        "steps": steps,
        **machine(),
    }


@torch.no_grad()
def _make(training: Training) -> GPT:
    torch.manual_seed(training.seed)
    model = GPT(CONFIG)
    if training.perturbed:
        chance = torch.Generator().manual_seed(training.perturbed)
        for param in model.parameters():
            sign = torch.randint(0, 2, param.shape, generator=chance) * 2 - 1
            param.mul_(1 + PERTURBATION * sign)
    return model


def main(arguments: list[str]) -> int:
    """Measure on one rank and one thread."""
    options = parser_of("bench.formats.states").parse_args(arguments)
    torch.set_num_threads(1)
    with default_group("gloo", store=dist.HashStore(), rank=0, world_size=1) as group:
        rows = measure(group, {**EXACT, **PERTURBED, **formats(SEEDS), **CONTROL}, options.steps)
    report(rows, options.out / "formats-gpt.jsonl")
    print(f"\n{summary(rows)}")
    print(f"\nchance {rows[0]['chance']:.2g}, rounding {rows[0]['rounding']:.2g} nats per byte")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
