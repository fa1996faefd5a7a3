"""Where ShardLite is slower or larger than something beside it: `python -m bench.support.losses` prints the table.

Each line is the worst of the newest runs under `bench/results/`. `docs/measured.md` has the table, and a reason for
each line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.support.table import RESULTS, Row, markdown_table
from shardlite.apps.report.cells import system_name, texts, unit
from shardlite.apps.report.rows import bench_of, by_bench, by_setting, read_rows

Where = Mapping[str, str]

_SAME = ("ranks", "nbytes")
"""Keys in which two rows of a run must agree to be compared."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A number of ShardLite's that is compared with another one of the same run; less is better."""

    what: str
    bench: str
    key: str
    ours: Where
    beside: Where
    name: str = ""
    """What `beside` is called, if it is no system."""


LOSSES = (
    Loss(
        what="Peak in tensors, stage 3",
        bench="step",
        key="peak_bytes",
        ours={"system": "stage3"},
        beside={"system": "fsdp2"},
    ),
    Loss(
        what="Peak of a process, stage 3",
        bench="footprint",
        key="pss_bytes",
        ours={"system": "stage3"},
        beside={"system": "fsdp2"},
    ),
    Loss(
        what="Held between steps, stage 3",
        bench="footprint",
        key="between_bytes",
        ours={"system": "stage3"},
        beside={"system": "fsdp2"},
    ),
    Loss(
        what="Step over shared memory, stage 3",
        bench="step",
        key="ms_p50",
        ours={"system": "stage3"},
        beside={"system": "ddp"},
    ),
    Loss(
        what="Step over gloo, stage 3",
        bench="step",
        key="ms_p50",
        ours={"system": "p2p"},
        beside={"system": "ddp"},
    ),
    Loss(
        what="Collective over gloo",
        bench="ring",
        key="ms_p50",
        ours={"transport": "p2p", "algorithm": "ring"},
        beside={"transport": "gloo"},
        name="gloo's own",
    ),
    Loss(
        what="Host per unit, tiny blocks",
        bench="host",
        key="us_per_unit_p50",
        ours={"system": "stage3"},
        beside={"system": "ddp"},
    ),
    Loss(
        what="Host per unit, messages to many ranks",
        bench="host-fake",
        key="cpu_us_per_unit_p50",
        ours={"system": "p2p"},
        beside={"system": "fsdp2"},
    ),
    Loss(
        what="Save",
        bench="checkpoint",
        key="seconds_p50",
        ours={"system": "save"},
        beside={"system": "raw"},
        name="plain writes",
    ),
    Loss(
        what="Asynchronous save, until it is on the disk",
        bench="checkpoint",
        key="seconds_p50",
        ours={"system": "async_save"},
        beside={"system": "save"},
    ),
    Loss(
        what="AdamW with 8-bit moments on a CPU",
        bench="kernels",
        key="ms_p50",
        ours={"operation": "adamw", "format": "fp32 weights, int8 moments, fp32 gradient"},
        beside={"operation": "_fused_adamw_", "format": "fp32 weights, fp32 moments, fp32 gradient"},
        name="PyTorch's, in fp32",
    ),
)


def table(results: Path = RESULTS) -> str:
    """Return the table of all rows under a folder."""
    return render(read_rows([results]))


def render(rows: Sequence[Row]) -> str:
    """Return a line for each loss of which there are rows."""
    found = by_bench(rows)
    head = ["what", "worst in", "beside", "its", "ShardLite's", "times as much"]
    lines = [line for loss in LOSSES if (line := _line(loss, found.get(loss.bench, [])))]
    return markdown_table([head, *lines], words=3)


def _line(loss: Loss, rows: Sequence[Row]) -> list[str]:
    """Return the line of the pair in which ShardLite does worst."""
    worst = max(_pairs(loss, rows), key=lambda pair: float(pair[0][loss.key] / pair[1][loss.key]), default=None)
    if worst is None:
        return []
    ours, its = (row[loss.key] for row in worst)
    cells = [f"{texts(loss.key, [each])[0]} {unit(loss.key, [each])[1]}" for each in (its, ours)]
    name = loss.name or system_name(worst[1]["system"])
    return [loss.what, _place(worst[0]), name, *cells, f"{ours / its:.2f}"]


def _pairs(loss: Loss, rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield the rows that are compared, of the newest run of each setting."""
    labels = bench_of(loss.bench, rows).labels if rows else ()
    for newest, *_ in by_setting(rows, labels):
        for ours in newest:
            for beside in newest:
                alike = all(ours.get(key) == beside.get(key) for key in _SAME)
                if alike and _is(ours, loss.ours, loss.key) and _is(beside, loss.beside, loss.key):
                    yield ours, beside


def _is(row: Row, where: Where, key: str) -> bool:
    return where.items() <= row.items() and bool(row.get(key))


def _place(row: Row) -> str:
    """Return what was run."""
    size = {key: f"{value / scale:g} {name}" for key, (scale, name) in _sizes(row).items() if (value := row[key])}
    words = [row.get("operation") if "nbytes" in row else row.get("model"), *size.values()]
    return ", ".join([*filter(None, words), *([f"{row['ranks']} ranks"] if "ranks" in row else [])])


def _sizes(row: Row) -> dict[str, tuple[float, str]]:
    """Return by what and in which unit the size of a buffer is told."""
    known = {"nbytes": unit("nbytes", [row.get("nbytes", 0)]), "numel": (1e6, "million elements")}
    return {key: each for key, each in known.items() if key in row}


if __name__ == "__main__":
    print(table())
