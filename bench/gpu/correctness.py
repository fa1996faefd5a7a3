"""Part 1: whether results on a GPU are right.

A probe raises if they are not, after it has reported what it found.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
import triton

from bench.gpu.run import device_of
from bench.support.check import verify
from bench.support.ranks import only_rank, start_ranks
from bench.support.systems import FORMATS, SYSTEMS, Trainer, build_plain
from bench.support.table import read_rows
from bench.support.workloads import WORKLOADS, Workload

ROOT = Path(__file__).parents[2]
STEPS = 20
_GPU_TESTS = (
    "tests/kernels/test_adamw_cuda.py",
    "tests/optim/test_optim_cuda.py",
    "tests/comm/transport/test_symmetric_cuda.py",
)


class Report(Protocol):
    """What a probe reports to."""

    def __call__(self, **found: object) -> None:
        """Write a row."""


def environment(report: Report, *, dry: bool) -> None:
    """What the machine is."""
    found: dict[str, Any] = {"triton": triton.__version__, "kernel": platform.release()}
    if not dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpus": torch.cuda.device_count(),
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "peer_access": [
                [torch.cuda.can_device_access_peer(i, j) for j in range(torch.cuda.device_count()) if i != j]
                for i in range(torch.cuda.device_count())
            ],
        }
    report(**found)


def gpu_tests(report: Report, *, dry: bool) -> None:
    """The tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *_GPU_TESTS]
    done = _run([*command, "--collect-only"] if dry else command)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    report(**counts, failures=failed)
    _demand(done.returncode == 0, f"pytest ended with status {done.returncode}: {failed}")


def memcheck(report: Report, *, dry: bool) -> None:
    """The kernels under `compute-sanitizer`, which finds accesses outside of allocations."""
    tool = shutil.which("compute-sanitizer")
    if dry or tool is None:
        report(tool=tool, note="dry" if dry else "compute-sanitizer is not installed")
        return
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "1000003 or reference", _GPU_TESTS[0]]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else one allocation holds many tensors
    done = _run([tool, "--tool", "memcheck", "--error-exitcode", "9", *tests], environment)
    summary = re.findall(r"ERROR SUMMARY: (\d+) error", done.stdout)
    report(tool=tool, errors=sum(map(int, summary)), status=done.returncode)
    _demand(done.returncode == 0, f"compute-sanitizer ended with status {done.returncode}")


def twins(report: Report, *, dry: bool) -> None:
    """All stages beside DDP and an exact twin, and losses of all formats beside those of the plain model."""
    device = device_of(dry)
    with only_rank(device) as group:
        workload = WORKLOADS["tiny" if dry else "mlp"].on(device)
        for system, share in verify(workload, SYSTEMS, group).items():
            report(system=system, tolerance_used=round(share, 3))
        expected = _losses(build_plain(workload, group), workload)
        for name, build in FORMATS.items():
            losses = _losses(build(workload, group), workload)
            off = max(abs(got - want) / want for got, want in zip(losses, expected, strict=True))
            report(format=name, first_loss=losses[0], last_loss=losses[-1], plain_last_loss=expected[-1], off=off)
            _demand(off < 0.05, f"{name}: a loss is {100 * off:.1f} % off the plain model's")


def ranks_on_one_card(report: Report, *, dry: bool) -> None:
    """Two and four processes on one GPU, whose messages go through host memory: checked against DDP."""
    for ranks in (2,) if dry else (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["--model", "tiny", "--steps", "3", "--out", folder, "--systems"]
            systems = [name for name in SYSTEMS if name != "fsdp2"]  # it takes NCCL, which takes a GPU for each rank
            status = start_ranks("bench.step", ranks, [*arguments, *systems])
            _demand(status == 0, f"{ranks} ranks ended with status {status}")
            for row in read_rows(Path(folder).glob("*.jsonl")):
                report(ranks=ranks, system=row["system"], tolerance_used=row["tolerance_used"], ms_p50=row["ms_p50"])


def _losses(trainer: Trainer, workload: Workload) -> list[float]:
    batch = workload.batch(0, 0)
    return [float(trainer.step(batch)) for _ in range(STEPS)]


def _run(command: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-20_000:], done.stderr[-20_000:], sep="\n", flush=True)
    return done


def _demand(holds: bool, why: str) -> None:
    if not holds:
        raise SystemExit(why)
