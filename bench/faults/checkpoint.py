"""Measure saving of checkpoints: how long training waits, and the rate at which bytes reach the disk.

    python -m bench.faults.checkpoint --ranks 2

starts two ranks. Rows go to `bench/results/checkpoint-MODEL-Nranks.jsonl`, one JSON object per system.

| system | each rank |
|---|---|
| `raw` | writes as many bytes as its shard and moments have, from memory to a file of its own |
| `raw, early` | writes like `raw`, but starts to flush each block before it writes the next block, as `save` does |
| `torch.save` | writes its shards and moments with `torch.save`; only the same number of ranks can load them |
| `fsdp2` | calls `torch.distributed.checkpoint.save` with an FSDP2 model and its optimizer |
| `save` | calls `shardlite.save` |
| `async_save` | calls `shardlite.async_save`, and waits for its result |
| `save_in_memory` | calls `shardlite.save_in_memory`, which writes no file; requires ranks that `torchrun` started |

Each save writes new files, and is finished when these files are on the disk (`fsync`). Before the measurement, a
checkpoint that `save` wrote is loaded into a second model, and both models are compared. Systems take turns.

| key | meaning |
|---|---|
| `bytes` | bytes of weights and moments of all ranks |
| `seconds_p20`, `_p50`, `_p80` | seconds until the checkpoint is on the disk, on the slowest rank |
| `stall_p50` | seconds until the call returns, on the slowest rank |
| `load_p50` | seconds to load the checkpoint, on the slowest rank; only for `fsdp2` and `save` |
| `mb_per_s` | `bytes` divided by `seconds_p50`, in 1e6 bytes per second of all ranks together |
| `vs_raw` | `mb_per_s` divided by that of `raw` |
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shardlite import AdamW, ShardLite, async_save, load, save, save_in_memory
from shardlite.checkpoint import BLOCK, begin_writeback
from shardlite.lab.compared.systems import SYSTEMS
from shardlite.lab.compared.workloads import WORKLOADS, Workload
from shardlite.lab.ranks import run_bench
from shardlite.lab.table import Row, report
from shardlite.lab.timer import largest, percentile, quantiles, rotated

Save = Callable[[Path], "Future[Path] | None"]
"""Function that saves to a new folder. The future completes when an asynchronous save has finished."""

WARM_UP = 1


def measure(workload: Workload, rounds: int, folder: Path, group: dist.ProcessGroup) -> list[Row]:
    """Verify and time the systems, and return a row for each system. Collective; all ranks pass the same folder."""
    ours, theirs = (SYSTEMS[name](workload, group) for name in ("stage3", "fsdp2"))
    for trainer in (ours, theirs):
        trainer.step(workload.batch(group.rank(), 0))
    model, optimizer = ours.model, ours.optimizer
    assert isinstance(model, ShardLite)
    assert isinstance(optimizer, AdamW)
    save(folder / "verified", model, optimizer)
    verify(workload, model, optimizer, folder / "verified", group)
    shards = [*(param.detach() for param in model.parameters()), *_moments(model, optimizer)]
    nbytes = sum(shard.nbytes for shard in shards)
    told = torch.tensor(nbytes)
    dist.all_reduce(told, group=group)
    elements = torch.cat([shard.reshape(-1) for shard in shards])
    systems: dict[str, Save] = {
        "raw": lambda path: _write(path, group.rank(), elements),
        "raw, early": lambda path: _write_early(path, group.rank(), elements),
        "torch.save": lambda path: _torch_save(path, group.rank(), {str(i): s for i, s in enumerate(shards)}),
        "fsdp2": lambda path: _dcp_save(path, theirs),
        "save": lambda path: _nothing(save(path, model, optimizer)),
        "async_save": lambda path: async_save(path, model, optimizer),
    }
    copies = count(1)
    if save_in_memory(folder / "copies", model, optimizer, step=0):
        verify(workload, model, optimizer, folder / "copies", group)
        systems["save_in_memory"] = lambda _: _copy(folder / "copies", model, optimizer, next(copies))
    loads: dict[str, Callable[[Path], object]] = {
        "fsdp2": lambda path: _dcp_load(path, theirs),
        "save": lambda path: load(path, model, optimizer),
    }
    loaded: Mapping[str, list[float]] = {name: [] for name in loads}
    stalls: Mapping[str, list[float]] = {name: [] for name in systems}
    ends: Mapping[str, list[float]] = {name: [] for name in systems}
    for turn in range(WARM_UP + rounds):
        for name in rotated(list(systems), turn):
            place = folder / f"{name}-{turn}"
            dist.barrier(group)
            begin = perf_counter()
            running = systems[name](place)
            stalls[name].append(perf_counter() - begin)
            if running is not None:
                running.result()
            ends[name].append(perf_counter() - begin)
            dist.barrier(group)
            if name in loads:
                begin = perf_counter()
                loads[name](place)
                loaded[name].append(perf_counter() - begin)
                dist.barrier(group)
            if group.rank() == 0 and place.exists():
                shutil.rmtree(place)
    rows: list[Row] = []
    for name in systems:
        spent = largest(ends[name][WARM_UP:], group)
        rows.append(
            {
                **workload.row("checkpoint", group.size(), rounds=rounds),
                "system": name,
                "bytes": int(told),
                **quantiles("seconds", spent, 4),
                "stall_p50": round(percentile(largest(stalls[name][WARM_UP:], group), 50), 4),
                "mb_per_s": round(int(told) / 1e6 / percentile(spent, 50), 1),
            }
        )
        if name in loads:
            rows[-1]["load_p50"] = round(percentile(largest(loaded[name][WARM_UP:], group), 50), 4)
    raw = rows[0]["mb_per_s"]
    return [{**row, "vs_raw": round(row["mb_per_s"] / raw, 3)} for row in rows]


def verify(workload: Workload, model: ShardLite, optimizer: AdamW, path: Path, group: dist.ProcessGroup) -> None:
    """Load the checkpoint into another model, and compare the two models.

    Raises:
        AssertionError: If a weight or a moment differs.
    """
    other = SYSTEMS["stage3"](workload, group)
    assert isinstance(other.model, ShardLite)
    load(path, other.model, other.optimizer)
    for mine, its in zip(model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    for mine, its in zip(_moments(model, optimizer), _moments(other.model, other.optimizer), strict=True):
        assert torch.equal(mine, its)


def _moments(model: ShardLite, optimizer: Any) -> list[torch.Tensor]:
    return [optimizer.state[param][key] for param in model.parameters() for key in ("exp_avg", "exp_avg_sq")]


def _write(path: Path, rank: int, elements: torch.Tensor) -> None:
    path.mkdir(exist_ok=True)
    with (path / str(rank)).open("xb", buffering=0) as file:
        view = memoryview(elements.numpy()).cast("B")
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def _write_early(path: Path, rank: int, elements: torch.Tensor) -> None:
    path.mkdir(exist_ok=True)
    view = memoryview(elements.numpy()).cast("B")
    with (path / str(rank)).open("xb", buffering=0) as file:
        for begin in range(0, len(view), BLOCK):
            file.write(view[begin : begin + BLOCK])
            begin_writeback(file.fileno(), begin)
        os.fsync(file.fileno())


def _torch_save(path: Path, rank: int, state: Mapping[str, torch.Tensor]) -> None:
    path.mkdir(exist_ok=True)
    with (path / str(rank)).open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _dcp_save(path: Path, trainer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def _dcp_load(path: Path, trainer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(trainer.model, trainer.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def _copy(path: Path, model: ShardLite, optimizer: AdamW, step: int) -> None:
    assert save_in_memory(path, model, optimizer, step=step)


def _nothing(_: object) -> None:
    """Discard the result of a synchronous save."""


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or measure if a launcher started this process as a rank. Return the exit status."""
    return run_bench("bench.faults.checkpoint", arguments, _run_rank)


def _run_rank(options: argparse.Namespace, group: dist.ProcessGroup) -> None:
    """Measure as one of the ranks."""
    folder = (options.folder or Path(tempfile.gettempdir())) / f"shardlite-bench-{os.getppid()}"
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier(group)
    try:
        rows = measure(WORKLOADS[options.model], options.rounds, folder, group)
    finally:
        if group.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if group.rank() == 0:
        report(rows, options.out / f"checkpoint-{options.model}-{options.ranks}ranks.jsonl")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
