"""Checks and measures ShardLite on one GPU in 8.5 minutes: `python -m bench.gpu`. See `docs/gpu.md`.

In: a bare checkout on a machine with PyTorch and Triton. Out: a folder with rows, a log, a table and an archive of the
three. Read `run.py` first: it lists the probes. Each probe is a function of a module here, in a process of its own.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]

if find_spec("shardlite_kernels") is None:  # nothing is installed: this is a bare checkout
    sys.path.append(str(ROOT / "kernels"))
