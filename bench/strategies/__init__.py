"""The strategies of data parallelism: ways to train one model over several ranks, each in one function.

`python -m bench.strategies` runs them (`run.py`). Read `replicas.py` first, then `rings.py` and `sharded.py`, as in
`docs/data-parallelism.md`. `batch_size.py` trains with larger batches.
"""
