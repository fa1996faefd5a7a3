"""Optimizers that step whole parameters: the step time of Muon, sharded by ShardLite, by FSDP2, and not sharded.

`python -m bench.optimizers` measures them (`run.py`). Read `systems.py` first. `peers.py` has the packages to compare
with, `check.py` verifies results, and `wire.py` counts bytes.
"""
