"""Tables of the rows of `python -m bench.gpu --ranks N`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bench.gpu.run import PROBES
from bench.gpu.table import _GIB, _escaped, _number, _text
from shardlite.lab.table import Columns, Row, markdown_table

_NAMED: Columns = {"model": _text("model"), "system": lambda row: str(row.get("system", row["probe"]))}

_TABLES: dict[str, tuple[str, Columns]] = {
    "checks": (
        "**The machine.**",
        {
            "GPUs": _text("ranks"),
            "machine": _text("machine"),
            "driver": _text("driver"),
            "torch": _text("torch"),
            "triton": _text("triton"),
            "NCCL": _text("nccl"),
        },
    ),
    "several.steps": (
        "**Steps.** Each system trains alone. Compute is in bf16, reductions are in fp32, AdamW is fused, and "
        "gradients are clipped to 1.0 except with `in_backward`. FSDP2 keeps its last block gathered. Times and bytes "
        "are of the rank with the largest. *GB/s* is (W - 1) / W x 8 bytes per parameter (two gathers in bf16, a "
        "reduction in fp32) / the step. *used* is all used memory of the GPU, including NCCL's.",
        {
            **_NAMED,
            "step, ms": _number("ms_p50"),
            "p20 to p80": lambda row: f"{row['ms_p20']:.1f} to {row['ms_p80']:.1f}" if "ms_p20" in row else "",
            "/ FSDP2's": _number("ms_p50_vs_fsdp2"),
            "GB/s": _number("busbw_gbps", 0),
            "host, ms": _number("host_ms_p50"),
            "peak, GiB": _number("peak_bytes", 2, _GIB),
            "peak / FSDP2's": _number("peak_bytes_vs_fsdp2"),
            "used, GiB": _number("used_bytes", 2, _GIB),
            "note": _text("note"),
        },
    ),
    "several.links": (
        "**Bandwidth between the GPUs.** Bus bandwidth is bytes / time x (W - 1) / W. *products* is the time of matrix "
        "products beside the collective, divided by their time alone. A gather by copy engines without *kernels* of "
        "NCCL used them.",
        {
            "collective": lambda row: str(row.get("collective", row["probe"])),
            "MB": _number("nbytes", 1, 1e6),
            "ms": _number("ms_p50", 3),
            "GB/s": _number("algbw_gbps", 1),
            "bus GB/s": _number("busbw_gbps", 1),
            "products": _number("products"),
            "kernels": _number("kernels", 0),
            "note": _text("note"),
        },
    ),
    "several.pause": (
        "**A rank that pauses.** The host of the last rank pauses for 50 ms between each forward and its backward. "
        "*host* is that of the slowest other rank.",
        {
            **_NAMED,
            "step, ms": _number("ms_p50"),
            "with pauses, ms": _number("paused_ms_p50"),
            "lost, ms": _number("lost_ms"),
            "host, ms": _number("host_ms_p50"),
            "host with pauses, ms": _number("paused_host_ms_p50"),
        },
    ),
}
"""Description and columns of the table of each module's probes."""


def render(rows: Sequence[Row]) -> str:
    """Return the tables of one run, after a line about its origin."""
    origin = next((row for row in rows if row["probe"] == "run"), {})
    commit = (origin.get("commit") or "unknown")[:12] + ("" if origin.get("clean") else ", with changes")
    first = next((row for row in rows if "card" in row), rows[0])
    where = f"{first.get('ranks')} x {first.get('card')}, torch {first.get('torch')}, {first.get('date')}"
    dry = "**Dry: run without GPUs, so times are meaningless.** " if first.get("dry") else ""
    texts = [f"{dry}{where}; commit {commit}; `{origin.get('command', 'python -m bench.gpu')}`."]
    modules = {probe.name: probe.module for probe in PROBES}
    found: dict[str, list[Row]] = defaultdict(list)
    for row in _beside_fsdp2(rows):
        found[modules.get(row["probe"], "")].append(row)
    for module, (words, columns) in _TABLES.items():
        failed = any("error" in row for row in found[module])
        cells = [[*columns, *["failed"] * failed]]
        for row in sorted(found[module], key=lambda row: str(row.get("model"))):
            cells.append([*(cell(row) for cell in columns.values()), *[_escaped(row.get("error", ""))] * failed])
        if found[module]:
            texts.append(f"{words}\n\n{markdown_table(cells, words=2)}")
    return "\n\n".join(texts)


def _beside_fsdp2(rows: Sequence[Row]) -> list[Row]:
    """Return the results, each with its time and memory divided by those of FSDP2 with the same model."""
    found = [row for row in rows if "status" not in row]
    fsdp2 = {row["model"]: row for row in found if row["probe"] == "fsdp2" and "ms_p50" in row}
    return [row | _ratios(row, fsdp2.get(row.get("model"), {})) for row in found]


def _ratios(row: Row, fsdp2: Row) -> Row:
    keys = [key for key in ("ms_p50", "peak_bytes") if row.get(key) and fsdp2.get(key)]
    return {f"{key}_vs_fsdp2": row[key] / fsdp2[key] for key in keys}
