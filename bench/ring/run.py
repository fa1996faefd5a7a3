"""Verify the collectives of ShardLite and of gloo (NCCL on GPUs), then time them in turn.

    python -m bench.ring --ranks 2 4

starts two ranks, then four. In `bench/results/ring-DEVICE.jsonl`, new rows replace the rows of the same number of
ranks. There is one JSON object (`"bench": "ring"`) per operation, size and system. The peer is gloo or NCCL.

| key | meaning |
|---|---|
| `nbytes` | bytes of the whole buffer, `S`: the output of a gather, the input of a reduction |
| `ms_p20`, `ms_p50`, `ms_p80` | milliseconds from the common start, on the slowest rank; on GPUs measured with events |
| `cpu_ms_p50` | CPU milliseconds of all threads, hardly affected by other programs, on the rank with the most |
| `algbw_gbps`, `busbw_gbps` | `S/t`, with the median time `t`; `S/t` times `(W-1)/W`, or `2(W-1)/W` in an all-reduce |
| `speedup` | the peer's time divided by this system's, in the same round; the median over rounds |
| `cpu_speedup` | the peer's `cpu_ms_p50` divided by this system's |
| `messages`, `sent_bytes` | messages and bytes of the rank that sends the most; only for ShardLite |
| `predicted_ms`, `prediction_error` | time predicted by the fitted link; its relative excess over the measured time |
| `goal`, `reached` | the intended `speedup`, and whether it was reached |
| `load` | load average of the machine in the minute before the size was measured |

For each transport there are two more rows (`"bench": "ring-fit"`) with the link (`shardlite.plan`) that
best explains the transport's times (`key` names the kind of time), and with the error of the fit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from random import Random
from statistics import median

import torch
import torch.distributed as dist

from bench.ring.cases import GLOO, NCCL, OPERATIONS, Case, System, cases
from bench.ring.fit import fit, predicted
from shardlite.cli.doctor.trials import start_together
from shardlite.comm.chunking import CHUNK_BYTES
from shardlite.comm.schedule import IN_RING_ORDER
from shardlite.comm.transport.shared_memory.transport import SharedMemoryTransport
from shardlite.config import Algorithm, TransportName
from shardlite.lab.memory.machine import machine
from shardlite.lab.ranks import device_of_rank, run_bench
from shardlite.lab.table import Row, differences, markdown_table, replace_rows, where
from shardlite.lab.timer import Times, percentile, seconds
from shardlite.plan import LINKS

TRANSPORTS: tuple[TransportName, ...] = ("shared_memory", "p2p")

_WARM_UP = 2
_SHORT = 1 << 20  # bytes: calls with at most this size are short, and are repeated more often
_MORE = 5
_DIGITS = 4


def measure(
    sizes: Sequence[int],
    systems: Sequence[System],
    rounds: int,
    group: dist.ProcessGroup,
    device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
) -> list[Row]:
    """Verify and time all systems at all sizes, and return a row for each system and link. Collective.

    Raises:
        ResultError: If a system computes a wrong result. Nothing more is measured then.
    """
    rows: list[Row] = []
    for nbytes in sizes:
        numel = -(-nbytes // (4 * group.size())) * group.size()
        load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
        todo = cases(systems, numel, group, device)
        for case in todo:
            case.verify()
        count = rounds * (_MORE if nbytes <= _SHORT else 1)
        taken = time_cases(todo, count, group)
        rows += [_row(case, taken, i, group) | {"rounds": count, "load": load} for i, case in enumerate(todo)]
    rows.sort(key=lambda row: OPERATIONS.index(row["operation"]))
    return rows + _fitted(rows)


def time_cases(todo: Sequence[Case], rounds: int, group: dist.ProcessGroup) -> list[Times]:
    """Call each case once per round, in a random order that is the same on all ranks.

    Times are those of the slowest rank.
    """
    taken = [Times() for _ in todo]
    for turn in range(_WARM_UP + rounds):
        for place in Random(turn).sample(range(len(todo)), len(todo)):
            todo[place].fill()
            start_together(group)
            wall, cpu = seconds(todo[place].call, todo[place].full.device)
            if turn >= _WARM_UP:
                taken[place].wall.append(wall)
                taken[place].cpu.append(cpu)
    flat = torch.tensor([[times.wall, times.cpu] for times in taken], dtype=torch.float64)
    dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
    return [Times(wall, cpu) for wall, cpu in flat.tolist()]


def _row(case: Case, taken: Sequence[Times], place: int, group: dist.ProcessGroup) -> Row:
    """Return the row of one case. The first case of an operation is the peer's."""
    world_size, nbytes, wall = group.size(), case.full.nbytes, taken[place].wall
    peer = taken[OPERATIONS.index(case.operation)]
    cpu, peers_cpu = (1e3 * percentile(times.cpu, 50) for times in (taken[place], peer))
    ms = {f"ms_p{percent}": 1e3 * percentile(wall, percent) for percent in (20, 50, 80)}
    algbw = nbytes / ms["ms_p50"] / 1e6
    speedup = median(theirs / ours for theirs, ours in zip(peer.wall, wall, strict=True))
    goal = goal_of(case.operation, case.system, nbytes)
    return {
        "bench": "ring",
        "operation": case.operation,
        "transport": case.system.transport,
        "algorithm": case.system.algorithm,
        "ranks": world_size,
        "threads": torch.get_num_threads(),
        "nbytes": nbytes,
        "chunk_bytes": None if case.tally is None else CHUNK_BYTES,
        **_rounded(ms | {"cpu_ms_p50": cpu}),
        **_rounded({"algbw_gbps": algbw, "busbw_gbps": algbw * _shares_moved(case) * (world_size - 1) / world_size}),
        "speedup": round(speedup, 3),
        "cpu_speedup": round(peers_cpu / cpu, 3),
        **_sent(case, group),
        "predicted_ms": None,
        "prediction_error": None,
        "goal": goal,
        "reached": None if goal is None else speedup >= goal,
        **machine(case.full.device),
    }


def goal_of(operation: str, system: System, nbytes: int) -> float | None:
    """Return the `speedup` that a system should reach, if there is a goal."""
    if system == System("p2p", "ring") and operation == "reduce-scatter":
        return 1.0
    if system != System("shared_memory", SharedMemoryTransport.algorithm):
        return None
    if nbytes == 16 << 20:
        return {"all-gather": 3.0, "reduce-scatter": 8.0}.get(operation)
    return 2.0 if nbytes == 4096 else None


def _shares_moved(case: Case) -> int:
    """Return the number of times that each byte is sent: 2 for an all-reduce, 1 for a gather or reduction."""
    return 2 if case.operation == "all-reduce" else 1


def _sent(case: Case, group: dist.ProcessGroup) -> Row:
    if case.tally is None:
        return {"messages": None, "sent_bytes": None}
    sent = torch.tensor([case.tally.messages, case.tally.nbytes])
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    messages, nbytes = sent.tolist()
    return {"messages": messages, "sent_bytes": nbytes}


def _fitted(rows: Sequence[Row]) -> list[Row]:
    """Fit links to the times of each transport, add their predictions to the rows, and return a row per link."""
    links = []
    for transport in dict.fromkeys(row["transport"] for row in rows if row["transport"] in LINKS):
        ours = [row for row in rows if row["transport"] == transport and row["algorithm"] in IN_RING_ORDER]
        loads = [row["load"] for row in ours if row["load"] is not None]
        for key in ("ms_p50", "cpu_ms_p50"):
            link = fit(ours, key=key, overlaps=LINKS[transport].overlaps)
            errors = [1e3 * predicted(row, link) / row[key] - 1 for row in ours]
            if key == "ms_p50":
                for row, error in zip(ours, errors, strict=True):
                    row |= _rounded({"predicted_ms": (1 + error) * row[key], "prediction_error": error})
            off = sorted(map(abs, errors))
            common = {name: ours[0][name] for name in ("transport", "ranks", "threads", *machine())}
            found = {"key": key, **link._asdict(), **_rounded({"error_p50": median(off), "error_max": off[-1]})}
            links.append({"bench": "ring-fit", **common, "load": max(loads, default=None), **found})
    return links


def _rounded(values: Row) -> Row:
    """Return the values, rounded to the significant digits."""
    return {key: float(f"{value:.{_DIGITS}g}") for key, value in values.items()}


def _report(rows: list[Row], file: Path) -> None:
    """Replace the rows of the same number of ranks in the file, and print the table."""
    replace_rows(file, "ranks", {rows[0]["ranks"]}, rows)
    print(f"{differences(rows)}\n\n{_goals(rows)}\n", flush=True)


def _goals(rows: Iterable[Row]) -> str:
    """Return a summary of the goals that were reached."""
    lines = [
        f"- {row['operation']} of {row['nbytes']} bytes by {row['transport']} {row['algorithm']}: "
        f"{row['speedup']:.2f} times gloo's, goal {row['goal']:g}: {'reached' if row['reached'] else 'NOT reached'}"
        for row in rows
        if row.get("goal") is not None
    ]
    return "\n".join(lines)


def _run_rank(options: argparse.Namespace, group: dist.ProcessGroup) -> None:
    """Measure as one of the ranks."""
    device = device_of_rank()
    rows = measure(options.sizes, systems_on(device, options.algorithms), options.rounds, group, device)
    if group.rank() == 0:
        _report(rows, options.out / f"ring-{device.type}.jsonl")


_SHOWN = (2**12, 2**20, 2**24, 2**26)
"""Sizes in the table, in bytes."""


def render_speedups(rows: Sequence[Row]) -> str:
    """Return the table of speedups over gloo, with 2 and with 4 ranks."""
    took = [row for row in rows if row["bench"] == "ring"]
    header = ["collective", "transport", *(f"{size_words(size)}, {ranks} ranks" for size in _SHOWN for ranks in (2, 4))]
    cells = [header]
    for operation in ("reduce-scatter", "all-gather", "all-reduce"):
        for transport, algorithm in (("shared_memory", "direct"), ("p2p", "ring")):
            ours = {
                (row["nbytes"], row["ranks"]): row["speedup"]
                for row in took
                if (row["operation"], row["transport"], row["algorithm"]) == (operation, transport, algorithm)
            }
            speedups = (f"{ours[nbytes, ranks]:.1f}" for nbytes in _SHOWN for ranks in (2, 4))
            cells.append([operation, f"`{transport}`", *speedups])
    first = took[0]
    heading = (
        f"Medians of interleaved calls on fp32 buffers, `shared_memory` by `direct`, `p2p` by `ring`; "
        f"{first['threads']} thread per rank; {where(first)}."
    )
    return f"{heading}\n\n{markdown_table(cells)}"


def size_words(nbytes: int) -> str:
    """Return a size in its largest unit."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def systems_on(device: torch.device, algorithms: Sequence[Algorithm]) -> list[System]:
    """Return the systems of a device, the peer first. `collectives` always adds in ring order."""
    peer, transports = (GLOO, TRANSPORTS) if device.type == "cpu" else (NCCL, ("p2p",))
    return [System(peer), *(System(*pair) for pair in product(transports, algorithms)), System("collectives", "ring")]


def _check(options: argparse.Namespace) -> None:
    if min(options.ranks) < 2:
        raise ValueError("--ranks must be at least 2: one rank sends nothing")


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or measure if a launcher started this process as a rank. Return the exit status."""
    return run_bench("bench.ring", arguments, _run_rank, _check)
