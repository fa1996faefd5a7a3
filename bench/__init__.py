"""Measurements. Each verifies a result, then times it, and writes rows that name the machine under `bench/results/`."""
