"""Optimizers that step whole parameters, compared with AdamW, with other libraries, and with unsharded steps.

`python -m bench.optimizers` measures the step time of Muon, sharded by ShardLite, by FSDP2, and not sharded (`run.py`).
Read `builds.py` first. `peers.py` has the packages to compare with, `check.py` verifies results, and `wire.py` counts
bytes. `losses.py` tunes and compares AdamW and Muon, and `sweep.py`
trains with every optimizer that `libraries.py` names.
"""
