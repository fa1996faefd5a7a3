"""Copies of a run in memory that outlives its ranks, and on the next host.

In: the objects of a run, or the folder of a run. Out: the copies' headers, and the restored run. Read `copies.py`
first, then `snapshot.py` (one copy) and `holder.py` (the process that keeps it).
"""
