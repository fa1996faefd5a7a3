"""Measure the cost of the negotiation: the small messages by which ranks check that they make the same calls.

    python -m bench.faults.detection --ranks 2 --model mlp

starts two ranks, which take steps at stage 3 with and without negotiation in turn. The bench writes one JSON object to
`bench/results/detection-MODEL-Nranks.jsonl`:

| key | meaning |
|---|---|
| `ms_p50`, `ms_p50_without` | milliseconds of a step with and without negotiation, on the slowest rank |
| `cpu_ms_p50`, `cpu_ms_p50_without` | CPU milliseconds of all threads of a process, hardly affected by other programs |
| `talks_cpu_ms` | milliseconds of CPU time of the negotiation per step |
| `talks_share` | `talks_cpu_ms` divided by `cpu_ms_p50_without` |

Ranks also check the names and numbers of operations. These checks take no additional time, because the tag of each
message contains the name and number of the operation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from time import thread_time
from typing import Any

import torch
import torch.distributed as dist

from shardlite.lab.compared.systems import build_shardlite
from shardlite.lab.compared.trainer import Trainer
from shardlite.lab.compared.workloads import WORKLOADS, Batch, Workload
from shardlite.lab.ranks import run_bench
from shardlite.lab.table import Row, report
from shardlite.lab.timer import WARM_UP, percentile, time_steps
from shardlite.weights.negotiation import END, Negotiation, Round


class Clocked:
    """A wrapper of a negotiation that adds up the CPU time of the negotiation's thread."""

    def __init__(self, negotiation: Negotiation) -> None:
        self.seconds = 0.0
        self._agree = negotiation.agree

    def __call__(self, *arguments: Any) -> Round:
        """Run a round of the negotiation."""
        begun = thread_time()
        round_ = self._agree(*arguments)
        self.seconds += thread_time() - begun
        return round_


class Silent(Trainer):
    """A trainer that does not negotiate after the warm-up, because all ranks made the same calls in the warm-up."""

    steps = 0

    def step(self, batch: Batch) -> torch.Tensor:
        """Take one step of training, and return the loss."""
        if self.steps == WARM_UP:
            negotiation = talks_of(self)
            ranks = dist.get_world_size()
            negotiation.agree = lambda *_: Round(END, [0] * ranks, alike=True)  # type: ignore[method-assign]
            negotiation.lists = lambda mine, lengths: [mine for _ in lengths]  # type: ignore[assignment,method-assign,misc]
        self.steps += 1
        return super().step(batch)


def talks_of(trainer: Trainer) -> Negotiation:
    """Return the negotiation of a wrapped model."""
    negotiation: Negotiation = trainer.model._bridge.gatherer.passes._negotiation  # type: ignore[union-attr,assignment]
    return negotiation


def measure(workload: Workload, rounds: int, group: dist.ProcessGroup) -> Row:
    """Time training with and without negotiation, and check that the weights have the same bits. Collective."""
    told, silent = (build_shardlite(workload, group, stage=3) for _ in range(2))
    trainers = {"with": told, "without": Silent(silent.model, silent.optimizer, silent.full)}
    clock = Clocked(talks_of(told))
    talks_of(told).agree = clock  # type: ignore[method-assign]
    times = time_steps(workload, trainers, rounds, group)
    weights = [trainers[name].weights() for name in ("with", "without")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]), "both learn the same bits"
    with_, without = times["with"], times["without"]
    talks_ms = 1e3 * clock.seconds / (WARM_UP + rounds)
    return {
        **workload.row("detection", group.size(), threads=torch.get_num_threads(), rounds=rounds),
        "ms_p50": round(1e3 * percentile(with_.wall, 50), 2),
        "ms_p50_without": round(1e3 * percentile(without.wall, 50), 2),
        "cpu_ms_p50": round(1e3 * percentile(with_.cpu, 50), 2),
        "cpu_ms_p50_without": round(1e3 * percentile(without.cpu, 50), 2),
        "talks_cpu_ms": round(talks_ms, 3),
        "talks_share": round(talks_ms / (1e3 * percentile(without.cpu, 50)), 5),
    }


def _run_rank(options: argparse.Namespace, group: dist.ProcessGroup) -> None:
    """Measure as one of the ranks."""
    row = measure(WORKLOADS[options.model], options.steps, group)
    if group.rank() == 0:
        report([row], options.out / f"detection-{row['model']}-{row['ranks']}ranks.jsonl")


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or measure if a launcher started this process as a rank. Return the exit status."""
    return run_bench("bench.faults.detection", arguments, _run_rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
