"""Benchmarks of ShardLite's collectives, compared with gloo's or NCCL's: `python -m bench.ring` (`run.py`)."""
