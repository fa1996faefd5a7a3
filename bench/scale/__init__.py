"""Weak and strong scaling: measured on this machine (`run.py`), simulated there and to 4096 ranks (`simulated.py`).

`python -m bench.scale` measures, `table.py` makes the table and the figure of its rows.
"""
