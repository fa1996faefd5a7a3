"""Keys and values of rows as text.

A key contains the unit of its values (`cpu_ms_p50`, `peak_bytes`). `_vs_` denotes a ratio (`ms_vs_ddp`). `names.json`
has the names of systems, words and units.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NAMES = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
_BINARY = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def title(key: str) -> str:
    """Return the name of a key without its unit: `"CPU time"` for `"cpu_ms_p50"`."""
    words = key.removesuffix("_p50").replace("_vs_", "_/_").replace(".", "_:_").split("_")
    return " ".join(_NAMES["words"].get(word, word) for word in words).replace(" :", ":")


def unit(key: str, values: Sequence[Any]) -> tuple[float, str]:
    """Return the divisor of the shown values, and the name of their unit. Counts and ratios have an empty name."""
    words = key.partition(".")[0].split("_")
    if "vs" in words:
        return 1, ""
    if {"bytes", "nbytes"} & set(words):
        most = max(map(abs, filter(is_number, values)), default=0)
        return next((each for each in _BINARY if most >= each[0]), (1, "bytes"))
    return 1, next((_NAMES["units"][word] for word in words if word in _NAMES["units"]), "")


def heading(key: str, values: Sequence[Any]) -> str:
    """Return the title of a key, with the unit in which `texts` shows the values."""
    return ", ".join(filter(None, (title(key), unit(key, values)[1])))


def texts(key: str, values: Sequence[Any]) -> list[str]:
    """Return the values under a key as text, all in the same unit and with three digits."""
    scale = unit(key, values)[0]
    return [_text(key, value, scale) for value in values]


def quantity(key: str, value: Any) -> str:
    """Return a value with its unit."""
    return f"{texts(key, [value])[0]} {unit(key, [value])[1]}".strip()


def is_number(value: Any) -> bool:
    """Return whether a value is a number. `True` and `False` are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def system_name(name: str) -> str:
    """Return the name of a system in plots and tables."""
    return str(_NAMES["systems"].get(name, name))


def _text(key: str, value: Any, scale: float) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, list):
        return f"{texts(key, value[:1])[0]} to {texts(key, value[-1:])[0]}, {len(value)} values" if value else ""
    if not is_number(value):
        return system_name(str(value)) if key == "system" else str(value)
    if isinstance(value, int) and scale == 1:
        return f"{value:,}"
    scaled = value / scale
    return f"{scaled:,.0f}" if abs(scaled) >= 99.95 else f"{scaled:#.3g}"
