"""Simulate scaling as in `shardlite plan`: on this machine with measured costs, and on named clusters.

This machine is modelled as a cluster of one host whose ranks are linked by shared memory and share the cores. With more
ranks than cores, computation and communication slow down by the number of ranks per core. If every core has a rank, no
core is left to overlap communication with computation, so the time of a step is the sum of computation, communication
and the optimizer's step.

Legend: `W` ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch

from shardlite import Precision
from shardlite.cli.launch import usable_cores
from shardlite.lab.compared.workloads import Batch, Workload
from shardlite.lab.memory.machine import machine
from shardlite.lab.plan.source import find_source
from shardlite.lab.table import Row
from shardlite.plan import Card, Cluster, LinkCost, Planner, Setting, Source, simulate

HERE = "this machine"

WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of ranks on named clusters."""

BATCH = 4
"""Sequences per rank on named clusters."""

_ONE_HOST = 1 << 30


def here(workload: Workload, fit: Mapping[str, Any], measured: Sequence[Row]) -> list[Row]:
    """Return a simulated row for each measured row.

    Args:
        workload: the measured workload.
        fit: `compute_seconds` and `update_seconds` of one rank, and the costs of the link.
        measured: rows on this machine.
    """
    planner = Planner(_source(workload))
    alone = planner.plan(Setting(on_gpu=False))
    flops = simulate(alone, _cluster(fit, rate=1.0, bandwidth=1.0, sharing=1.0)).flops
    step_bytes = sum(unit.step for unit in alone.budget.units)
    rows = []
    for row in measured:
        ranks = row["ranks"]
        sharing = max(1.0, ranks / usable_cores())
        cluster = _cluster(
            fit,
            rate=flops / fit["compute_seconds"],
            bandwidth=step_bytes / fit["update_seconds"],
            sharing=sharing,
        )
        plan = planner.plan(Setting(world_size=ranks, on_gpu=False))
        scale = 1.0 if row["mode"] == "weak" else 1 / ranks
        step = simulate(plan, cluster, scale=scale)
        full = ranks >= usable_cores()
        total = step.compute + step.communication + step.update if full else step.total
        kept = ("bench", "cluster", "mode", "ranks", "model", "words", "item")
        rows.append(
            {
                **{key: row[key] for key in kept},
                "kind": "simulated",
                "ms_p50": round(1e3 * total, 2),
                "per_second": round(scale * ranks * workload.items / total, 1),
                "simulated_vs_measured": round(1e3 * total / row["ms_p50"], 3),
                **machine(),
            }
        )
    return with_efficiency(rows)


def elsewhere(clusters: Sequence[Cluster], model: str) -> list[Row]:
    """Return simulated rows of a preset in bf16 on named clusters, even if the preset does not fit in their memory.

    In strong scaling, the global batch is that of `max(WORLDS)` ranks in weak scaling.
    """
    source = find_source(model, BATCH, None)
    planner = Planner(source)
    tokens = source.batch()[0].numel()
    rows = []
    for cluster, mode, ranks in product(clusters, ("weak", "strong"), WORLDS):
        setting = Setting(world_size=ranks, precision=Precision(compute=torch.bfloat16), on_gpu=cluster.on_gpu)
        scale = 1.0 if mode == "weak" else max(WORLDS) / ranks
        total = simulate(planner.plan(setting), cluster, scale=scale).total
        rows.append(
            {
                "bench": "scale",
                "kind": "simulated",
                "cluster": cluster.name,
                "mode": mode,
                "ranks": ranks,
                "model": model,
                "words": f"{model} in bf16, {source.words}",
                "ms_p50": round(1e3 * total, 2),
                "per_second": round(scale * ranks * tokens / total, 1),
                "item": "tokens",
                **machine(),
            }
        )
    return with_efficiency(rows)


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the key `efficiency` added. The rows are either all measured or all simulated."""
    one = {(row["cluster"], row["mode"]): row["per_second"] for row in rows if row["ranks"] == 1}

    def efficiency(row: Row) -> float:
        return round(row["per_second"] / row["ranks"] / one[row["cluster"], row["mode"]], 4)

    return [{**row, "efficiency": efficiency(row)} for row in rows]


def _cluster(fit: Mapping[str, Any], *, rate: float, bandwidth: float, sharing: float) -> Cluster:
    """Return this machine as a cluster with `sharing` ranks per core."""
    card = Card(
        name="a core of this machine",
        nbytes=0,
        wide=rate / sharing,
        narrow=rate / sharing,
        bandwidth=bandwidth / sharing,
        efficiency=1.0,
        source="measured by bench.scale on one rank",
    )
    costs = {name: sharing * fit[name] for name in ("alpha", "beta", "gamma", "overhead")}
    link = LinkCost(**costs, overlaps=fit["overlaps"])
    return Cluster(
        name=HERE,
        card=card,
        node=_ONE_HOST,
        inside=link,
        nic=link,
        nics=1,
        base=0.0,
        source="fitted by bench.ring on 2 ranks",
        on_gpu=False,
    )


def _source(workload: Workload) -> Source:
    """Return a workload as a source for the planner, with a batch of zeros."""
    shapes = [(each.shape, each.dtype) for each in workload.draw(0, 0)]

    def batch() -> Batch:
        x, y = (torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)
        return x, y

    return Source(workload.name, workload.make, batch, workload.words)
