"""Keys, names and numbers of rows as text: `ms_p50` is "time, ms", and a size in bytes is in MiB.

A unit is part of a key: `cpu_ms_p50`, `peak_bytes`, `us_per_unit_p20`. `_vs_` makes a ratio: `ms_vs_ddp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_LONG = 4
"""Items of a list that are all shown."""

QUANTILES = ("_p20", "_p50", "_p80")
_UNITS = {"ms": "ms", "us": "µs", "seconds": "s", "gbps": "GB/s"}
_SIZES = {"bytes", "nbytes"}
_BINARY = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
_WORDS = {
    **{word: word.upper() for word in ("cpu", "gpu", "pss", "ddp", "fsdp1", "fsdp2", "lr")},
    **{"ms": "time", "us": "time", "seconds": "time", "gbps": "rate", "bytes": "size", "nbytes": "size"},
    **{"algbw": "algorithm", "busbw": "bus", "main": "main thread"},
}
_TITLES = {
    "mb_per_s": "MB/s",
    "stall_p50": "the step waits, s",
    "bytes_per_element": "bytes per element",
    "bytes_per_parameter": "bytes per parameter",
    "vs_raw": "/ raw",
    "cpu_vs_raw": "CPU time / raw",
    "pss_bytes": "step (PSS)",
    "nbytes": "buffer",
    "losses": "loss",
    "speedup": "peer's time / this",
    "cpu_speedup": "peer's CPU time / this",
    "chunk_bytes": "chunk",
    "ms_p50_without": "time without negotiation",
    "cpu_ms_p50": "CPU time",
    "cpu_ms_p50_without": "CPU time without negotiation",
    "talks_cpu_ms": "CPU time of negotiation",
    "talks_share": "share of negotiation",
}
_SYSTEMS = {
    "floor": "floor: no communication",
    "plain": "plain model",
    "ddp": "DDP",
    "zero": "DDP, ZeroRedundancyOptimizer",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    **{f"deepspeed{stage}": f"DeepSpeed, ZeRO-{stage}" for stage in range(1, 4)},
    **{f"stage{stage}": f"ShardLite, stage {stage}" for stage in range(4)},
    **{name: f"ShardLite, {name}" for name in ("p2p", "collectives", "int8", "split24", "compact")},
    **{name: f"ShardLite, {name}" for name in ("bf16", "bf16, split24", "bf16, int8")},
    "in_backward": "ShardLite, in-backward step",
    "in_backward, prefetch 0": "ShardLite, in-backward step, prefetch 0",
    "tree": "ShardLite, in the order of a tree",
    "shardlite": "ShardLite",
    "torch": "PyTorch",
}


def title(key: str) -> str:
    """Return what a key of a row is called, without its unit: `"peak"` for `"peak_bytes"`."""
    if key in _TITLES:
        return _TITLES[key]
    stem, _, inner = key.partition(".")
    if inner:
        return f"{title(stem)}: {inner}"
    for quantile in QUANTILES:
        stem = stem.removesuffix(quantile)
    own, _, other = stem.partition("_vs_")
    words = own.split("_")
    if not other and len(words) > 1:  # the unit is named by `unit`
        words = [word for word in words if word not in _UNITS and word not in _SIZES] or words
    name = " ".join(_WORDS.get(word, word) for word in words)
    return f"{name} / {_WORDS.get(other, other)}'s" if other else name


def unit(key: str, values: Sequence[Any]) -> tuple[float, str]:
    """Return what numbers under a key are divided by for people, and the unit then; none for counts and ratios."""
    words = key.partition(".")[0].split("_")
    most = max(filter(math.isfinite, map(abs, numbers(values))), default=0)
    if "vs" in words or key in ("bytes_per_element", "bytes_per_parameter"):
        return 1, ""
    if _SIZES & set(words):
        return next(((size, name) for size, name in _BINARY if most >= size), (1, "bytes"))
    return 1, next((_UNITS[word] for word in words if word in _UNITS), "")


def heading(key: str, values: Sequence[Any]) -> str:
    """Return the title of a key with the unit in which `texts` shows its values."""
    name = unit(key, values)[1]
    return f"{title(key)}, {name}" if name else title(key)


def texts(key: str, values: Sequence[Any]) -> list[str]:
    """Return the values under a key as text, in one unit and with about three digits that count."""
    if not all(value is None or is_number(value) for value in values):
        return [_word(key, value) for value in values]
    scale = unit(key, values)[0]
    scaled = [value if value is None or scale == 1 else value / scale for value in values]
    sizes = [abs(value) for value in numbers(scaled) if value and math.isfinite(value)]
    most, least = max(sizes, default=0), min(sizes, default=0)
    whole = all(isinstance(value, int) for value in numbers(scaled))
    ratio = "vs" in key.split("_") or key in ("share", "speedup", "cpu_speedup")
    decimals = 0 if whole or not most else 2 if ratio else max(0, 2 - math.floor(math.log10(most)))
    uneven = not whole and not ratio and (most > 100 * least or most < 0.1)
    return ["" if value is None else _number(value, decimals, uneven) for value in scaled]


def numbers(values: Sequence[Any]) -> list[float]:
    """Return those values that are numbers."""
    return [value for value in values if is_number(value)]


def is_number(value: Any) -> bool:
    """Return whether a value is a number; `True` and `False` are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def system_name(name: str) -> str:
    """Return what a system is called in a plot or a table."""
    return _SYSTEMS.get(name, name)


def row_name(key: str, value: Any) -> str:
    """Return one label of a row as a part of its name."""
    return f"{title(key)} {value}" if is_number(value) else _word(key, value)


def _number(value: float, decimals: int, uneven: bool) -> str:
    if uneven and abs(value) < 999.5:
        return f"{value:.3g}"
    return f"{value:,.{0 if uneven else decimals}f}"


def _word(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        shown = texts(key, value)
        return ", ".join(shown) if len(shown) <= _LONG else f"{shown[0]} to {shown[-1]}, {len(shown)} values"
    if value is None or is_number(value):
        return "" if value is None else f"{value:g}"
    return system_name(str(value)) if key == "system" else str(value)
