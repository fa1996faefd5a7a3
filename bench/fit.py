"""Measure whether runs that `shardlite.fit` chooses for GPT-2 with 12 blocks keep their promise, on CPU ranks.

    python -m bench.fit --ranks 2 4

chooses runs for three limits: 3.5 % more than the predicted peak of the cheapest run of all, of the cheapest run in
80 % of this peak, and of the cheapest run in 60 %. New processes then train each chosen run, wrapped with its memory
limit. The bench fails if a limit is exceeded. Rows go to `bench/results/fit-gpt2-Nranks.jsonl`:

| key | meaning |
|---|---|
| `limit_bytes` | the limit, for which the run was chosen |
| `predicted_bytes`, `predicted_least_bytes` | bounds of the peak of all tensors, as in `bench.footprint` |
| `tensor_bytes`, `pss_apart_bytes` | measured peaks of tensors and of a process (`shardlite/lab/memory/recorder.py`) |
| `pss_vs_limit` | `pss_apart_bytes` divided by `limit_bytes` |
| `tensors_vs_predicted` | `tensor_bytes` divided by `predicted_bytes` |
| `kept` | whether both measured peaks are within the limit |
| `lines` | the run, as lines of Python |
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlite import AdamW, ShardLite
from shardlite.cli import progress
from shardlite.lab.compared.gpt import GPT
from shardlite.lab.compared.systems import OPTIONS, System
from shardlite.lab.compared.trainer import Trainer
from shardlite.lab.compared.workloads import Batch
from shardlite.lab.memory.recorder import measure
from shardlite.lab.memory.run import Program, be_rank
from shardlite.lab.ranks import parser_of
from shardlite.lab.table import Row, write_rows
from shardlite.lab.train.settings import GPTConfig
from shardlite.plan import Fit, Planner, Setting, Source, search

GPT2 = GPTConfig(kind="gpt2", layers=12, width=768, heads=12, vocabulary=8192, context=128)
ROWS = 4
"""Sequences per rank in a step."""

SHARES = (1.0, 0.8, 0.6)
"""The largest peaks of the runs for which limits are set, as shares of the peak of the cheapest run of all."""

MARGIN = 1.035
"""A limit divided by the predicted peak of the run for which it is set. The rest is for what is not in tensors."""


@dataclass(frozen=True)
class Run:
    """What a rank must know about a chosen run."""

    setting: Setting
    shardlite: dict[str, Any]
    adamw: dict[str, Any]


@dataclass(frozen=True)
class Accumulating(Trainer):
    """ShardLite with the micro-batches of a run: `loss` runs all of them but the backward of the last."""

    setting: Setting = field(default_factory=Setting)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the last micro-batch, []."""
        setting, model = self.setting, self.model
        assert isinstance(model, ShardLite)
        with model.no_sync(sharded=setting.sharded):
            for _ in range(setting.accumulate - 1):
                torch.autograd.backward(self.forward(model, batch) / setting.accumulate)
        return self.forward(model, batch) / setting.accumulate


def source_of(setting: Setting) -> Source:
    """Return the model and the batch of a micro-batch of a run."""

    def tokens() -> Batch:
        return tuple(torch.zeros(2, setting.rows or ROWS, GPT2.context, dtype=torch.long))  # type: ignore[return-value]

    make = partial(GPT, GPT2, recompute=setting.checkpoint)
    return Source("gpt2", make, tokens, f"GPT-2 of 12 blocks of width {GPT2.width}, {ROWS} x {GPT2.context} per rank")


def chosen(ranks: int) -> Iterator[Fit]:
    """Yield the chosen run for each limit."""
    planner = Planner(source_of(Setting()), progress=progress)
    find = partial(search, planner, Setting(world_size=ranks, rows=ROWS, on_gpu=False))
    most = find(10**12).plan.peak
    for share in SHARES:
        yield find(round(MARGIN * find(round(share * most)).plan.peak))


def work(run: Run, group: dist.ProcessGroup) -> Row:
    """Train a run as one of its ranks, and return its row."""

    def build(source: Source, group: dist.ProcessGroup) -> Trainer:
        model = ShardLite(source.model(), group=group, **run.shardlite)
        optimizer = AdamW(model.parameters(), **OPTIONS, **run.adamw)
        return Accumulating(model, optimizer, torch.flatten, setting=run.setting)

    return measure(source_of(run.setting), System(build=build), group, process=True, steps=2)


def rows_of(ranks: int) -> Iterator[Row]:
    """Choose and measure the runs of a number of ranks."""
    for fit in chosen(ranks):
        run, plan = Run(fit.plan.setting, fit.shardlite, fit.adamw), fit.plan
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "run"
            file.write_bytes(pickle.dumps(run))
            program = Program(module="bench.fit", arguments=["--run", str(file)])
            row = program.measure("fit", ranks)
        limit = fit.memory_limit.nbytes
        facts = {"bench": "fit", "model": "gpt2", "ranks": ranks, "limit_bytes": limit, "lines": fit.lines, **row}
        if "error" not in row:
            facts |= {"predicted_bytes": plan.peak, "predicted_least_bytes": plan.at_least}
            facts["pss_vs_limit"] = round(row["pss_apart_bytes"] / limit, 3)
            facts["tensors_vs_predicted"] = round(row["tensor_bytes"] / plan.peak, 3)
            facts["kept"] = max(row["pss_apart_bytes"], row["tensor_bytes"]) <= limit
        yield facts


def main(arguments: Sequence[str]) -> int:
    """Measure a run as a rank, or choose and measure all runs. Return 1 if a limit was exceeded."""
    parser = parser_of("bench.fit")
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.row is not None:
        run: Run = pickle.loads(options.run.read_bytes())
        return be_rank(partial(work, run), options.row)
    status = 0
    for ranks in options.ranks:
        rows = []
        for row in rows_of(ranks):
            rows.append(row)
            print(
                {key: row.get(key) for key in ("ranks", "limit_bytes", "pss_vs_limit", "tensors_vs_predicted", "kept")}
            )
            print(*row["lines"], row.get("error", ""), sep="\n", flush=True)
            status |= not row.get("kept")
        write_rows(rows, options.out / f"fit-gpt2-{ranks}ranks.jsonl")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
