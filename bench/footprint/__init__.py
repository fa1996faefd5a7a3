"""What a training step holds in memory, by system: `python -m bench.footprint` measures (`run.py`).

It measures with `shardlite/apps/memory/`, which `shardlite memory` runs on a user's own model.
"""
