"""Two, then four processes on one card, which NCCL refuses: staged gloo beside a twin, then symmetric memory.

The ranks are children of the probe, in its process group, so that all end together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu import ROOT
from bench.gpu.report import Report, synchronize
from bench.support.systems import build_shardlite
from bench.support.workloads import perceptrons
from shardlite.config import TransportName

STEPS = 3
LIMIT = 60.0
"""Seconds that ranks may take; the probe's own limit is shorter on a GPU."""


def pair(report: Report) -> None:
    """Train on 2 and on 4 ranks of one card, and report what each transport did."""
    for ranks in (2,) if report.dry else (2, 4):
        with report.guarded(ranks=ranks), tempfile.TemporaryDirectory() as folder:
            processes = [_start(rank, ranks, Path(folder), dry=report.dry) for rank in range(ranks)]
            statuses = [process.wait(LIMIT) for process in processes]
            for line in (Path(folder) / "rows.jsonl").read_text().splitlines():
                report(ranks=ranks, **json.loads(line))
            assert not any(statuses), f"ranks ended with {statuses}; see the log"


def _start(rank: int, ranks: int, folder: Path, *, dry: bool) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    command = [sys.executable, "-m", "bench.gpu.pair", str(rank), str(ranks), str(folder), "cpu" if dry else "cuda:0"]
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def be_rank(rank: int, ranks: int, folder: Path, device: torch.device) -> int:
    """Train over each transport; rank 0 writes a row on each. Return 1 if any failed."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = f"file://{folder / 'store'}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT / 2)
    )
    staged, ms = _trained(device, "p2p")
    rows: list[dict[str, Any]] = [{"transport": "p2p", "off": _largest_error(staged, _twin(ranks, device)), "ms": ms}]
    _write(rank, folder, rows[-1])
    try:
        if device.type == "cuda":
            direct, ms = _trained(device, "symmetric_memory")
            same = all(torch.equal(direct[name], weight) for name, weight in staged.items())
            rows.append({"transport": "symmetric_memory", "same_bits": same, "ms": ms})
        else:
            rows.append({"transport": "symmetric_memory", "note": "needs a GPU"})
    except Exception as error:
        rows.append({"transport": "symmetric_memory", "error": f"{type(error).__name__}: {error}"[:300]})
    _write(rank, folder, rows[-1])
    if "error" in rows[-1]:  # the others may wait for this rank, which cannot say goodbye
        os._exit(1)
    dist.destroy_process_group()
    return int(rows[0]["off"] > 1e-5 or not rows[1].get("same_bits", True))


def _trained(device: torch.device, transport: TransportName) -> tuple[dict[str, Tensor], float]:
    """Return the weights after some steps at stage 3, whole and on the CPU, and the ms of the last step."""
    group, workload = dist.group.WORLD, _workload(device)
    assert group is not None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is experimental")
        trainer = build_shardlite(workload, group, stage=3, transport=transport)
    for step in range(STEPS):
        begin = time.perf_counter()
        trainer.step(workload.batch(group.rank(), step))
        synchronize(device)
    ms = round(1e3 * (time.perf_counter() - begin), 2)
    return {name: weight.cpu() for name, weight in trainer.model.full_state_dict().items()}, ms  # type: ignore[operator]


def _twin(ranks: int, device: torch.device) -> dict[str, Tensor]:
    """Return the weights of a plain model that takes the batches of all ranks, in one process."""
    from shardlite.apps.footprint.systems import torch_adamw

    workload = _workload(device)
    model = workload.model()
    optimizer = torch_adamw(model.parameters())
    for step in range(STEPS):
        for rank in range(ranks):
            (model(*workload.batch(rank, step)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach().cpu() for name, weight in model.named_parameters()}


def _largest_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest error of a tensor, relative, in the Euclidean norm."""
    errors = [float((got[name] - right).norm() / right.norm().clamp(min=1e-3)) for name, right in expected.items()]
    return max(errors)


def _workload(device: torch.device) -> Any:
    return perceptrons("pair", blocks=3, width=64, batch=8).on(device)


def _write(rank: int, folder: Path, row: dict[str, Any]) -> None:
    if rank == 0:
        with (folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Be one rank."""
    rank, ranks, folder, device = arguments
    return be_rank(int(rank), int(ranks), Path(folder), torch.device(device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
