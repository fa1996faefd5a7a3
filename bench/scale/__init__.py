"""Weak and strong scaling: measured on this machine (`run.py`), and simulated for up to 4096 ranks (`simulated.py`).

Run `python -m bench.scale` to measure. `results.py` has the table and the figure of the rows.
"""
