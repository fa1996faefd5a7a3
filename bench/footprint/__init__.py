"""What a training step holds in memory, by system: `python -m bench.footprint` measures (`run.py`).

What it measures with is `shardlite/apps/footprint/`, which `shardlite footprint` runs on a user's own model.
"""
