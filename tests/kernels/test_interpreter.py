"""Kernels in Triton's interpreter, which stands in for a GPU, and where Triton is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import seconds
from tests.support.twins.sharded import slow

ROOT = Path(__file__).parents[2]


BOTH = ("hop", "rows", "stats", "scale", "cast", "quantize", "split")
"""Kernels whose tests run on the CPU path, too."""


@pytest.mark.parametrize("which", ["not slow", slow("slow")])
def test_kernels_are_interpreted(which):
    """The tests in `interpreted/`, and those of `BOTH`, in a process whose Triton interprets kernels."""
    files = ["tests/kernels/interpreted", *(f"tests/kernels/test_{name}.py" for name in BOTH)]
    command = [sys.executable, "-m", "pytest", "-q", "-m", which, "-p", "no:cacheprovider", *files]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds(600))
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_triton_cpu_tensors_work_and_others_are_refused():
    program = """
import sys
sys.modules["triton"] = None  # importing it fails, as where there is no wheel
import torch
from shardlite_kernels import hop
out = torch.zeros(4)
hop(out, torch.ones(4), torch.ones(4), 2)
assert out.tolist() == [1.0] * 4
meta = out.to("meta")
try:
    hop(meta, meta, meta)
except RuntimeError as error:
    print(error)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "kernels")}
    command, limit = [sys.executable, "-c", program], seconds(100)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr
    assert "tensors on meta need Triton, which is not installed" in done.stdout
