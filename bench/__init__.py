"""Benchmarks of ShardLite. Each one verifies results, then measures. Its rows in `bench/results/` name the machine."""
