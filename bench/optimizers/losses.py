"""Train the GPT of `shardlite train` with AdamW and with Muon, and compare the validation losses.

    python -m bench.optimizers.losses --ranks 2

starts two ranks, which train at stage 3 with the optimizers of `shardlite train --optimizer`. Both optimizers are
tuned over the same learning rates, `GRID`. Each is then trained with its best rate and the other seeds. Rows go to
`bench/results/optimizers-losses.jsonl`, and the picture to `docs/optimizers-losses.png`. With `--out FOLDER`, both go
to that folder. A row has:

| key | meaning |
|---|---|
| `optimizer`, `lr`, `seed` | the optimizer, its peak learning rate, and the seed of weights and batches |
| `validated` | numbers of steps after which the model was validated |
| `losses` | validation losses after these steps, in nats per byte |

The exit status is 1 if Muon does not reach AdamW's final loss in fewer steps.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.strategies.problem import CONFIG, corpus
from shardlite import ShardLite
from shardlite.lab.compared.gpt import GPT
from shardlite.lab.memory.machine import machine
from shardlite.lab.plots import COLOURS, draw_curves, new_figure, save
from shardlite.lab.ranks import run_bench
from shardlite.lab.table import RESULTS, Row, markdown_table, report, where
from shardlite.lab.train.optimizers import make_optimizer
from shardlite.lab.train.settings import Settings
from shardlite.lab.train.text import Bytes, draw_sequences
from shardlite.lab.train.train import MAX_NORM, learning_rate

GRID = (2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
"""Peak learning rates."""

SEEDS = (0, 1)
"""The first seed is that of the grid."""

BATCH = 16
"""Sequences in a global batch."""

PICTURES = Path(__file__).parents[2] / "docs"

_VALIDATED = 128  # sequences
_TRAIN, _VALIDATION = 0, 1  # numbers that stand for the two parts of the text in the keys of sequences
_NAMES = {"adamw": "AdamW", "muon": "Muon"}


# ---- training -------------------------------------------------------------------------------------------------------


def train(optimizer: str, lr: float, seed: int, steps: int, every: int) -> Row:
    """Train a model, and validate it every `every` steps. Return the row. Collective."""
    settings = Settings(gpt=CONFIG, optimizer=optimizer, lr=lr, seed=seed, steps=steps)
    torch.manual_seed(seed)
    model = ShardLite(GPT(CONFIG), stage=settings.stage)
    made = make_optimizer(model, settings)
    losses: dict[int, float] = {}
    for step in range(steps):
        for group in made.param_groups:
            group["lr"] = learning_rate(settings, step)
        _loss(model, corpus().train, (seed, _TRAIN), step * BATCH, BATCH).backward()
        model.clip_grad_norm_(MAX_NORM)
        made.step()
        made.zero_grad()
        if (step + 1) % every == 0:
            losses[step + 1] = _validate(model)
    row = {"bench": "optimizers-losses", "optimizer": optimizer, "lr": lr, "seed": seed, "steps": steps}
    return {**row, "validated": [*losses], "losses": [round(loss, 4) for loss in losses.values()]}


def _loss(model: nn.Module, text: Bytes, key: tuple[int, int], first: int, count: int) -> Tensor:
    """Return the mean loss of this rank's share of `count` sequences from number `first` on."""
    share = count // dist.get_world_size()
    mine = first + dist.get_rank() * share
    loss: Tensor = model(*draw_sequences(text, CONFIG.context, [(*key, n) for n in range(mine, mine + share)]))
    return loss


@torch.no_grad()
def _validate(model: nn.Module) -> float:
    """Return the mean loss on the same validation sequences for every run."""
    total = _loss(model, corpus().validation, (SEEDS[0], _VALIDATION), 0, _VALIDATED).double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def tune(say: Callable[[str], None], steps: int, every: int) -> list[Row]:
    """Train both optimizers with all rates and, with the best rate of each, all seeds. Return the rows. Collective."""
    rows: list[Row] = []

    def add(optimizer: str, lr: float, seed: int) -> None:
        rows.append(train(optimizer, lr, seed, steps, every))
        say(f"{_NAMES[optimizer]}, rate {lr:g}, seed {seed}: {rows[-1]['losses'][-1]:.3f} nats per byte")

    for optimizer in _NAMES:
        for lr in GRID:
            add(optimizer, lr, SEEDS[0])
        best = best_rate(rows, optimizer)
        for seed in SEEDS[1:]:
            add(optimizer, best, seed)
    common = {"batch": BATCH, "words": words(), "ranks": dist.get_world_size(), "threads": torch.get_num_threads()}
    return [row | common | machine() for row in rows]


def words() -> str:
    """Return a description of model, data and schedule."""
    parameters = sum(param.numel() for param in GPT(CONFIG).parameters())
    return (
        f"GPT of {CONFIG.layers} blocks of width {CONFIG.width}, {parameters:,} parameters in fp32, global batch "
        f"{BATCH} x {CONFIG.context} bytes of Python's standard library, warm-up and cosine, weight decay 0.1"
    )


# ---- results --------------------------------------------------------------------------------------------------------


def best_rate(rows: Sequence[Row], optimizer: str) -> float:
    """Return the learning rate with the lowest final loss of an optimizer. A diverged run is never the best."""
    tuned = [row for row in rows if row["optimizer"] == optimizer and row["seed"] == SEEDS[0]]
    best: float = min(tuned, key=lambda row: (math.isnan(row["losses"][-1]), row["losses"][-1]))["lr"]
    return best


class Comparison(NamedTuple):
    """The best runs of both optimizers."""

    rates: Mapping[str, float]
    validated: Sequence[int]
    curves: Mapping[str, Sequence[float]]
    """Validation losses of each optimizer with its best rate, the mean over the seeds."""

    crossed: int | None
    """Number of steps after which Muon's loss is at most AdamW's final loss."""


def compare(rows: Sequence[Row]) -> Comparison:
    """Compare the best runs of both optimizers."""
    rates = {optimizer: best_rate(rows, optimizer) for optimizer in _NAMES}
    runs = {
        name: [row["losses"] for row in rows if (row["optimizer"], row["lr"]) == (name, rates[name])] for name in rates
    }
    curves = {name: [mean(losses) for losses in zip(*each, strict=True)] for name, each in runs.items()}
    validated, final = rows[0]["validated"], curves["adamw"][-1]
    crossed = next((step for step, loss in zip(validated, curves["muon"], strict=True) if loss <= final), None)
    return Comparison(rates, validated, curves, crossed)


def render(rows: Sequence[Row]) -> str:
    """Return a table of the final losses, and a sentence on the best runs."""
    last = {(row["optimizer"], row["lr"]): row["losses"][-1] for row in rows if row["seed"] == SEEDS[0]}
    rates = sorted({lr for _, lr in last})
    cells = [["optimizer", *(f"lr {lr:g}" for lr in rates)]]
    cells += [[name, *(f"{last[key, lr]:.3f}" for lr in rates)] for key, name in _NAMES.items()]
    found, first = compare(rows), rows[0]
    best = ", ".join(
        f"{name} {found.curves[key][-1]:.3f} with rate {found.rates[key]:g}" for key, name in _NAMES.items()
    )
    reached = f"after {found.crossed} steps" if found.crossed is not None else "never"
    return (
        f"Validation loss after {first['steps']} steps, nats per byte; {first['words']}; {first['ranks']} ranks, "
        f"stage 3; {where(first)}.\n\n{markdown_table(cells, words=1)}\n\n"
        f"Means over {len(SEEDS)} seeds: {best}. Muon reaches AdamW's final loss {reached}."
    )


def paint(rows: Sequence[Row], path: Path) -> None:
    """Plot the best runs with the step at which Muon reaches AdamW's final loss, and the losses over the rates."""
    figure, (left, right) = new_figure(10, 4.2, columns=2, width_ratios=(5, 3))
    found = compare(rows)
    final = found.curves["adamw"][-1]
    best = {f"{_NAMES[key]}, learning rate {found.rates[key]:g}": found.curves[key] for key in _NAMES}
    if found.crossed is not None:
        left.axvline(found.crossed, color="#555555", linestyle=":", linewidth=1)
        left.annotate(f"step {found.crossed}", (found.crossed, final), (6, 6), textcoords="offset points")
    labels = {"xlabel": "step", "ylabel": "validation loss, nats per byte", "xlim": (0, found.validated[-1])}
    curves = {label: (found.validated, losses) for label, losses in best.items()}
    draw_curves(left, curves, level=(f"AdamW's final loss, {final:.3f}", final), **labels)
    left.set_title(f"Best of {len(GRID)} learning rates, mean of {len(SEEDS)} seeds", fontsize=10)
    tuned = {name: [r for r in rows if r["optimizer"] == key and r["seed"] == SEEDS[0]] for key, name in _NAMES.items()}
    ends = {name: ([row["lr"] for row in some], [row["losses"][-1] for row in some]) for name, some in tuned.items()}
    labels = {"xlabel": "peak learning rate", "ylabel": f"validation loss after {rows[0]['steps']} steps"}
    styles = [{"color": colour, "marker": "o"} for colour in COLOURS]
    draw_curves(right, ends, styles, ticks=GRID, xscale="log", **labels)
    right.set_title("Grid of learning rates", fontsize=10)
    save(figure, path)


# ---- command line ---------------------------------------------------------------------------------------------------


def _run_rank(options: argparse.Namespace, group: dist.ProcessGroup) -> bool:
    """Train as one of the ranks. Return whether Muon was not faster."""
    say = partial(print, file=sys.stderr, flush=True) if group.rank() == 0 else lambda _: None
    rows = tune(say, options.steps, options.every)
    if group.rank() == 0:
        report(rows, options.out / "optimizers-losses.jsonl")
        picture = (PICTURES if options.out == RESULTS else options.out) / "optimizers-losses.png"
        paint(rows, picture)
        print(f"wrote {picture}", flush=True)
    crossed = compare(rows).crossed
    return crossed is None or crossed >= options.steps


def _check(options: argparse.Namespace) -> None:
    if options.ranks < 1 or BATCH % options.ranks:
        raise ValueError(f"--ranks must divide the global batch of {BATCH}, got {options.ranks}")
    if not 1 <= options.every <= options.steps or options.steps % options.every:
        raise ValueError(f"--every must divide --steps {options.steps}, got {options.every}")


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or train if a launcher started this process as a rank. Return the exit status."""
    return run_bench("bench.optimizers.losses", arguments, _run_rank, _check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
