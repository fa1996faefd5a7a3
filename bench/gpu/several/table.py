"""Tables of the rows of `python -m bench.gpu --ranks N`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from bench.gpu.run import PROBES
from bench.gpu.table import _GIB, _escaped, _number, _text
from bench.support.table import Columns, Row, markdown_table

_STEPS = (
    "Each system trained alone. Compute is in bf16, reductions are in fp32, AdamW is fused, and gradients are clipped "
    "to 1.0 except with `in_backward`. FSDP2 keeps its last block gathered. Times and bytes are of the rank with the "
    "largest. *GB/s* is (W - 1) / W x 8 bytes per parameter (two gathers in bf16, a reduction in fp32) / the step. "
    "*used* is all used memory of the GPU, including NCCL's."
)


def _against(system: str, key: str, rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return a cell with a number divided by that of another system with the same model."""
    base = {row["model"]: row[key] for row in rows if row.get("system") == system and row.get(key)}

    def cell(row: Row) -> str:
        there = row.get(key) and base.get(row.get("model"))
        return f"{row[key] / base[row['model']]:.2f}" if there else ""

    return cell


def _tables(rows: Sequence[Row]) -> list[tuple[str, str, list[Row], Columns]]:
    """Return heading, description, rows and columns of each table. A table has the rows with its first key."""
    modules = {probe.name: probe.module for probe in PROBES}
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "status" not in row:
            found[modules.get(row["probe"], "")].append(row)
    machine, links, paused = found["checks"], found["several.links"], found["several.pause"]
    steps = sorted(found["several.steps"], key=lambda row: row.get("model", ""))
    return [
        (
            "The machine",
            "",
            machine,
            {
                "GPUs": _text("ranks"),
                "card": _text("card"),
                "machine": _text("machine"),
                "driver": _text("driver"),
                "torch": _text("torch"),
                "triton": _text("triton"),
                "NCCL": _text("nccl"),
            },
        ),
        (
            "Steps",
            _STEPS,
            steps,
            {
                "model": _text("model"),
                "system": lambda row: row.get("system") or row["probe"],
                "step, ms": _number("ms_p50"),
                "p20 to p80": lambda row: f"{row['ms_p20']:.1f} to {row['ms_p80']:.1f}" if "ms_p20" in row else "",
                "/ FSDP2's": _against("fsdp2", "ms_p50", steps),
                "GB/s": _number("bus_gbps", 0),
                "host, ms": _number("host_ms_p50"),
                "peak, GiB": _number("peak_bytes", 2, _GIB),
                "peak / FSDP2's": _against("fsdp2", "peak_bytes", steps),
                "used, GiB": _number("used_bytes", 2, _GIB),
                "note": _text("note"),
            },
        ),
        (
            "Bandwidth between the GPUs",
            "Bus bandwidth is bytes / time x (W - 1) / W. *products* is the time of matrix products beside the "
            "collective, divided by their time alone. Without *kernels* of NCCL, copy engines do the work.",
            links,
            {
                "collective": lambda row: row.get("collective") or row["probe"],
                "MB": _number("nbytes", 1, 1e6),
                "ms": _number("ms_p50", 3),
                "GB/s": _number("algorithm_gbps", 1),
                "bus GB/s": _number("bus_gbps", 1),
                "products": _number("products"),
                "kernels": _number("kernels", 0),
                "note": _text("note"),
            },
        ),
        (
            "A rank that pauses",
            "The host of the last rank pauses for 50 ms between each forward and its backward. *host* is that of the "
            "slowest other rank.",
            paused,
            {
                "model": _text("model"),
                "system": lambda row: row.get("system") or row["probe"],
                "step, ms": _number("ms_p50"),
                "with pauses, ms": _number("paused_ms_p50"),
                "lost, ms": _number("lost_ms"),
                "host, ms": _number("host_ms_p50"),
                "host with pauses, ms": _number("paused_host_ms_p50"),
            },
        ),
    ]


def render(rows: Sequence[Row]) -> str:
    """Return the tables of one run, with a line about its origin."""
    origin = next((row for row in rows if row["probe"] == "run"), {})
    commit = (origin.get("commit") or "unknown")[:12] + ("" if origin.get("clean") else ", with changes")
    first = next((row for row in rows if "card" in row), rows[0])
    where = f"{first.get('ranks')} x {first.get('card')}, torch {first.get('torch')}, {first.get('date')}"
    dry = "**Dry: run without GPUs, so times are meaningless.** " if first.get("dry") else ""
    texts = [f"{dry}{where}; commit {commit}; `{origin.get('command', 'python -m bench.gpu')}`."]
    for heading, words, some, columns in _tables(rows):
        if some:
            failed = any("error" in row for row in some)
            cells = [[*columns, *["failed"] * failed]]
            for row in some:
                cells.append([*(cell(row) for cell in columns.values()), *[_escaped(row.get("error", ""))] * failed])
            texts.append(f"**{heading}.** {words}".strip() + f"\n\n{markdown_table(cells, words=2)}")
    return "\n\n".join(texts)
