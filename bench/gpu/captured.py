"""Find out why a step in a CUDA graph may hide less communication than the same step launched by the host.

Rank 0 of 8, as in `fake8`: each collective is a sleep. Each way changes one thing, and is measured launched and
captured, with 32 hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS`) and with 8:

| way | if captured minus launched vanishes in it, the cause is |
|---|---|
| `plain` | - |
| `awake` | that sleeps and computation do not run side by side |
| `unfilled` | the fills of fake collectives, which NCCL does not have |
| `low priority` | that nodes of a graph lose the priority of their stream |

The edges of the graph are counted in CUDA's own dump: a sleep with more than one predecessor waits for other streams.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

from bench.gpu import ROOT
from bench.gpu.fake_ranks import _CLIP, RANKS, SYSTEMS, Sleeps, _any_numbers, _prepared, _workload, one_of
from bench.gpu.report import Report, milliseconds
from bench.support.workloads import perceptrons
from shardlite.comm import streams

WAYS = ("plain", "awake", "unfilled", "low priority")
_TINY = perceptrons("mlp", blocks=2, width=64, batch=4)  # of a dry run
_MODELS, _ROUNDS, _VARIABLE = ("llama-4k", "llama-1k"), 8, "CUDA_DEVICE_MAX_CONNECTIONS"


def captured(report: Report) -> None:
    """Report the times of launched and of captured steps, in this process and in one with 8 hardware queues."""
    connections = int(os.environ.get(_VARIABLE, "8"))
    for model in _MODELS[: 1 if report.dry else None]:
        for way in WAYS[: None if connections > 8 else 2]:
            with report.guarded(model=model, way=way, connections=connections):
                found = _times(model, way, report)
                report(model=model, way=way, connections=connections, ranks=RANKS, **found)
    if connections > 8:
        command = [sys.executable, "-m", "bench.gpu", "--probe", "captured", "--out", str(report.file)]
        command += ["--dry"] * report.dry
        subprocess.run(command, cwd=ROOT, env={**os.environ, _VARIABLE: "8"}, check=True)


def _times(model: str, way: str, report: Report) -> dict[str, object]:
    """Return the times of a step that is launched, and of the same step captured, and what its graph is."""
    workload, rounds = (_TINY, 1) if report.dry else (_workload(model, report), _ROUNDS)
    with _in_this(way), one_of(RANKS, report.device) as (group, sleeps), _any_numbers():
        sleeps.awake = way == "awake"
        trainer, step = _prepared(workload, SYSTEMS["exact"], group, sleeps, clip=True, report=report)
        found: dict[str, object] = {"words": workload.words, "clip": _CLIP}
        found |= {f"launched_{key}": value for key, value in milliseconds(step, report.device, rounds).items()}
        if not report.dry:
            replay, edges = _graph_of(step)
            found |= {f"captured_{key}": value for key, value in milliseconds(replay, report.device, rounds).items()}
            found |= edges
        del trainer
    return found


@contextmanager
def _in_this(way: str) -> Iterator[None]:
    make, fill = streams.make_queue, Sleeps._fill

    def make_slow(*arguments: Any, **options: Any) -> object:
        return make(*arguments, **{**options, "high_priority": False})

    with (
        mock.patch.object(streams, "make_queue", make_slow if way == "low priority" else make),
        mock.patch.object(Sleeps, "_fill", (lambda *_: None) if way == "unfilled" else fill),
    ):
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
    """Return the numbers of nodes and edges of a dumped graph, and how many sleeps have so many predecessors."""
    nodes = dict(re.findall(r'^"(graph_\w+?)"\s*\[(.*?)\];?$', dump, re.MULTILINE | re.DOTALL))
    edges = re.findall(r'^"(graph_\w+)"\s*->\s*"(graph_\w+)"', dump, re.MULTILINE)
    before = Counter(end for _, end in edges)
    sleeps = Counter(before[name] for name, label in nodes.items() if "spin_kernel" in label)
    return {"nodes": len(nodes), "edges": len(edges), "sleeps_by_edges": dict(sorted(sleeps.items()))}
