"""Models for tests, and batches for them.

`small.py` has models each of which has something that is easily got wrong when parameters are sharded, `hf.py` those of
well-known architectures, `residual.py` the plainest one with repeated blocks.
"""
