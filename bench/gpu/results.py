"""Tables of the rows of `bench.gpu`. The heading of each probe's table names the measurement and the machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from statistics import median

from bench.gpu.run import PROBES as ALL
from shardlite.lab.table import PROBES, PROBES_OF_RANKS, Row, markdown_table, table_of


def render(rows: Sequence[Row]) -> str:
    """Return one table for each probe, in the order of `PROBES`."""
    known = [row for row in rows if row["probe"] in PROBES and "status" not in row]
    order = list(PROBES)
    known.sort(key=lambda row: order.index(row["probe"]))
    return "\n\n".join(_render_probe(probe, list(some)) for probe, some in groupby(known, key=lambda row: row["probe"]))


def render_summary(rows: Sequence[Row]) -> str:
    """Return a table with a line for each finished probe: status, and number of failed parts."""
    cells = [["probe", "status", "s", "rows", "failed"]]
    for ended in (row for row in rows if "status" in row):
        failed = sum("error" in row for row in rows if row["probe"] == ended["probe"])
        cells.append([ended["probe"], ended["status"], f"{ended['seconds']:g}", str(ended["rows"]), str(failed)])
    return markdown_table(cells, words=2)


def _render_probe(probe: str, rows: Sequence[Row]) -> str:
    words, columns = PROBES[probe]["words"], PROBES[probe]["columns"]
    runs = list(dict.fromkeys(row["run"] for row in rows if "run" in row))
    dates = " and ".join(dict.fromkeys(row["date"] for row in rows))
    if runs:
        old = f"Medians of {len(runs)} runs of older versions, at {', '.join(runs)}; not measured since."
        words = f"{old} {PROBES[probe]['before']} Systems ran one after the other, FSDP2 first."
        rows, columns = medians_of_runs(rows), {f"?{name}": cell for name, cell in columns.items()}
    first = next(iter(PROBES[probe]["columns"]))  # the first column is also named like its key
    shown = [row for row in rows if row.get(first) is not None or "error" in row]
    where = f"{rows[0]['card']}, torch {rows[0]['torch']}, {dates}."
    dry = "**Dry: run without a GPU, so times are meaningless.**" if rows[0]["dry"] else ""
    head = " ".join(filter(None, (f"**{PROBES[probe]['heading']}.**", words, dry, where)))
    return f"{head}\n\n{table_of(columns, shown, words=2)}"


def medians_of_runs(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each model and system of several runs: the medians of its numbers, and the number of runs."""
    found = []
    for model, system in dict.fromkeys((row.get("model"), row.get("system")) for row in rows):
        same = [row for row in rows if (row.get("model"), row.get("system")) == (model, system)]
        numbers = {key: [row[key] for row in same if row.get(key) is not None] for key in same[0]}
        medians = {key: median(each) for key, each in numbers.items() if each and isinstance(each[0], int | float)}
        found.append(same[0] | medians | {"runs": len(same), "vs_fsdp2": numbers.get("ms_p50_vs_fsdp2")})
        found[-1].pop("exposed_ms", None)  # of steps that the host bounds, too
    return found


# ---- several GPUs ---------------------------------------------------------------------------------------------------


def render_ranks(rows: Sequence[Row]) -> str:
    """Return the tables of one run, after a line about its origin."""
    origin = next((row for row in rows if row["probe"] == "run"), {})
    commit = (origin.get("commit") or "unknown")[:12] + ("" if origin.get("clean") else ", with changes")
    first = next((row for row in rows if "card" in row), rows[0])
    where = f"{first.get('ranks')} x {first.get('card')}, torch {first.get('torch')}, {first.get('date')}"
    dry = "**Dry: run without GPUs, so times are meaningless.** " if first.get("dry") else ""
    texts = [f"{dry}{where}; commit {commit}; `{origin.get('command', 'python -m bench.gpu')}`."]
    modules = {probe.name: probe.module for probe in ALL}
    found: dict[str, list[Row]] = defaultdict(list)
    for row in _beside_fsdp2(rows):
        found[modules.get(row["probe"], "")].append(row)
    for module, described in PROBES_OF_RANKS.items():
        if found[module]:
            shown = sorted(found[module], key=lambda row: str(row.get("model")))
            texts.append(f"{described['words']}\n\n{table_of(described['columns'], shown, words=2)}")
    return "\n\n".join(texts)


def _beside_fsdp2(rows: Sequence[Row]) -> list[Row]:
    """Return the results, each with its time and memory divided by those of FSDP2 with the same model."""
    found = [row for row in rows if "status" not in row]
    fsdp2 = {row["model"]: row for row in found if row["probe"] == "fsdp2" and "ms_p50" in row}
    return [row | _ratios(row, fsdp2.get(row.get("model"), {})) for row in found]


def _ratios(row: Row, fsdp2: Row) -> Row:
    keys = [key for key in ("ms_p50", "peak_bytes") if row.get(key) and fsdp2.get(key)]
    return {f"{key}_vs_fsdp2": row[key] / fsdp2[key] for key in keys}
