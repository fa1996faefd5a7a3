"""Benchmarks of checkpoints, restarts and failure detection, and the behaviour of FSDP2 in special cases."""
