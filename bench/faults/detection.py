"""What it costs that ranks compare what they do: stage 3 with its talks and without, in turn.

    python -m bench.faults.detection --ranks 2 --model mlp

starts its ranks itself, and writes `bench/results/detection-MODEL-Nranks.jsonl`, one JSON object:

| key | what it is |
|---|---|
| `ms_p50`, `ms_p50_without` | milliseconds of a step, on the slowest rank |
| `cpu_ms_p50`, `cpu_ms_p50_without` | work of all threads of a process: other programs hardly change it |
| `talks_cpu_ms` | of these, what the thread that talks worked for it, per step |
| `talks_share` | that as a part of `cpu_ms_p50_without` |

Names and numbers of operations need no time of their own: they are the tags that messages have anyway.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from time import thread_time
from typing import Any

import torch
import torch.distributed as dist

from bench.support.measure import WARM_UP, percentile, time_steps
from bench.support.ranks import on_ranks, options_of_ranks, report
from bench.support.systems import Trainer, build_shardlite
from bench.support.table import Row
from bench.support.workloads import WORKLOADS, Batch, Workload
from shardlite.weights.negotiation import END, Negotiation, Round


class Clocked:
    """Talks, with the seconds that their thread works for them."""

    def __init__(self, talks: Negotiation) -> None:
        self.seconds = 0.0
        self._agree = talks.agree

    def __call__(self, *arguments: Any) -> Round:
        """Talk."""
        begun = thread_time()
        round_ = self._agree(*arguments)
        self.seconds += thread_time() - begun
        return round_


class Silent(Trainer):
    """Stops talking after the warm-up, when all ranks do the same and nothing is left to be said."""

    steps = 0

    def step(self, batch: Batch) -> torch.Tensor:
        """One step of training; returns the loss."""
        if self.steps == WARM_UP:
            talks = talks_of(self)
            ranks = dist.get_world_size()
            talks.agree = lambda *_: Round(END, [0] * ranks, alike=True)  # type: ignore[method-assign]
            talks.lists = lambda mine, lengths: [mine for _ in lengths]  # type: ignore[assignment,method-assign,misc]
        self.steps += 1
        return super().step(batch)


def talks_of(trainer: Trainer) -> Negotiation:
    """Return the talks of a wrapped model."""
    talks: Negotiation = trainer.model._bridge.gatherer._negotiation  # type: ignore[union-attr,assignment]
    return talks


def measure(workload: Workload, rounds: int, group: dist.ProcessGroup) -> Row:
    """Time both, and check that both learnt the same. To be called by every rank."""
    trainers: dict[str, Trainer] = {}

    def keep(name: str, workload: Workload, group: dist.ProcessGroup) -> Trainer:
        trainer = build_shardlite(workload, group, stage=3)
        trainers[name] = Silent(trainer.model, trainer.optimizer, trainer.whole) if name == "without" else trainer
        return trainers[name]

    clocks: list[Clocked] = []

    def clocked(workload: Workload, group: dist.ProcessGroup) -> Trainer:
        trainer = keep("with", workload, group)
        clocks.append(Clocked(talks_of(trainer)))
        talks_of(trainer).agree = clocks[0]  # type: ignore[method-assign]
        return trainer

    times = time_steps(workload, {"with": clocked, "without": partial(keep, "without")}, rounds, group)
    weights = [trainers[name].weights() for name in ("with", "without")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]), "both learn the same bits"
    told, silent = times["with"], times["without"]
    talks_ms = 1e3 * clocks[0].seconds / (WARM_UP + rounds)
    return {
        **workload.row("detection", group.size(), threads=torch.get_num_threads(), rounds=rounds),
        "ms_p50": round(1e3 * percentile(told.wall, 50), 2),
        "ms_p50_without": round(1e3 * percentile(silent.wall, 50), 2),
        "cpu_ms_p50": round(1e3 * percentile(told.cpu, 50), 2),
        "cpu_ms_p50_without": round(1e3 * percentile(silent.cpu, 50), 2),
        "talks_cpu_ms": round(talks_ms, 3),
        "talks_share": round(talks_ms / (1e3 * percentile(silent.cpu, 50)), 5),
    }


def _run_rank(options: argparse.Namespace, group: dist.ProcessGroup) -> None:
    """Be one of the ranks."""
    row = measure(WORKLOADS[options.model], options.steps, group)
    if group.rank() == 0:
        report([row], options.out / f"detection-{row['model']}-{row['ranks']}ranks.jsonl")


def main(arguments: Sequence[str]) -> int:
    """Measure, as one rank if a launcher started this process, else by starting the ranks."""
    parser = options_of_ranks("bench.faults.detection", "the cost of comparing ranks")
    parser.add_argument("--model", choices=[*WORKLOADS], default="mlp", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of each (%(default)s)")
    options = parser.parse_args(arguments)
    return on_ranks("bench.faults.detection", options.ranks, arguments, partial(_run_rank, options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
