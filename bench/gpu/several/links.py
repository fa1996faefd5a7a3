"""Bandwidth of collectives between the GPUs of a host, as the library calls them, and of gathers by copy engines.

The bus bandwidth of an all-gather, a reduce-scatter or an all-to-all is comparable with the bandwidth of a link:

    bytes of the whole buffer / time * (W - 1) / W        (doc/PERFORMANCE.md of NVIDIA/nccl-tests)

An all-to-all with one peer at a time sends as many bytes, in `W - 1` calls. *products* is the time of matrix products
beside collectives, divided by their time alone: collectives take multiprocessors and memory bandwidth.

Legend: `W` ranks, `n` elements of the whole buffer, `r` this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.gpu.checks import _cut, _transport
from bench.gpu.report import Report, milliseconds, synchronize
from shardlite.comm.operation import UNNAMED
from shardlite.lab.timer import slowest

NBYTES = (16 << 20, 256 << 20, 832 << 20)
"""Bytes of the whole buffer. The last is that of a block of Llama 3 8B in fp32."""

_ROUNDS, _PRODUCTS, _WIDTH = 20, 40, 4096


class Collective(NamedTuple):
    """A collective of all ranks."""

    name: str
    call: Callable[[], object]
    result: Callable[[], Tensor]
    """Function that returns the rows after the first call, [rows, n/W]."""

    expected: list[int]
    """The value of each row."""


def busbw(nbytes: int, ms: float, ranks: int) -> float:
    """Return the bus bandwidth in GB/s of a collective on a whole buffer of `nbytes`."""
    return nbytes / ms / 1e6 * (ranks - 1) / ranks


def run(report: Report, group: dist.ProcessGroup) -> None:
    """Report the bandwidth of each collective and size."""
    collectives = _by_copy_engines if report.probe == "copy_engines" else _of_library
    if report.dry and report.probe == "copy_engines":
        report(collective="all-gather by copy engines", note="needs GPUs and NCCL 2.28")
        return
    for nbytes in (1 << 16,) if report.dry else NBYTES:
        n = nbytes // (128 * group.size()) * 32 * group.size()
        for each in collectives(n, report.device, group):
            found = _measured(each, n, report, group)
            report(collective=each.name, nbytes=4 * n, **found)


def _measured(collective: Collective, n: int, report: Report, group: dist.ProcessGroup) -> dict[str, float]:
    """Check the first call, and return the bandwidth of the slowest rank."""
    collective.call()
    got = collective.result()
    wanted = torch.tensor(collective.expected, dtype=got.dtype, device=got.device).view(-1, 1)
    assert torch.equal(got, wanted.expand_as(got)), f"{collective.name}: rank {group.rank()} has wrong values"
    dist.barrier(group)
    times = milliseconds(collective.call, report.device, 1 if report.dry else _ROUNDS)
    found = slowest(times, group)
    found["algbw_gbps"] = round(4 * n / found["ms_p50"] / 1e6, 3)
    found["busbw_gbps"] = round(busbw(4 * n, found["ms_p50"], group.size()), 3)
    if report.dry:
        return found
    beside = {"products": _slowed(collective.call, found["ms_p50"], report.device, group)}
    if report.probe == "copy_engines":
        beside["kernels"] = _kernels(collective.call, report.device)
    return found | slowest(beside, group)


def _slowed(call: Callable[[], object], ms: float, device: torch.device, group: dist.ProcessGroup) -> float:
    """Return the time of matrix products beside collectives of `ms` on another stream, divided by their time alone."""
    factor = torch.randn(_WIDTH, _WIDTH, device=device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(_PRODUCTS):
            factor @ factor

    alone = slowest({"ms": milliseconds(products, device, 3)["ms_p50"]}, group)["ms"]
    side = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    products()
    end.record()
    with torch.cuda.stream(side):  # all ranks enqueue equally many collectives while the products run
        for _ in range(int(2 * alone / ms) + 1):
            call()
    synchronize(device)
    return round(begin.elapsed_time(end) / alone, 3)


def _kernels(call: Callable[[], object], device: torch.device) -> int:
    """Return the number of NCCL's kernels in a call: none if copy engines do the work."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        synchronize(device)
    on_gpu = [each.name for each in profiled.events() if str(each.device_type).endswith("CUDA")]
    return sum("nccl" in name and "Kernel" in name for name in on_gpu)


def _of_library(n: int, device: torch.device, group: dist.ProcessGroup) -> Iterator[Collective]:
    """Yield the collectives of the library's transport, over a communicator of its own."""
    transport = _transport(group, "own", dry=device.type == "cpu")
    ranks, r = group.size(), group.rank()
    full, other = torch.full((n,), -1.0, device=device), torch.full((n,), -1.0, device=device)
    rows, others = full.view(ranks, -1), [(r + step) % ranks for step in range(1, ranks)]
    everyone = range(ranks)
    rows[r] = r
    yield Collective(
        "all-gather", partial(transport.all_gather, full, _cut(full, transport), UNNAMED), lambda: rows, [*everyone]
    )
    full.fill_(r)
    yield Collective(
        "reduce-scatter",
        partial(transport.sum_scattered, full, other),
        lambda: other.view(ranks, -1)[:1],
        [sum(everyone)],
    )
    numbers = torch.arange(ranks, device=device, dtype=full.dtype).view(-1, 1)
    rows.copy_((ranks * r + numbers).expand_as(rows))
    received = [ranks * peer + r for peer in everyone]
    everything = partial(transport.all_to_all, other, full, [n // ranks] * ranks)
    yield Collective("all-to-all", everything, lambda: other.view(ranks, -1), received)
    staged = other[: n // ranks].fill_(-1)
    yield Collective(
        "all-to-all, one peer at a time",
        partial(transport._exchange_in_bucket, full, staged),
        lambda: torch.stack([staged, *(rows[peer] for peer in others[:-1])]),
        [received[peer] for peer in others[::-1]],
    )


def _by_copy_engines(n: int, device: torch.device, group: dist.ProcessGroup) -> Iterator[Collective]:
    """Yield a gather in symmetric memory over a communicator whose kernels may use no multiprocessor.

    See "Copy Engine Collectives" in PyTorch's page on symmetric memory. NCCL may fall back to kernels.
    """
    import torch.distributed._symmetric_memory as symmetric

    options = dist.ProcessGroupNCCL.Options()
    options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    zero = dist.new_group(backend="nccl", pg_options=options)
    dist.all_reduce(torch.ones(1, device=device), group=zero)  # creates the communicator, which `rendezvous` needs
    symmetric.set_backend("NCCL")
    full = symmetric.empty(n, dtype=torch.float32, device=device).fill_(-1)
    symmetric.rendezvous(full, zero.group_name)
    rows = full.view(group.size(), -1)
    rows[group.rank()] = group.rank()
    transport = _transport(zero, "group", dry=device.type == "cpu")
    call = partial(transport.all_gather, full, _cut(full, transport), UNNAMED)
    yield Collective("all-gather by copy engines", call, lambda: rows, [*range(group.size())])
