"""Part 2: how near kernels come to the bandwidth of the card, alone and beside computation.

Legend: `S` elements, `W` ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from shardlite_kernels import add_rows, hop

import bench.kernels.run
from bench.gpu.correctness import Report
from bench.gpu.run import device_of
from bench.support.measure import percentile, seconds
from bench.support.table import read_rows

_ROUNDS = 20
_WARM_UP = 3


def copies(report: Report, *, dry: bool) -> None:
    """The bandwidth of a copy, which is what kernels can reach."""
    device = device_of(dry)
    for nbytes in (1 << 16,) if dry else (1 << 24, 1 << 28, 1 << 32):
        source = torch.randn(nbytes // 4, device=device)
        target = torch.empty_like(source)
        ms = _milliseconds(lambda source=source, target=target: target.copy_(source), device)
        report(nbytes=nbytes, ms_p50=ms, gbps=round(2 * nbytes / ms / 1e6, 1))


def all_kernels(report: Report, *, dry: bool) -> None:
    """`bench.kernels`: verified and timed, beside PyTorch's own and a copy."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--out", folder, "--rounds", "2" if dry else "20", "--seconds", "1" if dry else "5"]
        sizes = ["--device", "cpu", "--threads", "1", "--numel", "1e4"] if dry else ["--numel", "1e7", "1e8"]
        status = bench.kernels.run.main([*arguments, *sizes])
        for row in read_rows(Path(folder).glob("*.jsonl")):
            report(**{key: value for key, value in row.items() if key != "bench"})
    if status:
        raise SystemExit(f"bench.kernels ended with status {status}")


def beside_a_matrix_product(report: Report, *, dry: bool) -> None:
    """One hop of a ring, and the sum of `W` rows, alone and while a matrix product runs on another stream."""
    device = device_of(dry)
    numel, width = (1 << 10, 32) if dry else (1 << 24, 8192)
    factor = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    out, received, own = (torch.randn(numel, device=device) for _ in range(3))
    rows = torch.randn(8, numel, device=device)
    works: dict[str, Callable[[], object]] = {
        "matrix product": lambda: torch.matmul(factor, factor, out=product),
        "hop": lambda: hop(out, received, own),
        "8 rows": lambda: add_rows(out, rows, 1, 8),
    }
    alone = {name: _milliseconds(work, device) for name, work in works.items()}
    for name in ("hop", "8 rows"):
        both = _milliseconds(lambda name=name: _at_once(works["matrix product"], works[name], dry), device)
        report(work=name, ms_alone=alone[name], product_ms_alone=alone["matrix product"], ms_both=both)


def _at_once(first: Callable[[], object], second: Callable[[], object], dry: bool) -> None:
    """Run two works on two streams, both ordered by the current one."""
    side: AbstractContextManager[object] = nullcontext()
    if not dry:
        stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        side = torch.cuda.stream(stream)
    first()
    with side:
        second()
    if not dry:
        torch.cuda.current_stream().wait_stream(stream)


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call."""
    taken = [seconds(call, device)[0] for _ in range(_WARM_UP + _ROUNDS)]
    return round(1e3 * percentile(taken[_WARM_UP:], 50), 4)
