"""Find out why a step in a CUDA graph may hide less communication than the same step launched by the host.

Rank 0 of 8, as in `fake8`. Each way changes one thing, and is measured launched and captured, with 32 hardware queues
(`CUDA_DEVICE_MAX_CONNECTIONS`) and with 8:

| way | if captured minus launched vanishes in it, the cause is |
|---|---|
| `plain` | - |
| `awake` | that collectives and computation do not run side by side |
| `unfilled` | the fills of fake collectives, which NCCL does not have |
| `low priority` | that nodes of a graph lose the priority of their stream |

In the way `masked`, attention has the mask that transformers makes during a capture. Its difference to `plain` shows
what that mask costs. The edges of the graph are counted in CUDA's own dump: a collective with more than one predecessor
waits for other streams.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import nn

from bench.gpu import ROOT
from bench.gpu.fake_ranks import RANKS, Bench, one_of, workload_of
from bench.gpu.report import Report, milliseconds
from shardlite.comm import streams
from shardlite.lab.compared.workloads import Workload, perceptrons

WAYS = ("plain", "awake", "unfilled", "low priority", "masked")
_TINY = perceptrons("mlp", blocks=2, width=64, batch=4)  # of a dry run
_MODELS, _ROUNDS, _VARIABLE = ("llama-4k", "llama-1k"), 8, "CUDA_DEVICE_MAX_CONNECTIONS"


def graphs(report: Report) -> None:
    """Report the times of launched and of captured steps, in this process and in one with 8 hardware queues."""
    connections = int(os.environ.get(_VARIABLE, "8"))
    for model in _MODELS[: 1 if report.dry else None]:
        for way in WAYS[: None if connections > 8 else 2]:
            with report.guarded(model=model, way=way, connections=connections):
                found = _times(_TINY if report.dry else workload_of(model, report), way, report)
                report(model=model, way=way, connections=connections, ranks=RANKS, **found)
    if connections > 8:
        command = [sys.executable, "-m", "bench.gpu", "--probe", "graphs", "--out", str(report.file)]
        command += ["--dry"] * report.dry
        subprocess.run(command, cwd=ROOT, env={**os.environ, _VARIABLE: "8"}, check=True)


def _times(workload: Workload, way: str, report: Report) -> dict[str, object]:
    """Return the times of a step when it is launched and when it is captured, and counts of its graph."""
    rounds = 1 if report.dry else _ROUNDS
    if way == "masked" and not report.dry:
        workload = _masked(workload)
    with _low_priority(way), one_of(RANKS, report.device) as (group, link):
        link.fills = way != "unfilled"
        with link.awake() if way == "awake" else nullcontext():
            system = Bench(workload, group, link, report).built("exact")
            found: dict[str, object] = {"words": workload.words, "clip": system.trainer.max_norm}
            times = milliseconds(system.step, report.device, rounds)
            found |= {f"launched_{key}": value for key, value in times.items()}
            if not report.dry:
                replay, edges = _graph_of(system.step)
                times = milliseconds(replay, report.device, rounds)
                found |= {f"captured_{key}": value for key, value in times.items()} | edges
            del system
    return found


def _masked(workload: Workload) -> Workload:
    """Return the workload with the attention of transformers, which has a mask while a graph is captured."""

    def make() -> nn.Module:
        model: Any = workload.make()
        model.model.set_attn_implementation("sdpa")
        return model  # type: ignore[no-any-return]

    return replace(workload, make=make)


@contextmanager
def _low_priority(way: str) -> Iterator[None]:
    """In the way `low priority`, let no stream have a higher priority than that of the program."""
    make = streams.make_queue

    def make_slow(*arguments: Any, **options: Any) -> object:
        return make(*arguments, **{**options, "high_priority": False})

    with mock.patch.object(streams, "make_queue", make_slow if way == "low priority" else make):
        yield


def _graph_of(step: Callable[[], object]) -> tuple[Callable[[], None], dict[str, object]]:
    """Capture a step. Return a function that replays it, and counts of its edges."""
    graph = torch.cuda.CUDAGraph()
    graph.enable_debug_mode()
    with torch.cuda.graph(graph):
        step()
    with TemporaryDirectory() as folder:
        graph.debug_dump(f"{folder}/graph.dot")
        return graph.replay, counted((Path(folder) / "graph.dot").read_text())


def counted(dump: str) -> dict[str, object]:
    """Return the numbers of nodes and edges of a dumped graph, and how many fakes have so many predecessors."""
    nodes = dict(re.findall(r'^"(graph_\w+?)"\s*\[(.*?)\];?$', dump, re.MULTILINE | re.DOTALL))
    edges = re.findall(r'^"(graph_\w+)"\s*->\s*"(graph_\w+)"', dump, re.MULTILINE)
    before = Counter(end for _, end in edges)
    fakes = Counter(before[name] for name, label in nodes.items() if "_collective_kernel" in label)
    return {"nodes": len(nodes), "edges": len(edges), "fakes_by_edges": dict(sorted(fakes.items()))}
