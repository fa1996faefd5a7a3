"""Collectives beside gloo's own: `python -m bench.ring` measures (`run.py`), `bench.ring.table` prints the rows."""
