"""Checks and measurements of ShardLite on one GPU in nine minutes: `python -m bench.gpu`. See `docs/gpu.md`.

The machine needs PyTorch, Triton and a checkout. The output is a folder with rows, a log, a table, and an archive of
these three files. Read `run.py` first: it lists the probes. Each probe is a function that runs in its own process.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]

if find_spec("shardlite_kernels") is None:  # the package is not installed
    sys.path.append(str(ROOT / "kernels"))
