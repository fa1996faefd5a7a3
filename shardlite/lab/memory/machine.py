"""Describe where and when a row was measured."""

import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from shardlite.cli import usable_cores


def machine(device: torch.device | None = None) -> dict[str, str]:
    """Return entries for every row: processor and cores, versions, and date. A GPU `device` is named first."""
    gpu = f"{torch.cuda.get_device_name(device)}; " if device is not None and device.type == "cuda" else ""
    return {
        "machine": f"{gpu}{_processor()}, {usable_cores()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    """Return the processor's name from `/proc/cpuinfo`, or from `platform` if that file does not exist."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
