"""Tables of the rows of `bench.gpu`. The heading of each probe's table names the measurement and the machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
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
    """Return a table with a line for each finished probe: status, short result, and number of failed parts."""
    cells = [["probe", "status", "result", "s", "rows", "failed"]]
    for ended in rows:
        if "status" in ended:
            found = [row for row in rows if row["probe"] == ended["probe"] and "status" not in row]
            failed = sum("error" in row for row in found)
            right = [row for row in found if "error" not in row]
            short = _IN_SHORT[ended["probe"]](right) if right and ended["probe"] in _IN_SHORT else ""
            cells.append(
                [ended["probe"], ended["status"], short, f"{ended['seconds']:g}", str(ended["rows"]), str(failed)]
            )
    return markdown_table(cells, words=3)


def _named(rows: Sequence[Row], name: Callable[[Row], str], key: str, digits: int) -> str:
    """Return the name and value of each row that has the key, as text."""
    return ", ".join(f"{name(row)} {row[key]:.{digits}f}" for row in rows if row.get(key) is not None)


def _steps_in_short(rows: Sequence[Row]) -> str:
    parts = [row for row in rows if row.get("system") not in (None, "fsdp2", "plan")]
    by_model = groupby(parts, key=lambda row: row["model"])
    return "step / FSDP2's: " + "; ".join(
        f"{model}: {_named(list(some), lambda row: row['system'], 'ms_p50_vs_fsdp2', 2)}" for model, some in by_model
    )


def _host_in_short(rows: Sequence[Row]) -> str:
    return "µs per unit: " + _named(rows, lambda row: row["system"], "host_us_per_unit", 0)


def _calls_in_short(rows: Sequence[Row]) -> str:
    both = [f"{row['call']}: {row['us']:.0f} of {row['measured_us']:.0f}" for row in rows if row.get("agree")]
    return f"predicted µs per block: {'; '.join(both) or 'none agrees with the measured'}"


def _graphs_in_short(rows: Sequence[Row]) -> str:
    parts = [f"{row['captured_ms_p20'] - row['launched_ms_p20']:+.1f}" for row in rows if "captured_ms_p20" in row]
    return "captured - launched, ms: " + ", ".join(parts)


def _twin_in_short(rows: Sequence[Row]) -> str:
    same = [row["same_as_stage3"] for row in rows if "same_as_stage3" in row]
    off = max((row["off"] for row in rows if "bound" in row), default=0.0)
    return f"{sum(same)} of {len(same)} runs have the losses of stage 3; formats are at most {100 * off:.2f} % off"


def _bandwidth_in_short(rows: Sequence[Row]) -> str:
    ours = [row for row in rows if row.get("system") == "shardlite"]
    return "share of a copy: " + _named(ours, lambda row: f"{row['kernel']} ({row['format']})", "share_of_copy", 2)


_IN_SHORT: dict[str, Callable[[list[Row]], str]] = {
    "environment": lambda rows: f"{rows[0]['card']}, torch {rows[0]['torch']}, Triton {rows[0]['triton']}",
    "nccl": lambda rows: f"{len(rows)} calls return early and keep the order of their stream",
    "bits": lambda rows: f"{len(rows)} formats of kernels keep their contract",
    "bandwidth": _bandwidth_in_short,
    "calls": _calls_in_short,
    "graphs": _graphs_in_short,
    "fake8": _steps_in_short,
    "host": _host_in_short,
    "twin": _twin_in_short,
    "compiled": lambda rows: "ms: " + _named(rows, lambda row: f"{row['compiled']} {row['system']}", "ms_p50", 2),
    "pair": lambda rows: "right: " + ", ".join(f"{row['transport']} of {row['ranks']} ranks" for row in rows),
}


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
