"""Tables of the rows of `bench.gpu`. The heading of each probe's table names the measurement and the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from shardlite.lab.table import Columns, Row, markdown_table


def _number(key: str, digits: int = 2, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else f"{row[key] / scale:.{digits}f}"


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row.get(key, ""))


def _yes(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else "yes" if row[key] else "no"


def _percent(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else f"{100 * row[key]:.3f} %"


def _pairs(key: str) -> Callable[[Row], str]:
    return lambda row: ", ".join(f"{name} {count:g}" for name, count in (row.get(key) or {}).items())


def _range(key: str) -> Callable[[Row], str]:
    return lambda row: f"{min(row[key]):.2f} to {max(row[key]):.2f}" if row.get(key) else ""


_GIB = float(2**30)

FAKE = (
    "One GPU is rank 0 of 8. Kernels, streams and memory are real, but **each collective is a kernel that waits**, "
    "also with FSDP2. Gathers and reductions share one link. Each has it alone for (W - 1) / W x bytes / bandwidth and "
    "a latency, at the NVLink rate that `shardlite plan` assumes for a DGX H100. This includes neither NCCL's use of "
    "multiprocessors and memory nor waits for other ranks."
)
BEFORE = {
    "fake8": (
        "One GPU is rank 0 of 8, and **each collective is a sleep**. A fake exchange cost the host some 18 calls of "
        "CUDA, and an exact reduction of a Llama block made 14 exchanges; now it makes 7. Gathers and reductions slept "
        "side by side, each at the full rate. FSDP2 gathered its last block twice. Only ShardLite was captured, and "
        "with a mask for attention, which PyTorch's fastest kernels exclude. Llama had 4 blocks."
    ),
    "host": (
        "One GPU is rank 0 of 8, and **each collective does nothing**. The model stopped the host once per step, to "
        "look for packed sequences."
    ),
}
"""How rows with a key `run` were measured, by an earlier version of the probe."""

ALONE = "One rank, so no data is sent."

_PROBES: dict[str, tuple[str, str, Columns]] = {
    "environment": (
        "The machine",
        "",
        {
            "card": _text("card"),
            "memory, GiB": _number("memory_bytes", 0, _GIB),
            "driver": _text("driver"),
            "torch": _text("torch"),
            "triton": _text("triton"),
            "NCCL": _text("nccl"),
        },
    ),
    "nccl": (
        "NCCL's collectives on a side stream",
        f"{ALONE} The host must not wait, and results must be in stream order. Other processes compiled kernels "
        "meanwhile.",
        {
            "collective": _text("collective"),
            "connection": _text("connection"),
            "host, µs": _number("host_us", 1),
            "call, µs": _number("us", 1),
        },
    ),
    "bits": (
        "Bits of kernels",
        "Compared with their references, on one GPU.",
        {
            "kernel": _text("kernel"),
            "format": _text("format"),
            "contract": _text("contract"),
            "relative error": lambda row: "" if row.get("relative_error") is None else f"{row['relative_error']:.1e}",
            "note": _text("note"),
        },
    ),
    "bandwidth": (
        "Bandwidth of kernels",
        "Each kernel runs alone on the GPU. *share* is relative to the bandwidth of a copy of 2 GiB. The cache of the "
        "GPU is emptied before each run, except for slices, which run without their messages.",
        {
            "kernel": _text("kernel"),
            "format": _text("format"),
            "elements": lambda row: f"{row['numel']:,}" if row.get("numel") else "",
            "ranks": _text("ranks"),
            "ms": _number("ms_p50", 3),
            "GB/s": _number("gbps", 0),
            "share": _number("share_of_copy"),
            "launching, ms": _number("launch_ms_p50", 3),
            "host, ms": _number("host_ms_p50", 3),
        },
    ),
    "fake8": (
        "Steps of eight ranks, seven of them fake",
        f"{FAKE} Compute is in bf16, reductions are in fp32, AdamW is fused, and gradients are clipped to 1.0 except "
        "with `in_backward`. Systems take turns. A ratio is the median of ratios of the same turn, and *again* is "
        "FSDP2 at the end. *floor* is the plain model without communication.",
        {
            "model": _text("model"),
            "system": _text("system"),
            "step, ms": _number("ms_p50"),
            "/ FSDP2's": _number("ms_p50_vs_fsdp2"),
            "lowest to highest": _range("vs_fsdp2"),
            "runs": _text("runs"),
            "bound by": _text("bound"),
            "link, ms": _number("link_ms"),
            "exposed, ms": _number("exposed_ms"),
            "host, ms": _number("host_ms_p50"),
            "in fakes, ms": _number("fakes_ms"),
            "peak, GiB": _number("peak_bytes", 2, _GIB),
            "peak / FSDP2's": _number("peak_bytes_vs_fsdp2"),
            "predicted, GiB": _number("predicted_bytes", 2, _GIB),
        },
    ),
    "calls": (
        "The price of each call of the host, and counts x prices beside real steps",
        "A price is the host's time per call. The last lines show what a system adds to the plain model per block and "
        "step, without collectives: the counts of `bench.host --gpu-path` x prices, and measured. *agree*: to 15 %.",
        {
            "call": _text("call"),
            "µs": _number("us"),
            "measured, µs": _number("measured_us", 1),
            "agree": _yes("agree"),
        },
    ),
    "graphs": (
        "Launched and captured steps of eight ranks, seven of them fake",
        f"{FAKE} The ways show why captured steps may hide less communication. *collectives by edges*: how many of "
        "the graph's collectives have so many predecessors.",
        {
            "way": _text("way"),
            "model": _text("model"),
            "connections": _text("connections"),
            "launched, ms": _number("launched_ms_p20"),
            "captured, ms": _number("captured_ms_p20"),
            "host, ms": _number("launched_host_ms_p50"),
            "edges": _text("edges"),
            "collectives by edges": _pairs("fakes_by_edges"),
        },
    ),
    "host": (
        "The host of eight ranks, seven of them fake, with communication that takes no time",
        "One GPU is rank 0 of 8, and **each collective takes no time**, also with FSDP2. *idle* is the time without a "
        "kernel from the end of a backward to the first kernel of the next forward.",
        {
            "model": _text("model"),
            "system": _text("system"),
            "step, ms": _number("ms_p50"),
            "runs": _text("runs"),
            "host per unit, µs": _number("host_us_per_unit", 0),
            "launches per unit": _number("launches_per_unit", 1),
            "blocking CUDA calls per step": _pairs("blocking_calls"),
            "idle, ms": _number("idle_ms"),
        },
    ),
    "twin": (
        "Training compared with a twin",
        f"{ALONE} The model is GPT-2 of transformers in bf16 with checkpointing, and the twin is the plain model with "
        "PyTorch's fused AdamW on fp32 weights. Losses of all steps are compared with the twin's. The controls are "
        "the twin in fp32, and twins whose initial weights differ by 2^-16. *allowed* is a multiple of the largest "
        "difference of a control.",
        {
            "system": _text("system"),
            "steps": _text("steps"),
            "largest difference": _percent("off"),
            "allowed": _percent("bound"),
            "the twin's bits": _yes("same_as_twin"),
            "stage 3's bits": _yes("same_as_stage3"),
            "last loss": _number("last_loss", 5),
        },
    ),
    "compiled": (
        "Compiled blocks",
        f"{ALONE} 4 residual MLP blocks, bf16.",
        {
            "compiled": _text("compiled"),
            "system": _text("system"),
            "step, ms": _number("ms_p50", 3),
            "host, ms": _number("host_ms_p50", 3),
        },
    ),
    "pair": (
        "Several ranks on one card",
        "Processes take turns on one GPU, so **times do not predict those of several cards**; bits do. `p2p` sends "
        "over gloo, through host memory.",
        {
            "ranks": _text("ranks"),
            "transport": _text("transport"),
            "difference from one process": lambda row: "" if row.get("off") is None else f"{row['off']:.1e}",
            "bits of p2p": _yes("same_bits"),
            "last step, ms": _number("ms", 1),
            "note": _text("note"),
        },
    ),
}
"""Heading, description and columns of each probe's table. Rows that lack the first column are not in the table."""


def render(rows: Sequence[Row]) -> str:
    """Return one table for each probe, in the order of `_PROBES`."""
    known = [row for row in rows if row["probe"] in _PROBES and "status" not in row]
    order = list(_PROBES)
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
    heading, words, columns = _PROBES[probe]
    runs = list(dict.fromkeys(row["run"] for row in rows if "run" in row))
    dates = " and ".join(dict.fromkeys(row["date"] for row in rows))
    if runs:
        old = f"Medians of {len(runs)} runs of older versions, at {', '.join(runs)}; not measured since."
        words, rows = f"{old} {BEFORE[probe]} Systems ran one after the other, FSDP2 first.", medians_of_runs(rows)
    first = next(iter(columns))  # the first column is also named like its key
    shown = [row for row in rows if row.get(first) is not None or "error" in row]
    columns = {name: cell for name, cell in columns.items() if not runs or any(map(cell, shown))}
    failed = any("error" in row for row in shown)
    cells = [[*columns, *["failed"] * failed]]
    for row in shown:
        cells.append([*(cell(row) for cell in columns.values()), *[_escaped(row.get("error", ""))] * failed])
    where = f"{rows[0]['card']}, torch {rows[0]['torch']}, {dates}."
    dry = "**Dry: run without a GPU, so times are meaningless.**" if rows[0]["dry"] else ""
    head = " ".join(filter(None, (f"**{heading}.**", words, dry, where)))
    return f"{head}\n\n{markdown_table(cells, words=2)}"


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


def _escaped(error: Any) -> str:
    text = str(error).replace("|", "/").replace("`", "'").replace("\n", " ")
    return f"`{text}`" if text else ""
