"""Train with two and with four ranks on one card, over gloo and then over symmetric memory.

NCCL does not support several ranks on one card. Over gloo, the weights are compared with those of a plain model that is
trained in one process. The ranks are child processes in the probe's process group, so all of them end together.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu import ROOT
from bench.gpu.report import Report, synchronize
from bench.gpu.several.launch import statuses_of
from shardlite.config import TransportName
from shardlite.lab.compared.systems import build_shardlite
from shardlite.lab.compared.workloads import Workload, perceptrons

STEPS = 3
LIMIT = 30.0
"""Time limit in seconds for the ranks of one world size."""

NEAR = 1e-5
"""Maximum relative error of weights, compared with one process. One process adds gradients in a different order."""


def pair(report: Report) -> None:
    """Train with 2 and with 4 ranks on one card, and report the results of each transport."""
    for ranks in (2,) if report.dry else (2, 4):
        with report.guarded(ranks=ranks), tempfile.TemporaryDirectory() as folder:
            processes = [_start(rank, ranks, Path(folder) / "store", report) for rank in range(ranks)]
            statuses = statuses_of(processes, LIMIT)
            assert not any(statuses), f"ranks ended with {statuses}; see the log"


def _start(rank: int, ranks: int, store: Path, report: Report) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # two ranks on one card cannot use multicast
    command = [sys.executable, "-m", "bench.gpu.pair", str(rank), str(ranks), str(store), str(report.file)]
    return subprocess.Popen([*command, *["--dry"][: int(report.dry)]], cwd=ROOT, env=environment)


def be_rank(rank: int, ranks: int, store: Path, report: Report) -> int:
    """Train over each transport. Rank 0 reports the results. Return 1 if a transport failed."""
    torch.set_num_threads(1)
    device = report.device
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT / 2)
    )
    write = partial(report, ranks=ranks) if rank == 0 else _say_nothing
    staged, ms = _trained(device, "p2p")
    off = _largest_error(staged, _twin(ranks, device))
    wrong = {} if off <= NEAR else {"error": f"weights are off by {off:.1e}, and may be by {NEAR:.0e}"}
    write(transport="p2p", off=off, ms=ms, **wrong)
    if report.dry:
        write(transport="symmetric_memory", note="needs a GPU")
        same = True
    else:
        same = _trained_directly(device, staged, write)
    dist.destroy_process_group()
    return int(off > NEAR or not same)


def _say_nothing(**_: object) -> None:
    """Ignore a report of a rank other than 0."""


def _trained_directly(device: torch.device, staged: dict[str, Tensor], write: Callable[..., None]) -> bool:
    """Train over symmetric memory, and return whether the weights have the bits of `staged`."""
    try:
        direct, ms = _trained(device, "symmetric_memory")
        same = all(torch.equal(direct[name], weight) for name, weight in staged.items())
        wrong = {} if same else {"error": "the bits of weights differ from p2p"}
        write(transport="symmetric_memory", same_bits=same, ms=ms, **wrong)
    except Exception as error:
        traceback.print_exc()
        write(transport="symmetric_memory", error=f"{type(error).__name__}: {error}"[:300])
        sys.stdout.flush()
        os._exit(1)  # a cleanup could hang, because other ranks may wait for this rank
    return same


def _trained(device: torch.device, transport: TransportName) -> tuple[dict[str, Tensor], float]:
    """Return the full weights on the CPU after some steps at stage 3, and the milliseconds of the last step."""
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
    """Return the weights of a plain model that is trained on the batches of all ranks in one process."""
    from shardlite.lab.compared.systems import torch_adamw

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
    """Return the largest of the relative errors of the tensors. Each error is in the Euclidean norm."""
    errors = [float((got[name] - right).norm() / right.norm().clamp(min=1e-3)) for name, right in expected.items()]
    return max(errors)


def _workload(device: torch.device) -> Workload:
    return perceptrons("pair", blocks=3, width=64, batch=8).on(device)


def main(arguments: Sequence[str]) -> int:
    """Run as one rank, and return the exit status."""
    rank, ranks, store, rows, *dry = arguments
    return be_rank(int(rank), int(ranks), Path(store), Report("pair", Path(rows), dry=bool(dry)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
