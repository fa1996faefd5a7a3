"""Benches. Each verifies results before it measures time, and writes rows that name the machine to `bench/results/`."""
