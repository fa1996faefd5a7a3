"""Runs `interpreted/` in a process of its own, where Triton's interpreter stands in for a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreted"


def test_triton_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[2], capture_output=True, text=True, timeout=600)
    report = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, report
    assert int(re.search(r"(\d+) passed", report).group(1)) > 80, report


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
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parents[2] / "kernels")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "tensors on meta need Triton, which is not installed" in done.stdout
