"""Train one model with all strategies, compare their losses, and measure bytes, time and memory.

    python -m bench.strategies --ranks 2

starts two ranks. Rows go to `strategies-gpt-Nranks.jsonl` and `strategies-batch.jsonl` in `bench/results/`, pictures to
`docs/`; with `--out FOLDER`, rows and pictures go to that folder. `--what strategies` skips larger batches. A row has:

| key | meaning |
|---|---|
| `losses` | loss of each step, the mean over the ranks, in nats per byte |
| `largest_difference` | largest difference from the losses of one process |
| `sent_bytes` | bytes per step on the rank that sends the most; the mean over `AVERAGED_EVERY` steps |
| `formula`, `formula_bytes` | expected bytes, with `n` bytes of parameters and `W` ranks |
| `ms_p20`, `ms_p50`, `ms_p80` | milliseconds of a step, on the slowest rank |
| `held_bytes`, `peak_bytes` | bytes in tensors between two steps, and their peak, on the rank that holds the most |

Strategies take turns after each step, so a busy machine affects all of them. `bucketed_ddp` reduces on another
thread, whose tensors are not counted, so its `peak_bytes` lacks half of a bucket.

The exit status is 1 if a strategy that averages gradients differs by more than `CLOSE` from one process, if parameter
averaging does not, or if the error of accumulated gradients exceeds rounding.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bench.strategies import batch_size, problem
from bench.strategies.paint import paint
from bench.strategies.problem import Batch, batches, make_model
from bench.strategies.replicas import (
    AVERAGED_EVERY,
    cpu_master,
    data_parallel,
    one_process,
    parameter_averaging,
    parameter_server,
)
from bench.strategies.rings import bucketed_ddp, ring
from bench.strategies.sharded import fsdp2, sharded, shardlite
from bench.strategies.wire import counted
from shardlite.lab.memory.machine import machine
from shardlite.lab.memory.peak import live_bytes, peak_in
from shardlite.lab.ranks import run_bench
from shardlite.lab.table import RESULTS, Row, markdown_table, report, where
from shardlite.lab.timer import largest, milliseconds, rotated, seconds

CLOSE = 0.02
"""Maximum difference of losses from those of one process, in nats per byte.

Adding batches in parts rounds differently, and Adam divides small gradients by their own size. So over a hundred steps
differences grow from 1e-7 to a few thousandths. An error in the algorithm causes a difference of a tenth or more.
"""

PICTURES = Path(__file__).parents[2] / "docs"

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Strategy:
    """A training strategy and its properties."""

    train: Callable[[nn.Module, Iterator[Batch]], Iterator[float]]

    formula: str
    """Bytes that the busiest rank sends in a step, with `n` bytes of parameters and `W` ranks."""

    sent: Callable[[int], float]
    """Function that returns, for a number of ranks, these bytes divided by `n`."""

    is_alone: bool = False
    """Whether rank 0 trains on whole batches while the other ranks wait."""

    is_same: bool = True
    """Whether the algorithm gives the weights of one process, apart from rounding."""


STRATEGIES = {
    "one process": Strategy(one_process, "0", lambda ranks: 0, is_alone=True),
    "nn.DataParallel": Strategy(data_parallel, "0", lambda ranks: 0, is_alone=True),
    "CPU master": Strategy(cpu_master, "(W-1) n", lambda ranks: ranks - 1),
    "parameter server": Strategy(parameter_server, "(W-1) n", lambda ranks: ranks - 1),
    "parameter averaging": Strategy(
        parameter_averaging,
        f"2 (W-1)/W n / {AVERAGED_EVERY}",
        lambda ranks: 2 * (ranks - 1) / ranks / AVERAGED_EVERY,
        is_same=False,
    ),
    "ring all-reduce": Strategy(ring, "2 (W-1)/W n", lambda ranks: 2 * (ranks - 1) / ranks),
    "bucketed DDP": Strategy(bucketed_ddp, "2 (W-1)/W n", lambda ranks: 2 * (ranks - 1) / ranks),
    "sharded by hand": Strategy(sharded, "3 (W-1)/W n", lambda ranks: 3 * (ranks - 1) / ranks),
    "FSDP2": Strategy(fsdp2, "at most 3 (W-1)/W n", lambda ranks: 3 * (ranks - 1) / ranks),
    "ShardLite": Strategy(shardlite, "at most 3 (W-1)/W n", lambda ranks: 3 * (ranks - 1) / ranks),
}


def usable() -> dict[str, Strategy]:
    """Return the strategies that this machine supports. `nn.DataParallel` requires GPUs."""
    return {name: each for name, each in STRATEGIES.items() if name != "nn.DataParallel" or torch.cuda.is_available()}


class Steps:
    """The steps of one strategy on this rank. Losses of a waiting rank are 0."""

    def __init__(self, strategy: Strategy) -> None:
        rank, ranks = (0, 1) if strategy.is_alone else (dist.get_rank(), dist.get_world_size())
        works = rank == dist.get_rank()
        self._steps = strategy.train(make_model(), batches(problem.BATCH, rank=rank, ranks=ranks)) if works else None
        self._parts = ranks
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def take(self) -> None:
        """Take one step, together with the other ranks."""
        dist.barrier()
        if self._steps is None:
            self.losses.append(0.0)
            self.seconds.append(0.0)
            return
        self.seconds.append(seconds(lambda: self.losses.append(next(self._steps)), _CPU)[0])

    def mean_losses(self) -> list[float]:
        """Return the loss of the global batch in each step. Collective."""
        total = torch.tensor(self.losses, dtype=torch.float64)
        dist.all_reduce(total)
        losses: list[float] = (total / self._parts).tolist()
        return losses


def compare(steps: int, say: Callable[[str], None]) -> list[Row]:
    """Run all strategies for `steps` steps. Return a row for each. Collective."""
    strategies = usable()
    sizes = {}
    for name, strategy in strategies.items():
        say(f"{name}: bytes and memory")
        sizes[name] = {"sent_bytes": sent_bytes(strategy), **memory(strategy)}
    taken = {name: Steps(strategy) for name, strategy in strategies.items()}
    for step in range(steps):
        if step % 10 == 0:
            say(f"step {step} of {steps}, by {len(taken)} strategies")
        for name in rotated(list(taken), step):
            taken[name].take()
    losses = {name: each.mean_losses() for name, each in taken.items()}
    times = {name: largest(each.seconds[min(3, steps - 1) :], dist.group.WORLD) for name, each in taken.items()}
    common = {"bench": "strategies", "words": problem.words(make_model()), "ranks": dist.get_world_size()}
    return [
        common
        | {"strategy": name, "steps": steps, "largest_difference": difference(losses[name], losses["one process"])}
        | _formula(strategies[name])
        | sizes[name]
        | milliseconds(times[name])
        | {"losses": [round(loss, 7) for loss in losses[name]], "threads": torch.get_num_threads()}
        | machine()
        for name in strategies
    ]


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest difference of two loss curves, in nats per byte."""
    return round(max(abs(one - other) for one, other in zip(losses, others, strict=True)), 6)


def sent_bytes(strategy: Strategy) -> int:
    """Return the bytes that the busiest rank sends in a step. Collective."""
    with counted() as wire:
        steps, counting = Steps(strategy), 1 if strategy.is_same else AVERAGED_EVERY
        for _ in range(2):  # the first steps also send initial data
            steps.take()
        before = wire.sent
        for _ in range(counting):
            steps.take()
    return round(largest([(wire.sent - before) / counting], dist.group.WORLD)[0])


def memory(strategy: Strategy) -> Row:
    """Return the bytes in tensors between two steps, and their peak during a step. Collective."""
    before, steps = live_bytes(_CPU), Steps(strategy)
    for _ in range(2):  # so that the optimizer has allocated its state
        steps.take()
    held, peak = live_bytes(_CPU), peak_in(steps.take, _CPU)
    held, peak = largest([held - before, peak - before], dist.group.WORLD)
    return {"held_bytes": round(held), "peak_bytes": round(peak)}


def _formula(strategy: Strategy) -> Row:
    nbytes = sum(param.nbytes for param in make_model().parameters())
    return {"formula": strategy.formula, "formula_bytes": round(strategy.sent(dist.get_world_size()) * nbytes)}


def complaints(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each error in the results."""
    found = []
    for row in rows:
        off = row.get("largest_difference", 0)
        if "strategy" in row and STRATEGIES[row["strategy"]].is_same and not off <= CLOSE:
            found.append(f"{row['strategy']}: a loss differs by {off:.3g} from that of one process; at most {CLOSE:g}")
        if "strategy" in row and not STRATEGIES[row["strategy"]].is_same and off <= CLOSE:
            found.append(f"{row['strategy']}: losses differ by {off:.3g} only, as if gradients were averaged")
        if row.get("tolerance_used", 0) > 1:
            found.append(f"accumulation: {row['tolerance_used']:.3g} times as far from the exact gradient as allowed")
    return found


def larger_batches(say: Callable[[str], None]) -> list[Row]:
    """Return the rows of training with larger batches. Collective."""
    say("gradients of micro-batches and of the large batch")
    common = {"threads": torch.get_num_threads()} | machine()
    accumulation = {"bench": "strategies-accumulation"} | batch_size.accumulation() | common
    return [accumulation, *({"bench": "strategies-batch"} | row | common for row in batch_size.learning_rates(say))]


def render_batches(rows: Sequence[Row]) -> str:
    """Return a table with the final loss of each batch size and rule."""
    rules = list(dict.fromkeys(row["rule"] for row in rows if row["batch"] > rows[0]["batch"]))
    losses = {(row["batch"], row["rule"]): f"{row['losses'][-1]:.3f}" for row in rows}
    smallest = losses[rows[0]["batch"], rows[0]["rule"]]  # all rules coincide at the smallest batch
    cells = [["batch", "steps", *rules]]
    for batch, steps in {row["batch"]: row["steps"] for row in rows}.items():
        of_rules = [smallest if batch == rows[0]["batch"] else losses.get((batch, rule), "") for rule in rules]
        cells.append([str(batch), str(steps), *of_rules])
    first = rows[0]
    return (
        f"Validation loss after {first['samples'][-1]} sequences, nats per byte; {first['words']}; {where(first)}.\n\n"
        f"{markdown_table(cells, words=0)}"
    )


def render_accumulation(rows: Sequence[Row]) -> str:
    """Return a sentence on the gradients of micro-batches."""
    row = rows[0]
    return (
        f"Relative error of the gradient: {row['accumulated_off_by']:.1e} for {row['micro_batches']} micro-batches, "
        f"{row['large_batch_off_by']:.1e} for one batch of {row['batch']}; {where(row)}."
    )


def _run_rank(options: argparse.Namespace, group: dist.ProcessGroup) -> bool:
    """Measure as one of the ranks. Return whether a result is wrong."""
    say = partial(print, file=sys.stderr, flush=True) if group.rank() == 0 else lambda _: None
    found = []
    for part in options.what:
        rows = compare(options.steps, say) if part == "strategies" else larger_batches(say)
        found += complaints(rows)
        if group.rank() == 0:
            name = f"strategies-gpt-{group.size()}ranks" if part == "strategies" else "strategies-batch"
            _report(rows, name, options.out)
    for complaint in found:
        say(complaint)
    return bool(found)


def _report(rows: Sequence[Row], name: str, out: Path) -> None:
    """Write, print and plot rows."""
    report(rows, out / f"{name}.jsonl")
    for path in paint(rows, PICTURES if out == RESULTS else out):
        print(f"wrote {path}", flush=True)


def _check(options: argparse.Namespace) -> None:
    if options.steps < 2 * AVERAGED_EVERY:
        raise ValueError(f"--steps must be at least {2 * AVERAGED_EVERY}, or parameters are averaged less than twice")
    if options.ranks < 2 or problem.BATCH % options.ranks:
        batch = problem.BATCH
        raise ValueError(f"--ranks must be 2 or more and divide the global batch of {batch}, got {options.ranks}")


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or measure if a launcher started this process as a rank. Return the exit status."""
    return run_bench("bench.strategies", arguments, _run_rank, _check)
