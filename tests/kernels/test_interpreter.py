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
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[2], capture_output=True, text=True, timeout=300)
    report = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, report
    assert int(re.search(r"(\d+) passed", report).group(1)) > 80, report
