"""Collectives compared with gloo's own: `python -m bench.ring` measures (`run.py`), `table.py` prints the rows."""
