"""Measure the time from the kill of a rank until all other ranks raise, by transport.

    python -m bench.faults.notice --ranks 2

starts new ranks for each kill. Rows go to `bench/results/notice-MODEL-Nranks.jsonl`.

| key | meaning |
|---|---|
| `seconds_p20`, `_p50`, `_p80` | seconds from the kill of a rank until the slowest other rank raises `CommError` |
| `kills` | number of killed ranks, each in a separate run |

`torchrun` detects the end of a rank within its `--monitor-interval`, 0.1 s by default, and sends SIGTERM to the other
ranks of its host. In this measurement the ranks ignore SIGTERM. So they are like ranks on other hosts, which get no
SIGTERM and are informed only by the library.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shardlite import CommError
from shardlite.lab.compared.systems import build_shardlite
from shardlite.lab.compared.workloads import WORKLOADS
from shardlite.lab.ranks import one_of_them, parser_of, start_ranks
from shardlite.lab.table import Row, report
from shardlite.lab.timer import WARM_UP, quantiles

TRANSPORTS = ("shared_memory", "p2p", "collectives")
"""Values of `Route.transport` that are measured."""


def train(transport: str, folder: Path, options: argparse.Namespace) -> None:
    """Train until the rank with the highest number kills itself. Each other rank writes the time of its error."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with one_of_them() as group:
        rank, workload = group.rank(), WORKLOADS[options.model]
        trainer = build_shardlite(workload, group, stage=3, transport=transport)
        for step in range(WARM_UP):
            trainer.step(workload.batch(rank, step))
        if rank == group.size() - 1:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                trainer.step(workload.batch(rank, 0))
        except CommError:
            (folder / f"noticed-{rank}").write_text(str(time.time()))
        os._exit(0)  # without cleanup, because the connections of the group are broken


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Train `options.kills` times over each transport, each time until a rank is killed. Return a row per transport."""
    rows: list[Row] = []
    for transport in TRANSPORTS:
        seconds = []
        for kill in range(options.kills):
            print(f"{transport}: kill {kill + 1} of {options.kills}", file=sys.stderr, flush=True)
            seconds.append(seconds_until_noticed(transport, folder / f"{transport}-{kill}", options))
        rows.append(
            {
                **WORKLOADS[options.model].row("notice", options.ranks),
                "transport": transport,
                "kills": options.kills,
                **quantiles("seconds", seconds, 3),
            }
        )
    return rows


def seconds_until_noticed(transport: str, folder: Path, options: argparse.Namespace) -> float:
    """Start ranks, one of which kills itself. Return the seconds until the slowest of the other ranks raises.

    Raises:
        RuntimeError: If a rank does not raise within 30 seconds. `torchrun` then kills this rank.
    """
    folder.mkdir()
    settings = ["--model", options.model, "--way", transport, "--folder", str(folder)]
    # The exit status is ignored: it always reports a failure, because a rank is killed.
    start_ranks("bench.faults.notice", options.ranks, settings, quiet=True)
    noticed = [float(each.read_text()) for each in folder.glob("noticed-*")]
    if len(noticed) != options.ranks - 1:
        raise RuntimeError(f"{transport}: {len(noticed)} of {options.ranks - 1} ranks noticed the death of their peer")
    return max(noticed) - float((folder / "killed").read_text())


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, or measure if a launcher started this process as a rank. Return the exit status."""
    parser = parser_of("bench.faults.notice")
    options = parser.parse_args(arguments)
    if options.ranks < 2 or options.kills < 1:
        parser.error("--ranks must be at least 2, and --kills at least 1: one rank is killed, another rank raises")
    if options.way:
        train(options.way, options.folder, options)
    else:
        with tempfile.TemporaryDirectory(prefix="shardlite-bench-") as folder:
            rows = measure(options, Path(folder))
        report(rows, options.out / f"notice-{options.model}-{options.ranks}ranks.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
