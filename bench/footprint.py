"""What a training step holds in memory: ShardLite in all stages and formats, FSDP1, FSDP2, DDP, ZeRO-1, plain.

    python -m bench.footprint --ranks 2 --model gpt2

starts new processes for each system. Rows go to `bench/results/footprint-MODEL-Nranks.jsonl`, one JSON object a system.
All sizes are bytes of one rank, above what it held after the imports and the start of the process group:

| key | what it is |
|---|---|
| `wrap_peak_bytes`, `made_bytes`, `wrapped_bytes` | while the model is made and wrapped at most; made; wrapped |
| `pss_bytes` | the most in a step: proportional set size, mean of the ranks |
| `pss_vs_fsdp2` | that as a part of FSDP2's |
| `between_bytes` | the same between two steps |
| `tensor_bytes` | the most bytes in tensors in a step, on rank 0 |
| `purposes` | what `memory()` says at that moment; the rest are activations, and gradients on their way |
| `pss_purposes` | what `memory()` says at the moment of `pss_bytes`, mean of the ranks |
| `weight_bytes`, `compute` | of the plain model, in the dtype that it computes in |
| `unexplained` | the part of `pss_bytes` that is not in `pss_purposes`, nor beside the weights in `activations` |

`activations` are forward and backward of the plain model alone, without its gradients: autograd's own memory, the
libraries' buffers and code that is loaded then are in it, too.

By default `malloc` returns large blocks to the system as soon as they are freed (`MALLOC_MMAP_THRESHOLD_`), so that
what is measured is what systems hold, and not how `malloc` cuts it up. `--malloc default` leaves it as it is.
`--busy N` runs N loops beside.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bench.support.machine import machine
from bench.support.measure import WARM_UP
from bench.support.ranks import one_of_them, start_ranks
from bench.support.systems import FOOTPRINTS, OPTIMIZER, Trainer
from bench.support.table import RESULTS, Columns, Row, cells_of, markdown_table, read_rows
from bench.support.workloads import WORKLOADS, Workload
from shardlite import ShardLite
from shardlite.telemetry.meter import Meter

_PAUSE = 0.002
"""Seconds between two looks at `memory()`."""

STEPS = 3
"""Steps that are sampled; the largest counts."""

THRESHOLD = 1 << 18
"""Bytes from which on a block is mapped by itself, and so returned when it is freed."""

_MALLOC = {"returns": "malloc returns large blocks", "default": "malloc as it is by default"}

_COLORS = ("#4e79a7", "#59a14f", "#f28e2b", "#edc948", "#9c755f", "#76b7b2", "#e15759", "#b07aa1", "#ff9da7", "#86bcb6")
_GREYS = ("#dddddd", "#999999")

_NO_TENSORS = ("mailboxes", "idle shared memory")
"""Purposes of memory that no tensor has."""

_VISIBLE = 0.005
"""The least part of the longest bar that has a color of its own."""

_COLUMNS: Columns = {
    "system": lambda row: str(row["system"]),
    "step, MiB": lambda row: _mib(row["pss_bytes"]),
    "/ FSDP2's": lambda row: f"{row['pss_vs_fsdp2']:.2f}" if "pss_vs_fsdp2" in row else "",
    "tensors, MiB": lambda row: _mib(row["tensor_bytes"]),
    "between steps, MiB": lambda row: _mib(row["between_bytes"]),
    "made, MiB": lambda row: _mib(row["made_bytes"]),
    "wrapping, MiB": lambda row: _mib(row["wrap_peak_bytes"]),
    "unexplained": lambda row: f"{100 * row['unexplained']:+.1f} %" if "unexplained" in row else "",
}

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(THRESHOLD), "TRANSFORMERS_VERBOSITY": "error"}

_ACTIVATIONS = "activations"
"""How the systems' names begin that are forward and backward alone."""

_ROW = "row.json"
"""Where the ranks of one system leave what they measured."""


class Sampler:
    """The proportional set size of all ranks of a group, above what it was at the start. All ranks call its methods."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        processes: list[int] = [0] * group.size()
        dist.all_gather_object(processes, os.getpid(), group=group)
        self._program = None
        if group.rank() == 0:
            command = [
                sys.executable,
                "-S",
                "-E",
                str(Path(__file__).parent / "support" / "pss.py"),
                *map(str, processes),
            ]
            self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._start = self.when = 0
        self._start = self.take()[1]

    def take(self) -> tuple[int, int]:
        """Return the most since the last call and what is held now, in bytes, means of the ranks.

        `when` is the moment of the most, in nanoseconds of the monotonic clock.
        """
        dist.barrier(self._group)
        answer = [0, 0, 0, 0]
        if self._program is not None:
            assert self._program.stdin is not None
            assert self._program.stdout is not None
            print(file=self._program.stdin, flush=True)
            answer = [int(word) for word in self._program.stdout.readline().split()]
        dist.broadcast_object_list(answer, 0, group=self._group)
        peak, now, _, self.when = answer
        return peak // self._group.size() - self._start, now // self._group.size() - self._start

    def close(self) -> None:
        """End the program."""
        if self._program is not None:
            self._program.communicate()


class Account:
    """What `memory()` of this rank says while the block runs, again and again. Systems without it say nothing.

    It looks from another thread, and so at the counters alone: `memory()` itself reads gradients, which the backward
    may be writing. Those counters know all tensors that one call of it has seen.
    """

    def __init__(self, model: nn.Module) -> None:
        _purposes(model)
        self._context = model._context if isinstance(model, ShardLite) else None
        self._said: list[tuple[int, dict[str, int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Account:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def mean_at(self, when: int, group: dist.ProcessGroup) -> dict[str, int]:
        """Return the bytes by purpose at a moment of the monotonic clock, means of the ranks. All ranks call it."""
        own = self._said[max(0, bisect(self._said, when, key=itemgetter(0)) - 1)][1]
        said: list[dict[str, int]] = [own] * group.size()
        dist.all_gather_object(said, own, group=group)
        return {purpose: sum(each.get(purpose, 0) for each in said) // len(said) for purpose in own}

    def _watch(self) -> None:
        over = False
        while not over:  # at least once, however short the block is
            held = self._context.held() if self._context else {}
            now = {purpose: each.now for purpose, each in held.items() if each.now}
            self._said.append((time.monotonic_ns(), now))
            over = self._over.wait(_PAUSE)


def measure(workload: Workload, system: str, group: dist.ProcessGroup) -> Row:
    """Train one system for a few steps; return its row. To be called by every rank."""
    parameters = workload.parameters()  # on the meta device, so that what this imports is not measured
    gc.collect()
    sampler = Sampler(group)
    made = workload.model()
    _, made_bytes = sampler.take()
    del made
    gc.collect()
    sampler.take()
    trainer = FOOTPRINTS[system](workload, group)
    wrap_peak, wrapped = sampler.take()
    for step in range(WARM_UP):
        trainer.step(workload.batch(group.rank(), step))
    sampler.take()
    with Account(trainer.model) as account:
        for step in range(WARM_UP, WARM_UP + STEPS):
            trainer.step(workload.batch(group.rank(), step))
        peak, between = sampler.take()
    sampler.close()
    tensors, purposes = _tensors(trainer, workload, group)
    compute = _compute(trainer.model)
    return {
        "bench": "footprint",
        "model": workload.name,
        "words": workload.words,
        "parameters": parameters,
        "optimizer": OPTIMIZER,
        "ranks": group.size(),
        "threads": torch.get_num_threads(),
        **machine(),
        "system": system,
        "made_bytes": made_bytes,
        "wrap_peak_bytes": wrap_peak,
        "wrapped_bytes": wrapped,
        "pss_bytes": peak,
        "between_bytes": between,
        "tensor_bytes": tensors,
        "purposes": purposes,
        "pss_purposes": account.mean_at(sampler.when, group),
        "weight_bytes": parameters * compute.itemsize,
        "compute": str(compute).removeprefix("torch."),
    }


def _tensors(trainer: Trainer, workload: Workload, group: dist.ProcessGroup) -> tuple[int, dict[str, int]]:
    """Return the most bytes in tensors during one more step, and at that moment the bytes by purpose."""
    batch = workload.batch(group.rank(), WARM_UP + STEPS)
    gc.collect()
    with Meter(on_peak=lambda: _purposes(trainer.model)) as meter:
        trainer.step(batch)
    return meter.peak, meter.at_peak or {}


def _purposes(model: nn.Module) -> dict[str, int]:
    """Return the bytes by purpose that this rank holds now."""
    held = model.memory() if isinstance(model, ShardLite) else {}
    return {purpose: each.now for purpose, each in held.items() if each.now}


def _compute(model: nn.Module) -> torch.dtype:
    """Return the dtype of forward and backward."""
    own = model.precision.compute if isinstance(model, ShardLite) else None
    return own or next(model.parameters()).dtype


def compared(rows: list[Row]) -> list[Row]:
    """Add to each row how it compares with FSDP2, and what of it nothing explains."""
    by_name = {row["system"]: row for row in rows}
    beside = {
        row["compute"]: row["pss_bytes"] - row["weight_bytes"] for row in rows if row["system"].startswith(_ACTIVATIONS)
    }
    for row in rows:
        if "fsdp2" in by_name:
            row["pss_vs_fsdp2"] = round(row["pss_bytes"] / by_name["fsdp2"]["pss_bytes"], 3)
        if row["pss_purposes"] and row["compute"] in beside:
            explained = sum(row["pss_purposes"].values()) + beside[row["compute"]]
            row["unexplained"] = round((row["pss_bytes"] - explained) / row["pss_bytes"], 3)
    return rows


def render(rows: Sequence[Row]) -> str:
    """One table for each run."""
    return "\n\n".join(_render_run(list(run)) for _, run in groupby(rows, key=_run))


def _render_run(rows: list[Row]) -> str:
    return f"{_heading(rows[0])}\n\n{markdown_table(cells_of(_COLUMNS, rows))}"


def _heading(row: Row) -> str:
    """What is common to all rows of a run."""
    beside = f", {row['busy']} busy loops beside" * bool(row["busy"])
    return (
        f"{row['words']} per rank, {row['parameters'] / 1e6:.1f}M parameters; {row['ranks']} CPU ranks{beside}; "
        f"{_MALLOC[row['malloc']]}; {row['machine']}, torch {row['torch']}, {row['date']}."
    )


def paint(rows: Sequence[Row], file: Path) -> None:
    """Draw a bar for each system: its tensors at their peak by purpose, then what else the process held."""
    from matplotlib.figure import Figure  # slow to import, and not everybody has it

    least = _VISIBLE * max(row["pss_bytes"] for row in rows)
    held = [(purpose, nbytes) for row in rows for purpose, nbytes in row["purposes"].items()]
    purposes = list(dict.fromkeys(purpose for purpose, nbytes in held if nbytes >= least))
    parts = [*purposes, "activations, gradients on their way", "not in tensors"]
    colors = [*_COLORS[: len(purposes)], *_GREYS]
    figure = Figure(figsize=(8, 0.6 + 0.36 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(rows)
    for i, part in enumerate(parts):
        sizes = [_part(row, part, parts) / 2**20 for row in rows]
        axes.barh([row["system"] for row in rows], sizes, left=left, label=part, color=colors[i])
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="MiB per rank", title=f"{rows[0]['words']}, {rows[0]['ranks']} ranks")
    axes.title.set_fontsize(9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file)


def _part(row: Row, part: str, parts: Sequence[str]) -> int:
    """The bytes of one part of a bar. Of systems that keep no account all tensors are one part."""
    purposes: dict[str, int] = row["purposes"]
    idle = sum(purposes.get(each, 0) for each in _NO_TENSORS)
    if part == parts[-1]:
        return max(0, int(row["pss_bytes"]) - int(row["tensor_bytes"]) - idle)
    if part == parts[-2]:
        return int(row["tensor_bytes"]) - sum(purposes.values()) + idle
    return purposes.get(part, 0)


def _run(row: Row) -> tuple[object, ...]:
    return row["model"], row["ranks"], row["malloc"], row["busy"]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f}"


@contextmanager
def _busy(loops: int) -> Iterator[None]:
    """Let some loops run beside."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.footprint", description="memory of a step, by system")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (%(default)s)")
    parser.add_argument("--model", choices=list(WORKLOADS), default="gpt2", help="(%(default)s)")
    parser.add_argument("--systems", nargs="+", choices=list(FOOTPRINTS), default=list(FOOTPRINTS), help="(all)")
    parser.add_argument("--malloc", choices=["returns", "default"], default="returns", help="(%(default)s)")
    parser.add_argument("--busy", type=int, default=0, help="loops that run beside (%(default)s)")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="only print the tables of these rows")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the rows, too; needs matplotlib")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the rows (%(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure one system, as one rank if a launcher started this process, else all, by starting the ranks of each."""
    options = _options(arguments)
    if "RANK" in os.environ:
        _run_rank(options)
        return 0
    rows = read_rows(options.table) if options.table else _run_all(options)
    print(render(rows))
    if options.figure:
        paint(rows, options.figure)
    return 0


def _run_rank(options: argparse.Namespace) -> None:
    """Be one of the ranks of one system."""
    with one_of_them() as group:
        row = measure(WORKLOADS[options.model], options.systems[0], group)
        if group.rank() == 0:
            (options.out / _ROW).write_text(json.dumps(row))


def _run_all(options: argparse.Namespace) -> list[Row]:
    """Measure one system after the other, and write the rows."""
    options.out.mkdir(parents=True, exist_ok=True)
    if options.malloc == "returns":
        os.environ.update(ENVIRONMENT)
    rows = []
    for system in options.systems:
        given = ["--model", options.model, "--systems", system, "--out", str(options.out)]
        with _busy(options.busy):
            status = start_ranks("bench.footprint", options.ranks, given)
        if status:
            sys.exit(f"{system} ended with status {status}")
        rows.append({**json.loads((options.out / _ROW).read_text()), "malloc": options.malloc, "busy": options.busy})
        (options.out / _ROW).unlink()
    rows = compared(rows)
    words = [options.model, f"{options.ranks}ranks"]
    words += ["default-malloc"] * (options.malloc == "default") + ["busy"] * bool(options.busy)
    file = options.out / f"footprint-{'-'.join(words)}.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
