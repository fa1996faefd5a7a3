"""Measure the work of the host in a training step: wall time, CPU time, launches and Python calls, per block.

    python -m bench.host --ranks 2

starts two ranks. Rows go to `bench/results/host-Nranks.jsonl`, one JSON object per system.

    python -m bench.host --fake 8 64 512

instead simulates rank 0 of 8, 64 and 512 ranks (`shardlite.lab.fake.fake_group`). No data is sent, so only the host
works. The command also measures sliced reductions of the gradients of a block of Llama 3 8B. Each slice has as few
elements as possible, because moving elements is the GPU's work. These rows go to `bench/results/host-fake.jsonl`. The
command leaves out launches by Triton and NCCL, events, kept buffers, clipping and casts to bf16, and blocks of `many`
have 4 parameters. So it predicts no time on a GPU. It shows how work grows with the number of ranks.

    python -m bench.host --gpu-path

counts the work per block on the code path of a GPU, and times launches of kernels (`bench.gpu_path`). It prints tables;
`--json FILE` also writes the rows. `--gpu-path counts --json bench/results/host-gpu-path.jsonl` records the counts that
a test compares. This needs Triton and transformers.

| key | meaning |
|---|---|
| `us_per_unit_p20`, `_p50`, `_p80` | microseconds of wall time per block in a step, with waiting, on the slowest rank |
| `main_us_per_unit_p50` | microseconds of CPU time of the main thread in a step, per block |
| `calls_per_step` | number of Python functions that the main thread enters in a step |
| `us_vs_fsdp2` | `us_per_unit_p50` divided by that of FSDP2 |
| `cpu_us_per_unit_p20`, `_p50`, `_p80` | microseconds of CPU time of a step, per block, on a simulated rank |
| `launches_per_unit` | number of kernels, copies and collectives per block that a step launches, in total |
| `cpu_vs_fsdp2` | `cpu_us_per_unit_p50` divided by that of FSDP2 |
| `cpu_us_p20`, `_p50`, `_p80` | microseconds of CPU time of one reduction of the block |
| `launches` | number of kernels, copies and collectives that one reduction of the block launches |
| `staging_bytes` | bytes of the temporary buffer that the reduction needs on a GPU |

The model `many` has 48 blocks that take almost no time to compute, so a step is mostly the library's work around the
blocks. On real ranks, the results of all systems are first compared (`shardlite.lab.compared.check`). Systems take
turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from time import process_time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardlite.comm.collectives import StoreMean, reduce_scatter, staging_numel
from shardlite.comm.transport.group_collectives import NcclCollectives
from shardlite.comm.transport.staging import MOST_CALLS, SHORTEST, rows_numel
from shardlite.config import Route
from shardlite.lab.compared.check import verify
from shardlite.lab.compared.systems import OPTIMIZER, SYSTEMS, TRANSPORTS
from shardlite.lab.compared.trainer import Trainer
from shardlite.lab.compared.workloads import LLAMA_BLOCK_NUMEL, WORKLOADS, Batch, Workload
from shardlite.lab.fake.fake_group import all_reduce_bucket, as_over_nccl, connect_as_over_nccl, fake_group, launches
from shardlite.lab.memory.machine import machine
from shardlite.lab.ranks import on_ranks, parser_of
from shardlite.lab.table import Row, report, write_rows
from shardlite.lab.timer import WARM_UP, percentile, quantiles, rotated, seconds, time_steps

CHOSEN = ("floor", "ddp", "fsdp2", "stage0", "stage3")
CHOSEN_ON_FAKE = ("floor", "ddp", "fsdp2", *TRANSPORTS)
COUNTED = 5
"""Number of steps over which Python calls are averaged."""

_FP32 = 4  # bytes


def measure(workload: Workload, rounds: int, group: dist.ProcessGroup) -> list[Row]:
    """Verify and time the systems on one workload, and return a row for each system. Collective."""
    systems = {name: SYSTEMS[name] for name in CHOSEN}
    verify(workload, systems, group)
    trainers = {name: build(workload, group) for name, build in systems.items()}
    taken = time_steps(workload, trainers, rounds, group)
    calls = {name: calls_per_step(trainer, workload.batch(group.rank(), 0)) for name, trainer in trainers.items()}
    units = _units(trainers["floor"], workload)
    rows: list[Row] = []
    for name, times in taken.items():
        wall, main = ([1e6 * each / units for each in spent] for spent in (times.wall, times.main))
        rows.append(
            {
                **_setting("host", workload, units, rounds, group),
                "system": name,
                **quantiles("us_per_unit", wall, 1),
                "main_us_per_unit_p50": round(percentile(main, 50), 1),
                "calls_per_step": round(calls[name]),
            }
        )
    return _beside_fsdp2(rows, "us_per_unit_p50", "us_vs_fsdp2")


def measure_on_fake(workload: Workload, rounds: int, world_size: int) -> list[Row]:
    """Count launches and measure CPU time on rank 0 of a fake group. Return a row for each system."""
    with fake_group(world_size) as group, as_over_nccl():
        trainers = {name: {**SYSTEMS, **TRANSPORTS}[name](workload, group) for name in CHOSEN_ON_FAKE}
        ddp = trainers["ddp"].model
        assert isinstance(ddp, DistributedDataParallel)
        ddp.register_comm_hook(None, all_reduce_bucket)
        times: Mapping[str, list[float]] = {name: [] for name in trainers}
        batch = workload.batch(0, 0)
        for turn in range(WARM_UP + rounds):
            for name in rotated(list(trainers), turn):
                before = process_time()
                trainers[name].step(batch)
                times[name].append(process_time() - before)
        units = _units(trainers["floor"], workload)
        rows: list[Row] = []
        for name, trainer in trainers.items():
            spent = [1e6 * each / units for each in times[name][WARM_UP:]]
            rows.append(
                {
                    **_setting("host-fake", workload, units, rounds, group),
                    "system": name,
                    **quantiles("cpu_us_per_unit", spent, 1),
                    "launches_per_unit": round(launches(lambda trainer=trainer: trainer.step(batch)) / units, 2),
                }
            )
    return _beside_fsdp2(rows, "cpu_us_per_unit_p50", "cpu_vs_fsdp2")


def measure_block_on_fake(rounds: int, world_size: int) -> list[Row]:
    """Measure reductions of a block's gradients on rank 0 of a fake group. Return a row for each kind of reduction."""
    shard = -(-LLAMA_BLOCK_NUMEL // world_size)
    staged = rows_numel(shard, world_size, _FP32)
    rows: list[Row] = []
    with fake_group(world_size) as group, as_over_nccl():
        for reduce in ("exact", "fast"):
            transport = connect_as_over_nccl(group, Route(transport="collectives", reduce=reduce))
            assert isinstance(transport, NcclCollectives)
            transport.slice_nbytes = 1  # exchanges inside the bucket, with the real number of calls
            full, out = torch.zeros(world_size * MOST_CALLS * SHORTEST), torch.zeros(MOST_CALLS * SHORTEST)
            staging = torch.zeros(staging_numel(len(full), transport, full.dtype))
            call = partial(reduce_scatter, full, transport, last=StoreMean(out, world_size), staging=staging)
            spent = [1e6 * seconds(call, full.device)[1] for _ in range(WARM_UP + rounds)][WARM_UP:]
            launched = launches(call)
            rows.append(
                {
                    "bench": "host-block",
                    "words": f"reduction of {LLAMA_BLOCK_NUMEL:,} gradients in fp32, a block of Llama 3 8B",
                    "reduce": reduce,
                    "ranks": world_size,
                    "collectives": launched - 1 if reduce == "exact" else 1,
                    "staging_bytes": _FP32 * (staged if reduce == "exact" else shard),
                    "threads": torch.get_num_threads(),
                    "rounds": rounds,
                    **machine(),
                    **quantiles("cpu_us", spent, 1),
                    "launches": launched,
                }
            )
    return rows


def _beside_fsdp2(rows: Sequence[Row], key: str, ratio: str) -> list[Row]:
    """Return the rows with an additional key `ratio`: the value of `key` divided by FSDP2's."""
    fsdp2 = next(row for row in rows if row["system"] == "fsdp2")
    return [{**row, ratio: round(row[key] / fsdp2[key], 3)} for row in rows]


def _units(trainer: Trainer, workload: Workload) -> int:
    """Return the number of blocks of the model."""
    return len(workload.units(trainer.model))


def _setting(bench: str, workload: Workload, units: int, rounds: int, group: dist.ProcessGroup) -> Row:
    """Return the keys that all rows of a run share."""
    told = {"units": units, "optimizer": OPTIMIZER, "threads": torch.get_num_threads(), "rounds": rounds}
    return workload.row(bench, group.size(), **told)


def calls_per_step(trainer: Trainer, batch: Batch) -> float:
    """Return the average number of Python functions that the main thread enters in a step."""
    entered = 0

    def count(_: FrameType, event: str, __: Any) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(COUNTED):
            trainer.step(batch)
    finally:
        sys.setprofile(None)
    return entered / COUNTED


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or measure if a launcher started this process as a rank. Return the exit status."""
    options = parser_of("bench.host").parse_args(arguments)
    torch.set_num_threads(1)
    if options.gpu_path is not None:
        from bench import gpu_path  # imports FSDP2 and the library's internals

        rows = gpu_path.measure(options.gpu_path)
        if options.json:
            write_rows(rows, options.json)
        print(gpu_path.render(rows), flush=True)
        return 0
    if options.fake:
        torch.set_flush_denormal(True)  # on a fake group, weights have meaningless values
        every = [row for ranks in options.fake for row in measure_on_fake(WORKLOADS["many"], options.steps, ranks)]
        every += [row for ranks in options.fake for row in measure_block_on_fake(10 * options.steps, ranks)]
        report(every, options.out / "host-fake.jsonl")
        return 0
    return on_ranks("bench.host", options.ranks, arguments, partial(_run_rank, options))


def _run_rank(options: argparse.Namespace, group: dist.ProcessGroup) -> None:
    """Measure as one of the ranks."""
    rows = [row for name in options.model for row in measure(WORKLOADS[name], options.steps, group)]
    if group.rank() == 0:
        report(rows, options.out / f"host-{options.ranks}ranks.jsonl")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
