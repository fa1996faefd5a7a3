"""Memory of a training step, by system: `python -m bench.footprint` (`run.py`).

The measurement is in `shardlite/lab/memory/`, which `shardlite memory` runs on a user's model.
"""
