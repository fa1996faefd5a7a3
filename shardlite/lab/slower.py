"""Table of cases in which ShardLite takes more time or memory than a peer, printed by `python -m shardlite.lab.slower`.

Each line is the worst case of the newest runs under `bench/results/`. `docs/measured.md` has the table, with a reason
for each line.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardlite.lab.table import DEFAULTS, RESULTS, Row, markdown_table, quantity, read_rows, system_name, unit

Where = Mapping[str, str]

_SETTINGS = (
    *("machine", "model", "words", "training", "parameters", "operation", "cluster", "mode", "device", "ranks"),
    *("world_size", "threads", "transport", "precision", "accumulation", "clip", "numel", "order", "optimizer"),
    *("units", "batch", "context", "steps", "budget_bytes", "within", "malloc", "busy", "probe", "dry"),
)
"""Rows with equal values of these keys are comparable, except for keys that label the rows of a bench."""

_LABELS = {
    "ring": ("transport", "algorithm", "nbytes"),
    "host-fake": ("system", "ranks"),
    "kernels": ("system", "operation", "format"),
}
"""Keys that distinguish the rows of a run of a bench, if not only `system` does."""

_SAME = ("ranks", "nbytes")
"""Two rows of a run are compared only if they have the same values of these keys."""


class Case(NamedTuple):
    """A measured value of ShardLite to compare with a peer in the same run. Lower is better."""

    what: str
    bench: str
    key: str
    ours: Where
    beside: Where
    name: str = ""
    """Name of the peer, if the peer is not a system."""


_STAGE3, _FSDP2, _DDP = {"system": "stage3"}, {"system": "fsdp2"}, {"system": "ddp"}
_P2P, _SAVE = {"system": "p2p"}, {"system": "save"}
_ADAMW = {"operation": "adamw", "format": "fp32 weights, int8 moments, fp32 gradient"}
_TORCHS = {"operation": "_fused_adamw_", "format": "fp32 weights, fp32 moments, fp32 gradient"}
_RING = {"transport": "p2p", "algorithm": "ring"}

CASES = (
    Case("Peak in tensors, stage 3", "step", "peak_bytes", _STAGE3, _FSDP2),
    Case("Peak of a process, stage 3", "footprint", "pss_bytes", _STAGE3, _FSDP2),
    Case("Held between steps, stage 3", "footprint", "between_bytes", _STAGE3, _FSDP2),
    Case("Step over shared memory, stage 3", "step", "ms_p50", _STAGE3, _DDP),
    Case("Step over gloo, stage 3", "step", "ms_p50", _P2P, _DDP),
    Case("Collective over gloo", "ring", "ms_p50", _RING, {"transport": "gloo"}, "gloo's own"),
    Case("Host per unit, tiny blocks", "host", "us_per_unit_p50", _STAGE3, _DDP),
    Case("Host per unit, messages to many ranks", "host-fake", "cpu_us_per_unit_p50", _P2P, _FSDP2),
    Case("Save", "checkpoint", "seconds_p50", _SAVE, {"system": "raw"}, "plain writes"),
    Case("Asynchronous save, until it is on the disk", "checkpoint", "seconds_p50", {"system": "async_save"}, _SAVE),
    Case("AdamW with 8-bit moments on a CPU", "kernels", "ms_p50", _ADAMW, _TORCHS, "PyTorch's, in fp32"),
)


def table(results: Path = RESULTS) -> str:
    """Return the table of all rows under a folder."""
    files = sorted(results.glob("*.jsonl"))
    return render([{**row, "file": file.name} for file in files for row in read_rows([file])])


def render(rows: Sequence[Row]) -> str:
    """Return a line for each case that has rows."""
    head = ["quantity", "worst case", "peer", "peer's value", "ShardLite's value", "ratio"]
    found = ([row for row in rows if row["bench"] == case.bench] for case in CASES)
    lines = [line for case, its in zip(CASES, found, strict=True) if (line := _line(case, its))]
    return markdown_table([head, *lines], words=3)


def _line(case: Case, rows: Sequence[Row]) -> list[str]:
    """Return the line of the worst pair of rows."""
    worst = max(_pairs(case, rows), key=lambda pair: float(pair[0][case.key] / pair[1][case.key]), default=None)
    if worst is None:
        return []
    ours, its = (row[case.key] for row in worst)
    cells = [quantity(case.key, each) for each in (its, ours)]
    name = case.name or system_name(worst[1]["system"])
    return [case.what, _place(worst[0]), name, *cells, f"{ours / its:.2f}"]


def _pairs(case: Case, rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield the pairs of rows to compare, from the newest run of each setting."""
    for newest, *_ in by_setting(rows, _LABELS.get(case.bench, ("system",))):
        for ours in newest:
            for beside in newest:
                alike = all(ours.get(key) == beside.get(key) for key in _SAME)
                if alike and _is(ours, case.ours, case.key) and _is(beside, case.beside, case.key):
                    yield ours, beside


def by_setting(rows: Iterable[Row], labels: Collection[str]) -> list[list[list[Row]]]:
    """Return the runs of each setting, newest run first. `labels` are the keys that distinguish the rows of a run.

    A run is the set of rows from one file and day that can be compared.
    """
    settings: dict[str, dict[tuple[str, ...], list[Row]]] = {}
    for row in rows:
        setting = json.dumps([row.get(key, DEFAULTS.get(key)) for key in _SETTINGS if key not in labels])
        run = (row["date"], row["torch"], row["file"])
        settings.setdefault(setting, {}).setdefault(run, []).append(row)
    return [[run for _, run in sorted(runs.items(), reverse=True)] for runs in settings.values()]


def _is(row: Row, where: Where, key: str) -> bool:
    return where.items() <= row.items() and bool(row.get(key))


def _place(row: Row) -> str:
    """Return a description of the run: model or operation, size, and ranks."""
    size = {key: f"{value / scale:g} {name}" for key, (scale, name) in _sizes(row).items() if (value := row[key])}
    words = [row.get("operation") if "nbytes" in row else row.get("model"), *size.values()]
    return ", ".join([*filter(None, words), *([f"{row['ranks']} ranks"] if "ranks" in row else [])])


def _sizes(row: Row) -> dict[str, tuple[float, str]]:
    """Return the size keys of a row, each with its scale and unit."""
    known = {"nbytes": unit("nbytes", [row.get("nbytes", 0)]), "numel": (1e6, "million elements")}
    return {key: each for key, each in known.items() if key in row}


if __name__ == "__main__":
    print(table())
