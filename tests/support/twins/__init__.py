"""Models that train side by side and must have the same bits.

`plain.py` is plain data parallel, written out: the `Twin` of a sharded model. `sharded.py` looks inside a sharded model
and trains one beside its twin, as a `Pair`. `duos.py` trains a model with the ordinary AdamW step and with the one
inside the backward.
"""
